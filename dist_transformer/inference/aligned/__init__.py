"""Alignments of translations, and what is made from them."""
