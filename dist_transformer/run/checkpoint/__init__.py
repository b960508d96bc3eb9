"""Checkpoints: written in the background, verified, read in any world."""
