"""A round whose close takes long: it is computed elsewhere, devices are answered meanwhile, and a crash changes nothing."""

import queue
import shutil

import pytest

from aggregator.numerics.parted import MOST_COMPARED, check_gram_size
from aggregator.rounds.state import Order
from aggregator.storage.store import read_records
from aggregator.uploads.states import UploadState
from aggregator.workers import RunWorkers, ThreadWorkers
from shoal.protocol.messages import Action
from shoal.transport.base import Message
from tests.helpers.parties import TOPICS
from tests.helpers.uploads import SlowWorkers
from tests.unit.aggregator.service_scene import DEADLINE_S, Scene, newest_snapshot

DEVICES = ("dev-1", "dev-2")


@pytest.fixture(autouse=True)
def _every_close_is_long(monkeypatch):
    monkeypatch.setattr("aggregator.run_service.LONG_WORK", 1)


class Computing(Scene):
    """The scene of a run service whose numerics end when the test says so."""

    def __init__(self, root, **plan):
        self.numerics = SlowWorkers()
        super().__init__(root, **plan)

    def workers(self):
        return RunWorkers(self.disk, numerics=self.numerics)

    def answers(self):
        """Return the answers to devices since the last time, as (device, action)."""
        return [(found.device, found.action) for found in self.controls()]


@pytest.fixture
def scene(tmp_path):
    made = Computing(tmp_path)
    made.come(*DEVICES)
    yield made
    made.service.close()


def test_long_close_is_computed_elsewhere(scene, caplog):
    """A long close is computed elsewhere and the uploads are acknowledged at once."""
    caplog.set_level("INFO", "shoal.aggregator")
    scene.upload(*DEVICES)
    assert (scene.service.computing, scene.state.round) == (True, 1)
    scene.service.tick(5.0)
    assert "round 1: 2 of 2, computing" in [record.getMessage() for record in caplog.records]
    assert scene.answers() == [("dev-1", Action.ACK), ("dev-2", Action.ACK)]
    assert scene.records() == []
    scene.numerics.finish()
    assert (scene.service.computing, scene.state.round) == (False, 2)
    assert [r["contributed"] for r in scene.records()] == [2]


def test_the_state_says_computing(scene):
    assert not scene.service.facts().computing
    scene.upload("dev-1")
    assert scene.service.facts().waiting == ("dev-2",)
    scene.service.tick(DEADLINE_S)
    facts = scene.service.facts()
    assert (facts.computing, facts.phase, facts.round, facts.received) == (True, "round", 1, 1)
    assert (facts.waiting, facts.shortage) == ((), "")
    assert scene.service.status() == "round 1: 1 of 2, computing"
    scene.numerics.finish()
    assert not scene.service.facts().computing
    assert scene.service.status().startswith("round 2: 0 of 2")


def test_devices_are_answered_meanwhile(scene, caplog):
    """Devices are answered during the computation, and what nobody expects is refused."""
    sealed = scene.upload(*DEVICES)
    scene.service.on_event(Message(TOPICS.up("stranger"), b"junk"), 1.0)
    assert "stranger is not in the roster" in [str(r.kv["reason"]) for r in caplog.records if r.message == "refused"]
    scene.controls()
    scene.remind("dev-1", sealed["dev-1"])
    scene.send_again("dev-2", sealed["dev-2"])
    assert scene.answers() == [("dev-1", Action.ACK)], "the copy is dropped, the reminder answered"
    scene.come("dev-2", online=False)
    assert scene.service.watch.devices.devices["dev-2"].online is False
    assert scene.state.present == DEVICES, "the engine hears of it afterwards"
    scene.numerics.finish()
    assert scene.state.present == ("dev-1",)


def test_upload_during_the_computation(scene):
    """An upload that comes during the computation is refused once the round is closed."""
    scene.upload("dev-1")
    scene.service.tick(DEADLINE_S)
    assert scene.service.computing
    scene.controls()
    late = scene.upload("dev-2")["dev-2"]
    assert scene.disk.waiting == [], "no commit goes on while the round is being closed"
    assert scene.service.uploads.state("dev-2", late.transfer) is UploadState.VALID
    assert scene.answers() == []
    scene.numerics.finish()
    assert [(f.device, f.action, f.reason) for f in scene.controls()] == [
        ("dev-2", Action.REFUSED, "the round is not open")
    ]
    assert [r["contributed"] for r in scene.records()] == [1]


def test_events_follow_the_computation(scene):
    """Events during the computation are handled in order afterwards."""
    scene.upload(*DEVICES)
    scene.come("dev-2", online=False)
    scene.service.obey(Order.PAUSE, 1.0)
    scene.come("dev-2")
    scene.service.tick(10 * DEADLINE_S)  # the deadline of a round that has its uploads
    assert scene.state.order is Order.GO
    scene.numerics.finish()
    # The next round was opened with the close; the order holds from the one after it on.
    assert (scene.state.round, scene.state.order, scene.state.present) == (2, Order.PAUSE, DEVICES)
    assert not scene.state.deadline_passed
    scene.upload(*DEVICES)
    scene.numerics.finish()
    assert scene.state.plan is None


def test_revocation_during_the_computation(scene):
    """A device that is revoked during the computation leaves the next round."""
    scene.upload(*DEVICES)
    scene.revoke("dev-2")
    assert set(scene.state.devices) == set(DEVICES)
    scene.numerics.finish()
    assert (set(scene.state.devices), scene.state.asked) == ({"dev-1"}, 1)


def test_crash_during_the_computation(scene, tmp_path):
    """The same run, once to its end and once with a kill -9 while its round was computed: the same bits."""
    scene.upload(*DEVICES)
    run = scene.run_directory
    copy = tmp_path / "copy"
    shutil.copytree(run, copy)
    scene.numerics.finish()
    expected = newest_snapshot(run), [{**r, "seconds": 0, "closed_at_s": 0, "bytes_up": 0} for r in scene.records()]
    assert expected[0][0] == 2
    scene.service.close()
    shutil.rmtree(run)
    shutil.copytree(copy, run)
    scene.numerics.close()
    scene.service = scene.make()
    scene.service.start(100.0)
    assert scene.service.computing, "the uploads that are durable close the round again, elsewhere as well"
    scene.come(*DEVICES)
    scene.numerics.finish()
    found = newest_snapshot(run), [{**r, "seconds": 0, "closed_at_s": 0, "bytes_up": 0} for r in read_records(run)]
    assert found == expected
    assert scene.state.round == 2


def test_close_during_the_computation(tmp_path):
    """A service may be closed during the computation."""
    handed = queue.SimpleQueue()
    workers = RunWorkers(numerics=ThreadWorkers(handed.put, "shoal-test"))
    scene = Scene(tmp_path, workers=workers)
    scene.come(*DEVICES)
    scene.upload(*DEVICES)
    workers.close()
    scene.service.close()
    handed.get(timeout=10)()
    assert (scene.state.round, scene.records()) == (1, [])


def test_impossible_round_ends_no_program(scene, monkeypatch, caplog):
    """For instance, devices joined during the run, and its workers can't compare so many updates."""

    def too_many(_before, _recorded):
        check_gram_size(MOST_COMPARED + 1)

    monkeypatch.setattr(scene.service._engine, "advance", too_many)
    scene.upload(*DEVICES)
    scene.numerics.finish()
    scene.service.tick(DEADLINE_S)
    assert scene.answers() == [("dev-1", Action.ACK), ("dev-2", Action.ACK)], "devices are answered"
    words = f"round 1 can't be closed: the products of {MOST_COMPARED + 1} updates take more than"
    assert scene.service.status().startswith(words)
    facts = scene.service.facts()
    assert facts.shortage.startswith(words)
    assert "--participation" in facts.advice
    assert not facts.computing
    assert [r.kv["hint"] for r in caplog.records if r.levelname == "ERROR"] == [facts.advice]
