"""Memory, time and hardware of a run, as formulas."""
