"""dist_transformer: train the Transformer of "Attention Is All You Need" for translation, on one CPU or many GPUs."""

__version__ = "0.1.0"
