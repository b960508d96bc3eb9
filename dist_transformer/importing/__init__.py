"""Models of other programs, taken over only if ours agree with them."""
