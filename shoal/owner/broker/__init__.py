"""shoal.owner.broker."""
