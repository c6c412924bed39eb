"""aggregator.strategies.ifca.strategy."""
