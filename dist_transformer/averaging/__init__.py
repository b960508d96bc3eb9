"""Weights of a run → a model folder."""
