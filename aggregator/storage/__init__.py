"""aggregator.storage."""
