"""shoal.experiments.cfl."""
