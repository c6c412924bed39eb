"""shoal.bench.numerics."""
