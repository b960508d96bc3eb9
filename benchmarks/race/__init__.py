"""A race of toolkits: how long each trains until its translations reach a BLEU score."""
