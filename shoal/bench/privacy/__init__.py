"""shoal.bench.privacy."""
