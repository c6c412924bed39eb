"""Means that wait on the disk."""

from aggregator.numerics.rows import FilePages, drop_pages
from aggregator.storage import means
from aggregator.storage.means import StoredMean
from aggregator.strategies.robust import RobustMean
from tests.helpers.plans import contribution, run_plan


def test_long_mean_is_on_the_disk(tmp_path, monkeypatch):
    """It has the bits of the mean in memory."""
    plan, given = run_plan("fedavg"), [contribution(f"dev-{i}", [i, 0.3, -i]) for i in range(3)]
    mean = RobustMean(plan)(given, "uniform")
    monkeypatch.setattr(means, "STORED_FROM_BYTES", 12)
    stored = StoredMean(plan, None, tmp_path)(given, "uniform")
    assert isinstance(stored.base.obj, FilePages)
    drop_pages([stored])
    assert stored.tobytes() == mean.tobytes()
