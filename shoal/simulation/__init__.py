"""Many devices in one process, vectorised, driving the strategies that the aggregator runs."""
