"""shoal.report."""
