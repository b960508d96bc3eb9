"""The training command, whose ranks every launcher starts alike."""

from dist_transformer.train import main, parse_arguments

__all__ = ["main", "parse_arguments"]
