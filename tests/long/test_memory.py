"""A device that trains a large model in a memory control group; `make long` runs it, `make test` doesn't."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from shoal_lab.bench import rounds

from edge_client.storage.finished_models import FinishedModels
from shoal.simulation.process_fleet import Stage
from tests.long.test_load import HOUR_S, keep

pytestmark = pytest.mark.long
LIMIT_MB = 256
UNITS = 6289
"""Units of the hidden layer of an MLP of 5 million parameters."""
LARGE_UNITS = 12_579
"""Units of one of 10 million."""
MOST_DEVICE_MB = 410
"""Peak of a device with it, its personal finish included: eight models above what the demo's model takes."""
MOST_AGGREGATOR_MB = 318
"""Peak of the aggregator with it: six models above its own."""
FINISH_S = 180


@pytest.fixture
def group():
    """A control group of LIMIT_MB below this process's own, of version 1 or 2; skip where the system permits none."""
    own = dict(line.split(":", 2)[1:] for line in Path("/proc/self/cgroup").read_text().splitlines())
    first = "memory" in own
    parent = Path("/sys/fs/cgroup/memory" if first else "/sys/fs/cgroup") / own.get("memory" * first, "").strip("/")
    made = parent / f"shoal-test-{os.getpid()}"
    try:
        made.mkdir()
        (made / ("memory.limit_in_bytes" if first else "memory.max")).write_text(str(LIMIT_MB << 20))
    except OSError as error:
        pytest.skip(f"this system permits no memory control group: {error}")
    yield made
    made.rmdir()


@pytest.mark.timeout(HOUR_S)
def test_five_million_parameters_in_256_mb(group, monkeypatch):
    """The kernel would end a device that takes more, and the bench raises an error then."""

    class Grouped(Stage):
        def start_device(self, name, data, *arguments):
            program = super().start_device(name, data, *arguments)
            if name == self.devices[0]:
                (group / "cgroup.procs").write_text(str(program.pid))
            return program

    monkeypatch.setattr(rounds, "Stage", Grouped)
    data = rounds.measure(3, rounds=3, hidden=UNITS)
    keep("small-memory", {"limit_mb": LIMIT_MB, **data})


class Finished(Stage):
    """A stage whose run is over once each device has had its personal finish, which belongs to the peak."""

    def wait(self, run, timeout_s):
        records, end = super().wait(run, timeout_s), time.monotonic() + FINISH_S
        while not all(map(self._has_chosen, self.devices)):
            assert time.monotonic() < end
            time.sleep(0.5)
        return records

    def _has_chosen(self, name):
        store = FinishedModels(self.device_dir(name))
        return any(store.personal(model) is not None for model in store.models())


@pytest.mark.timeout(HOUR_S)
@pytest.mark.parametrize("executor", ["onnxruntime", "numpy"])
def test_ten_million_parameters(executor, monkeypatch):
    monkeypatch.setattr(rounds, "Stage", Finished)
    monkeypatch.setenv("SHOAL_EDGE_EXECUTOR", executor)
    data = rounds.measure(3, rounds=2, hidden=LARGE_UNITS)
    keep(f"large-model-{executor}", {"executor": executor, **data})
    assert data["device_rss_mb_max"] <= MOST_DEVICE_MB
    assert data["aggregator_rss_mb_max"] <= MOST_AGGREGATOR_MB
