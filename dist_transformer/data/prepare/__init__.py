"""Parallel text → data folder."""
