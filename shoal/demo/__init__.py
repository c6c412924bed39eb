"""shoal.demo."""
