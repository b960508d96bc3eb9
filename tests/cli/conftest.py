"""Run folders with weights, as the tests of averaging have them."""

from tests.averaging.conftest import mixed, run

__all__ = ["mixed", "run"]
