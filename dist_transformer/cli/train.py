"""The training command, with the same entry point as every launcher."""

from dist_transformer.train import main

__all__ = ["main"]
