"""Long runs of the load bench; `make long` runs them, `make test` doesn't. Each saves its result in results."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path

import pytest

pytest.importorskip("torch")

from shoal_lab.bench.load import soak
from shoal_lab.bench.load.measurement import measure

from shoal.report import record
from shoal.transport.local_broker import free_port
from tests.helpers.page_readers import page_reader

pytestmark = pytest.mark.long
RESULTS = Path(__file__).parents[2] / "results"
DEVICES = int(os.environ.get("SHOAL_LONG_DEVICES", "500"))
RUNS = int(os.environ.get("SHOAL_LONG_RUNS", "20"))
SOAK_DEVICES = 30
SOAK_MINUTES = float(os.environ.get("SHOAL_SOAK_MINUTES", "30"))
ROUNDS = 3
SPREAD_S = 10.0
HOUR_S = 3600
PAGE_DEVICES, PAGE_ROUNDS, PAGE_PAIRS = 100, 20, 15
PAGE_MEMORY_MB = 25
"""Most memory that the fleet page adds to the aggregator."""


def keep(name, data):
    """Write a result with the date, the commit and the machine."""
    day = time.strftime("%Y-%m-%d", time.gmtime())
    record.save(RESULTS / "long.jsonl", data, command=["make", "long"], name=f"long-{name}-{day}")


@pytest.mark.timeout(3 * HOUR_S)
def test_runs_in_a_row_all_end():
    found = []
    for _ in range(RUNS):
        found.append(measure(DEVICES, rounds=ROUNDS))
        keep("runs-in-a-row", {"runs": found})
    assert [d["uploads_counted"] for d in found] == [DEVICES * (ROUNDS + 1)] * RUNS


@pytest.mark.timeout(HOUR_S)
@pytest.mark.parametrize("fault", ["aggregator", "broker"])
def test_kill_in_mid_round_costs_no_upload(fault):
    """A process killed in the middle of a round costs no upload."""
    data = measure(DEVICES, rounds=ROUNDS, fault=fault, spread_s=SPREAD_S)
    keep(f"kill-{fault}", {"killed": fault, **data})
    assert data["uploads_counted"] == data["uploads_expected"] == DEVICES * (ROUNDS + 1)


@pytest.mark.timeout(HOUR_S)
def test_the_fleet_page_costs_little():
    """Pairs in turn, since the machine's speed changes; times are saved, and only memory, which does not, is asserted."""
    pairs = []
    for _ in range(PAGE_PAIRS):
        port, options = free_port(), {"rounds": PAGE_ROUNDS, "prepared": True}
        off = measure(PAGE_DEVICES, **options)
        with page_reader(port):
            pairs.append((off, measure(PAGE_DEVICES, page_port=port, **options)))
    ratios = [on["seconds_per_round_median"] / off["seconds_per_round_median"] for off, on in pairs]
    without, with_page = ([pair[i] for pair in pairs] for i in (0, 1))
    keep("page", {"seconds_ratio_median": statistics.median(ratios), "without": without, "with": with_page})
    more_mb = [on["aggregator_rss_mb_max"] - off["aggregator_rss_mb_max"] for off, on in pairs]
    assert max(more_mb) <= PAGE_MEMORY_MB


@pytest.mark.timeout(2 * HOUR_S + 60 * SOAK_MINUTES)
def test_a_soak_stays_flat(tmp_path):
    data = soak.measure(SOAK_DEVICES, SOAK_MINUTES)
    keep("soak", data)
    soak.plot([data], tmp_path / "soak.png")
    assert data["flat"] == dict.fromkeys(data["flat"], True)
