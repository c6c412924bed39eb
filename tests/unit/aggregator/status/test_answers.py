"""Documents of answers: strict on the way in, cut to the limit on the way out."""

import dataclasses
import json

import pytest

from aggregator.status import answers
from aggregator.status.answers import RunEntry, RunPage, cut, decoded, encoded
from aggregator.status.facts import DeviceStatus, RunStatus
from aggregator.status.record import FleetStatus
from shoal.errors import WireError, printable

RUN = RunEntry(run=2, run_id=b"r" * 16, algorithm="cfl", phase="round", round=4, rounds=9)
DEVICES = tuple(DeviceStatus(name=f"dev-{n}", online=True) for n in range(9))
STATUS = FleetStatus(
    fleet="reef",
    running=True,
    connected=True,
    broker="mqtt://b",
    since_s=1,
    problems=(),
    run=RunStatus(run=1, algorithm="cfl", round=1, rounds=2, phase="round"),
    devices=DEVICES,
)


@pytest.mark.parametrize("page", [RunPage((RUN,)), STATUS])
def test_a_document_comes_back_as_it_went(page):
    assert decoded(type(page), encoded(page)) == page


@pytest.mark.parametrize("data", [b"", b"[]", b'{"runs": 1}', b'{"more": 1}', b"\xff", b"[" * 5000])
def test_anything_else_is_malformed(data):
    with pytest.raises(WireError, match="answer is malformed"):
        decoded(RunPage, data)


def test_answer_of_another_version_is_read():
    """A later aggregator adds fields, an earlier one lacks those that have a default."""
    document = json.loads(encoded(RunPage((RUN,))))
    document["forecast"] = [1, 2]
    document["runs"][0]["colour"] = "red"
    del document["runs"][0]["wire"], document["runs"][0]["left_out"]
    assert decoded(RunPage, json.dumps(document).encode()).runs == (RUN,)
    del document["runs"][0]["phase"]
    with pytest.raises(WireError, match=r"lacks 'runs\.0\.phase'"):
        decoded(RunPage, json.dumps(document).encode())


def test_nothing_in_answer_controls_terminal():
    entry = dataclasses.replace(RUN, algorithm="cfl\x1b[2J", obstacle="two\nlines")
    (found,) = decoded(RunPage, encoded(RunPage((entry,)))).runs
    assert (found.algorithm, found.obstacle, found.run_id) == ("cfl?[2J", "two?lines", RUN.run_id)
    assert printable("Küste 7") == "Küste 7"


def test_a_long_answer_is_cut_and_says_so(monkeypatch):
    monkeypatch.setattr(answers, "DOCUMENT_BYTES", 1200)
    status = decoded(FleetStatus, encoded(STATUS))
    assert 0 < len(status.devices) < len(DEVICES)
    (problem,) = status.problems
    assert problem.reason == f"{len(DEVICES) - len(status.devices)} devices are left out of this answer"
    runs = tuple(dataclasses.replace(RUN, run=n) for n in range(1, 40))
    kept = decoded(RunPage, encoded(RunPage(runs))).runs
    assert kept
    assert kept == runs[-len(kept) :]
    assert len(encoded(RunPage(runs))) <= 1200


def test_few_devices_are_not_cut():
    assert cut(STATUS) is STATUS
    assert json.loads(encoded(STATUS))["fleet"] == "reef"
