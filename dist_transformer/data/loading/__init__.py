"""Data folder → packs → micro-batches."""
