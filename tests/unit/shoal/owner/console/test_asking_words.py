"""Answers as lines and as data."""

import dataclasses

import pytest

from aggregator.status.answers import LogRecord, RunEntry
from shoal.owner.console.asking import record_data, record_line, run_data, run_line

AT = 1_795_000_000
RUN = RunEntry(
    run=2, run_id=bytes(16), algorithm="cfl", phase="round", round=4, rounds=9, stored_at_s=AT, round_at_s=AT
)
RECORD = LogRecord(
    round=4,
    final=False,
    closed_at_s=AT,
    seconds=1.25,
    ordered=8,
    contributed=1,
    absent=7,
    missing=tuple(f"dev-{n}" for n in range(7)),
    declined={"dev-1": "data"},
    loss=0.5,
    correct=3,
    tested=4,
    cluster_sizes=(2, 1),
    events=("split",),
    bytes_up=10,
)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "run 2: cfl, round open, round 4 of 9, last round closed 2026-11-18T11:06:40Z"),
        (
            {"phase": "gathering", "order": "paused by the owner", "round_at_s": None},
            "run 2: cfl, paused by the owner, round 4 of 9",
        ),
        (
            {"order": "stopped by the owner", "phase": "finished", "round_at_s": None},
            "run 2: cfl, finished, stopped by the owner, round 4 of 9",
        ),
        (
            {"phase": "queued", "round": 0, "round_at_s": None},
            "run 2: cfl, begins once no other run is under way, round 0 of 9",
        ),
        (
            {"phase": "not_served", "obstacle": "damaged", "round_at_s": None},
            "run 2: cfl, not served now, round 4 of 9; damaged",
        ),
    ],
)
def test_a_run_is_one_line(changes, line):
    assert run_line(dataclasses.replace(RUN, **changes)) == line


def test_data_have_times_in_iso_8601():
    data = run_data(dataclasses.replace(RUN, round_at_s=None))
    assert (data["stored_at"], data["round_at"], data["run_id"]) == ("2026-11-18T11:06:40Z", None, "00" * 16)
    assert record_data(RECORD)["closed_at"] == "2026-11-18T11:06:40Z"
    assert record_data(RECORD)["cluster_sizes"] == [2, 1]


def test_record_is_one_line():
    """A record is one line with five names at most."""
    assert record_line(RECORD) == (
        "2026-11-18T11:06:40Z round 4: 1 of 8 devices in 1.2 s, loss 0.5, accuracy 75.0%, clusters 2+1, missing dev-0, "
        "dev-1 (data), dev-2, dev-3, dev-4 and 2 more, split"
    )
    bare = dataclasses.replace(
        RECORD, final=True, closed_at_s=None, absent=0, missing=(), tested=0, cluster_sizes=(), events=()
    )
    assert record_line(bare) == "- final round 4: 1 of 8 devices in 1.2 s, loss 0.5"
