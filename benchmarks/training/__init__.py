"""Training compared with its peers."""
