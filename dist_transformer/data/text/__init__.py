"""Parallel text in files, and the embedded synthetic corpus."""
