"""Hangs, failures and time limits: how all ranks end, with one message."""
