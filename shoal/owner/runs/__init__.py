"""shoal.owner.runs."""
