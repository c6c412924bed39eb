"""shoal.owner.keys."""
