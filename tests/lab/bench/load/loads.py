"""Samples of a load fleet that never ran."""


def sample(at_s, closed, **changes):
    """Return a sample with sound values, some of them changed."""
    cpu = dict.fromkeys(("aggregator_cpu_s", "broker_cpu_s", "main_cpu_s", "drivers_cpu_s", "keeper_cpu_s"), 0.0)
    memory = {"rss_mb": 60.0, "rss_mb_max": 60.0, "shard_rss_mb_max": 0.0, "keeper_rss_mb_max": 0.0}
    other = {"open_files": 20, "shard_cpu_s": [], "coordinator_vector_bytes": 0, "database_bytes": 200_000}
    return {"at_s": at_s, "closed": closed, **cpu, **memory, **other, **changes}
