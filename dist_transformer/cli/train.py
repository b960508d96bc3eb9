"""Train: the entry point of every launcher, as a command."""

from dist_transformer.train import main

__all__ = ["main"]
