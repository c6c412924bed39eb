"""shoal.simulation.engine."""
