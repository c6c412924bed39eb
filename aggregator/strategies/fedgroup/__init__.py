"""aggregator.strategies.fedgroup.strategy."""
