"""The training command, with the same entry point as every launcher."""

from dist_transformer.train import main, parse_arguments

__all__ = ["main", "parse_arguments"]
