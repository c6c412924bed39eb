"""shoal.experiments.fedgroup."""
