"""The run folder: lock, ledger, weights, verification."""
