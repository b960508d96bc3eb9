"""The format of a data folder, and its readers."""
