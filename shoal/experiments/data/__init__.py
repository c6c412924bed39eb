"""shoal.experiments.data."""
