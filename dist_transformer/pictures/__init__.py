"""The pictures that readers of the paper expect."""
