"""Knowledge before a run starts: its plan, a dry run, the checks of a job."""
