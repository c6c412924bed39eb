"""The feed: snapshots from published facts and stored rounds, built when somebody asks."""

import contextlib
import dataclasses
import json

import pytest

from aggregator.page import feed as feed_module
from aggregator.storage.records import BLOCK_ROUNDS
from aggregator.storage.store import DATABASE, Store
from tests.helpers.pages import record


def test_no_snapshot_before_the_first_facts(place):
    """Before the first facts there is no snapshot."""
    assert place.feed.current() is None


def test_snapshot_has_status_and_rounds(place):
    """A snapshot has the status and the rounds read so far."""
    place.publish(closed=2, received=3)
    snapshot = place.feed.current()
    assert (snapshot.status.run.round, snapshot.status.run.received) == (3, 3)
    assert snapshot.totals.rounds == snapshot.last["round"] == 2
    assert (snapshot.totals.uploads, snapshot.clusters) == (8, {0: 4})
    assert [c.loss for c in snapshot.status.run.clusters] == [pytest.approx(place.store.records()[-1]["loss"])]


def test_later_snapshot_adds_rounds(place):
    """A later snapshot adds the rounds since and the earlier one stays."""
    place.publish(closed=2)
    first = place.feed.current()
    place.publish(closed=1)
    second = place.feed.current()
    assert (first.totals.rounds, second.totals.rounds) == (2, 3)
    assert (first.runs[0]["closed"], second.runs[0]["closed"]) == (2, 3)
    assert second.runs_serial == first.runs_serial + 1
    third = place.feed.current()
    assert third is not second
    assert (third.status_serial, third.runs_serial) == (second.status_serial, second.runs_serial), "nothing new"


def test_many_requests_build_one_snapshot(place, monkeypatch):
    monkeypatch.setattr(feed_module, "UPDATE_S", 60.0)
    place.publish()
    assert place.feed.current() is place.feed.current()


def test_packed_rounds_are_read_once(place):
    """Packed rounds are read once and in order."""
    place.publish(closed=3 * BLOCK_ROUNDS)
    assert place.feed.current().totals.rounds == 3 * BLOCK_ROUNDS
    place.publish(closed=BLOCK_ROUNDS)
    snapshot = place.feed.current()
    assert (snapshot.totals.rounds, snapshot.runs[0]["closed"]) == (4 * BLOCK_ROUNDS, 4 * BLOCK_ROUNDS)


def test_status_has_earlier_accuracies(place):
    """Devices report accuracy in some rounds only."""
    place.close_rounds(1)
    place.close_rounds(1, device_accuracy={})
    place.publish()
    assert place.feed.current().status.run.clusters[0].accuracy == 0.75


def test_another_run_begins_anew(place, tmp_path):
    """Another run begins anew and no run has no history."""
    place.publish(closed=2)
    before = place.feed.current()
    place.publish(plan=dataclasses.replace(place.plan, run=2, run_id=b"s" * 16))
    after = place.feed.current()
    assert (after.runs[0]["name"], after.totals.rounds) == ("run 2", 0)
    assert after.runs_serial > before.runs_serial
    place.publish(plan=None)
    assert place.feed.current().runs == ()
    assert place.feed.current().status.run is None


def test_unreadable_rounds_are_named(place, tmp_path):
    """Rounds that can't be read are named and the status stays."""
    place.publish()
    for path in (tmp_path / "run-000001").glob("*.sqlite*"):
        path.write_bytes(b"x" * 4096)
    place.feed.current()
    place.publish(received=1)
    snapshot = place.feed.current()
    assert "can't be read" in snapshot.trouble
    assert snapshot.status.run is not None
    assert json.loads(snapshot.event(runs=True))["note"] == snapshot.trouble


def test_an_event_has_the_runs_only_if_asked(place):
    place.publish(closed=1)
    snapshot = place.feed.current()
    assert "runs" not in json.loads(snapshot.event(runs=False))
    assert json.loads(snapshot.event(runs=True))["runs"] == json.loads(json.dumps(snapshot.runs))


def test_earlier_runs_stay_readable(place, tmp_path):
    """The runs before the served one, the newest first; while none is served, all; one that can't be read is left out."""
    place.publish(closed=2)
    assert place.feed.current().earlier == ()
    second = dataclasses.replace(place.plan, run=2, run_id=b"2" * 16)
    with contextlib.closing(Store(tmp_path / "run-000002", second)) as store:
        store.record(1, record(1, place.devices))
        (tmp_path / "run-000003").mkdir()
        (tmp_path / "run-000000").mkdir()
        (tmp_path / "run-000000" / DATABASE).write_bytes(b"no database")
        place.publish(plan=second)
        found = place.feed.current()
        assert [run["name"] for run in (*found.runs, *found.earlier)] == ["run 2", "run 1"]
        assert found.earlier[0]["closed"] == 2
        place.publish(plan=None)
        assert [run["name"] for run in place.feed.current().earlier] == ["run 2", "run 1"]
