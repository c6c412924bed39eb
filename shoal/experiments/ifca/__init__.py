"""shoal.experiments.ifca."""
