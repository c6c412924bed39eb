"""aggregator.rounds."""
