"""Translations that are drawn from a model, and the choice among them."""
