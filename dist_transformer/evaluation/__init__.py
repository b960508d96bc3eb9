"""Metrics and sample translations."""
