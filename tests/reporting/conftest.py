"""A reporter in a folder of its own."""

from tests.reporting.recorded import reporter

__all__ = ["reporter"]
