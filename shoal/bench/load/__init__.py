"""shoal.bench.load."""
