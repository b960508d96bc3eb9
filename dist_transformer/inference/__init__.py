"""Translation and scoring with a model folder."""
