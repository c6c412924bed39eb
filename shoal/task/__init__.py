"""shoal.task."""
