"""aggregator.strategies.cfl.strategy."""
