"""Processes: ranks, launchers, devices, outputs."""
