"""Text → micro-batches."""
