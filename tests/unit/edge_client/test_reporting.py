"""A device's results: the figures in its status file, and when its models are saved."""

import os
from types import SimpleNamespace

import numpy as np
import pytest

from crypto.seal.replay import ReplayWatermark
from edge_client.learning.update import Finished
from edge_client.protocol.round_state import RoundState, Stage
from edge_client.reporting import (
    ALIVE_EVERY_S,
    CLOCK_HINT,
    RUNS_REMEMBERED,
    SAVE_MODEL_EVERY_S,
    STATUS_EVERY_S,
    Results,
)
from edge_client.storage.finished_models import FinishedModels, Validation
from edge_client.storage.state import MODEL_FILE, STATUS_FILE, DeviceState
from shoal.limits import CLOCK_OFF_S
from shoal.protocol.messages import Assignment, Phase, Share
from shoal.task.manifest import TrainerName
from shoal.util.files import private_directory
from tests.helpers.announced import TRAINING, announcement
from tests.helpers.plans import run_plan
from tests.helpers.sessions import new_session

RUN_ID = b"r" * 16
REPORT = Assignment(Phase.SCORE, (0, 3), Share.TRAIN, train=False, evaluate=True, margins=False)
KEEP = Assignment(Phase.KEEP, (3, 0), Share.TRAIN, train=False, evaluate=True, margins=False)


def at(stage):
    """Return a session at a stage of its round."""
    return new_session(round=RoundState(0, stage=stage))


@pytest.fixture
def place(tmp_path, logistic):
    return Place(private_directory(tmp_path / "d"), logistic(4, 3))


@pytest.fixture
def running(place):
    """A place whose device takes part in a run."""
    place.begin()
    return place


class Place:
    """A device's directory, and the results in it, which a restart loads again."""

    def __init__(self, directory, bundle):
        self.bundle = bundle
        self.files = DeviceState(directory)
        self.member = SimpleNamespace(directory=directory, name="dev-1", fleet="reef")
        self.transport = SimpleNamespace(bytes_sent=0, bytes_received=0)
        self.models = {m: np.full(bundle.length, m + 0.5, np.float32) for m in (0, 3)}
        self.restart()

    def restart(self):
        self.results = Results(self.member, self.files, self.transport, lambda: 1_800_000_000.0)

    def begin(self, run=1, **changes):
        plan = run_plan(run=run, run_id=bytes([run]) * 16 if run > 1 else RUN_ID, rounds=8, **changes)
        self.results.begin(SimpleNamespace(plan=plan, bundle=self.bundle))
        return plan

    def note(self, assignment=TRAINING, model=3, now_s=0.0, result=None, **changes):
        fields = {"loss": 0.5, "correct": 0, "tested": 0, **(result or {})}
        announced = announcement(**{"round": 4, **changes})
        validation = {announced.run_id: Validation(1.0, 1, 2, 2)} if announced.finished else {}
        done = Finished(pieces=(), model=model, validation=validation, **fields)
        self.results.note(announced, assignment, done, self.models, now_s)

    def status(self):
        self.results.publish(at(Stage.IDLE), 0.0, force=True)
        return self.files.load_status()

    def saved(self):
        """Return (cluster, round) of the model on disk, or None."""
        if not (self.files.directory / MODEL_FILE).exists():
            return None
        model = self.files.load_model()
        assert np.array_equal(model.theta, self.models[model.cluster])
        return model.cluster, model.round


# --------------------------------------------------------------------------------------------------------- figures


def test_figures_of_run_grow_with_its_rounds(running):
    """A round without a test leaves the accuracy of the last one; another run starts at zero."""
    running.note(round=2, result={"loss": 0.75})
    running.note(round=4, result={"correct": 3, "tested": 4})
    found = running.status()
    figures = {"run": 1, "rounds": 2, "round": 4, "cluster": 3, "loss": 0.5, "accuracy": 0.75}
    assert {k: found[k] for k in figures} == figures
    assert (found["device"], found["fleet"], found["stage"], found["ended"]) == ("dev-1", "reef", "idle", {})
    running.note(round=5)
    assert running.status()["accuracy"] == 0.75
    running.begin(2)
    found = running.status()
    assert (found["run"], found["rounds"]) == (2, 0)
    assert "loss" not in found


def test_status_is_written_once_a_second(running):
    """The status is written once a second unless forced."""
    for now_s, rounds in ((10.0, 0), (10.0 + 0.9 * STATUS_EVERY_S, 0), (10.0 + STATUS_EVERY_S, 2)):
        running.results.publish(at(Stage.WORKING), now_s)
        assert running.files.load_status()["rounds"] == rounds
        running.note()
    assert running.status()["rounds"] == 3


def test_status_follows_the_session(running):
    """So that a device that is stuck shows what it waits for."""
    running.results.keep_status(at(Stage.FETCHING), 10.0)
    assert running.files.load_status()["session"]["stage"] == "fetching models"
    running.note()
    running.results.keep_status(at(Stage.FETCHING), 20.0)
    assert running.files.load_status()["rounds"] == 0
    running.results.keep_status(at(Stage.SENDING), 20.5)
    assert running.files.load_status()["stage"] == "sending"


def test_status_follows_the_connection(running):
    """The status is written when the connection has changed."""
    running.results.connected("mqtt://reef:1883")
    running.results.keep_status(at(Stage.FETCHING), 10.0)
    found = running.files.load_status()["connection"]
    assert (found["connected"], found["broker"]) == (True, "mqtt://reef:1883")
    running.results.disconnected("mqtt://reef:1883", "Connection refused")
    running.results.keep_status(at(Stage.FETCHING), 20.0)
    found = running.files.load_status()["connection"]
    assert (found["connected"], found["reason"]) == (False, "Connection refused")


def test_the_line_for_the_service_manager(place):
    line = place.results.state_line
    assert line(at(Stage.IDLE)) == "connecting"
    place.results.connected("mqtt://reef:1883")
    assert line(at(Stage.IDLE)) == "fleet reef: waiting for a run"
    following = new_session(round=RoundState(0, stage=Stage.WORKING, plan=run_plan(run=4)))
    assert line(following) == "fleet reef, run 4, round 0: working"
    place.results.disconnected("mqtt://reef:1883", "Connection refused")
    assert line(following) == "not connected to mqtt://reef:1883"


def test_unchanged_status_shows_life(running):
    """An unchanged status shows once a minute that the device is alive."""
    running.results.keep_status(at(Stage.FETCHING), 10.0)
    path = running.files.directory / STATUS_FILE
    os.utime(path, (1, 1))
    running.results.keep_status(at(Stage.FETCHING), 10.0 + ALIVE_EVERY_S - 1)
    assert running.files.alive_at_s() == 1
    running.results.keep_status(at(Stage.FETCHING), 10.0 + ALIVE_EVERY_S)
    assert running.files.alive_at_s() > 1
    path.unlink()
    running.results.keep_status(at(Stage.FETCHING), 10.0 + 2 * ALIVE_EVERY_S)
    assert running.files.alive_at_s() is None


def test_finished_figures_are_closed(place):
    """The figures of a finished run are closed, move to those that ended, and are found again after a restart."""
    place.transport.bytes_sent, place.transport.bytes_received = 1000, 500
    plan = place.begin()
    place.transport.bytes_sent, place.transport.bytes_received = 1007, 503
    place.note()
    assert place.results.finish(plan, at(Stage.IDLE), 5.0)
    place.transport.bytes_sent = 1099
    found = place.status()
    assert found["finished"]
    assert (found["bytes_up"], found["bytes_down"]) == (7, 3), "traffic after the end belongs to no run"
    assert found["ended"]["1"]["rounds"] == 1
    place.restart()
    place.begin()
    assert (place.status()["rounds"], place.status()["finished"]) == (1, True)


# ------------------------------------------------------------------------------------------------------ end of a run


def test_end_counts_once_remembered(place):
    """The end of a run counts as told only after it was remembered."""
    plan = place.begin()
    assert place.results.finish(plan, at(Stage.IDLE), 5.0)
    place.restart()
    place.begin()
    assert place.results.finish(plan, at(Stage.IDLE), 5.0), "the process was killed before it could say so"
    place.results.remember_end()
    place.restart()
    place.begin()
    assert not place.results.finish(plan, at(Stage.IDLE), 5.0)
    place.results.remember_end()
    assert place.files.was_told(plan.run_id)


def test_only_the_latest_runs_are_remembered(place):
    for run in range(1, RUNS_REMEMBERED + 4):
        place.results.finish(place.begin(run), at(Stage.IDLE), 0.0)
    assert list(place.status()["ended"]) == [str(r) for r in range(4, RUNS_REMEMBERED + 4)]


@pytest.mark.parametrize("ended", [None, 7, [1], {"1": 7}, {"1": None}])
def test_damaged_figures_are_left_out(place, ended):
    """Damaged figures of an earlier process are left out."""
    place.files.save_status({"ended": ended})
    place.restart()
    place.begin()
    assert place.status()["ended"] == {}


# ----------------------------------------------------------------------------------------------------------- models


def test_model_is_saved_every_half_minute(running):
    """The model of a training round is saved every half minute."""
    running.note(now_s=100.0)
    assert running.saved() is None
    running.results.keep_up(100.0)
    assert running.saved() == (3, 4)
    running.note(round=5, model=0)
    running.results.keep_up(100.0 + SAVE_MODEL_EVERY_S)
    assert running.saved() == (3, 4)
    running.results.keep_up(100.1 + SAVE_MODEL_EVERY_S)
    assert running.saved() == (0, 5)


def test_scoring_round_keeps_the_model(running):
    """A trial's scoring may name the model of another half as the best."""
    running.note()
    running.note(REPORT, model=0, round=5)
    running.results.save_model(0.0, durable=True)
    assert running.saved() == (3, 4)


def test_model_stays_due_until_durable(place, monkeypatch):
    """A model stays due until it is saved durably."""
    saves = []
    place.begin()
    place.note()
    monkeypatch.setattr(place.files, "save_model", lambda _model, *, durable: saves.append(durable))
    for durable in (False, False, True, True, False):
        place.results.save_model(0.0, durable=durable)
    assert saves == [False, False, True]


def test_next_round_renews_the_model(running):
    """The model is that of the cluster as the round begins; a job for another cluster, or another run, leaves it."""
    running.note()
    running.results.renew(announcement(round=5), {0: running.models[0]})
    running.results.renew(announcement(round=5, run_id=bytes(16)), running.models)
    running.results.keep_up(0.0)
    assert running.saved() == (3, 4)
    running.results.renew(announcement(round=5), running.models)
    running.results.save_model(0.0, durable=True)
    assert running.saved() == (3, 5)


def test_final_model_is_durable_at_once(running):
    """The final model is durable at once and joins the finished ones."""
    running.note(REPORT, finished=True, round=9)
    assert running.saved() == (3, 9)
    (found,) = FinishedModels(running.files.directory).models()
    assert (found.run, found.round, found.own.cluster, found.above) == (1, 9, 3, ())
    assert (found.finished_at_s, found.validation) == (1_800_000_000, Validation(1.0, 1, 2, 2))
    assert "path" not in running.status()


def test_paths_keep_the_models_above(running):
    """A run with paths keeps the models above the devices own."""
    running.note(KEEP, finished=True, round=9)
    (found,) = FinishedModels(running.files.directory).models()
    assert ([n.cluster for n in found.above], found.own.cluster) == ([0], 3)
    assert running.status()["path"] == [0, 3]


def test_final_model_needs_its_list(place):
    """A power cut may come before it is written; a watermark before the final round lacks nothing."""
    plan, final = place.begin(), ReplayWatermark(3, 1, 9, b"n" * 16)
    for mark in (ReplayWatermark(3, 1, 8, b"n" * 16), ReplayWatermark(3, 2, 9, b"n" * 16)):
        assert not place.results.lacks_final_model(mark, plan)
    assert place.results.lacks_final_model(final, plan)
    place.note(REPORT, finished=True, round=9)
    assert not place.results.lacks_final_model(final, plan)
    (place.files.directory / "finished/list.bin").unlink()
    assert place.results.lacks_final_model(final, plan)


# -------------------------------------------------------------------------------------------------------- warnings


def test_doubts_are_shown_once(running, caplog):
    """Doubts are logged and shown once until the next run."""
    assert "warnings" not in running.status()
    running.results.warn(["scale it; now", "check it; now"])
    running.results.warn(["scale it; now"])
    assert running.status()["warnings"] == ["scale it; now", "check it; now"]
    assert caplog.text.count("scale it; now") == 1
    running.begin(run=2)
    assert "warnings" not in running.status()


def test_slow_clock_is_shown_until_right(place, caplog):
    """A clock that is behind the aggregators is shown and logged once until it is right."""
    now_s = 1_800_000_000  # the clock of `Place`
    for sent_at_s in (now_s - 10**6, now_s, now_s + CLOCK_OFF_S):
        place.results.compare_clock(sent_at_s)
        assert "clock" not in place.status(), "a message may be old, and a small difference has no effect"
    for _ in range(2):
        place.results.compare_clock(now_s + 7200)
        assert place.status()["clock"] == f"at least 2 h behind the aggregator's; {CLOCK_HINT}"
    assert caplog.text.count("this machine's clock is at least 2 h behind the aggregator's") == 1
    place.results.compare_clock(now_s)
    assert "clock" not in place.status()


def test_model_no_better_is_shown(running):
    """A finished model that is no better is shown."""
    running.note(finished=True, round=9, result={"doubts": ("it has learned nothing; train longer",)})
    assert running.status()["warnings"] == ["it has learned nothing; train longer"]


@pytest.mark.parametrize("executor", ["numpy", "onnxruntime", ""])
def test_status_names_the_executor(place, executor):
    """The status file names the executor if there is one."""
    results = Results(place.member, place.files, place.transport, lambda: 0.0, executor=executor)
    results.publish(at(Stage.IDLE), 0.0, force=True)
    assert place.files.load_status().get("executor", "") == executor


def test_status_names_own_training_code(place):
    """Of a run whose task names it; the executor computes nothing then."""
    manifest = SimpleNamespace(trainer=TrainerName("detector", "2"))
    place.results.begin(SimpleNamespace(plan=run_plan(rounds=8), bundle=SimpleNamespace(manifest=manifest)))
    assert place.status()["executor"] == "detector:2"
