"""shoal.membership."""
