"""A local page to try models, and an HTTP API for programs."""
