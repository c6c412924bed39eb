"""shoal.transport."""
