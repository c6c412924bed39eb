"""shoal.simulation.trainers."""
