"""shoal.owner.cli."""
