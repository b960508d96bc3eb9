"""Questions that trainings answer."""
