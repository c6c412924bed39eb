"""shoal.experiments.common."""
