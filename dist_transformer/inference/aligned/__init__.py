"""What became what in a translation: alignments, and what is made from them."""
