"""A local page to try models."""
