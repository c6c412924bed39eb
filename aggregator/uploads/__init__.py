"""aggregator.uploads."""
