"""When a device does its personal finish: once after a run, while it is idle, and never in the way of the next run."""

import dataclasses
import json
import logging

import pytest

from edge_client.learning.finish import finish
from edge_client.protocol.round_state import Stage
from edge_client.run import finishing
from edge_client.storage.finished_models import PERSONAL_FILES, START_FILES, FinishedModels
from shoal.errors import ConfigError, IntegrityError
from shoal.limits import LOW_DISK_BYTES
from tests.helpers.announced import announcement
from tests.helpers.fleets import finish_of, grouped_data, make_fleet

NAME = "dev-00"


@pytest.fixture
def fleet(tmp_path):
    """A fleet of two groups that one model does not fit, whose run has ended."""
    with make_fleet(tmp_path / "fleet", grouped_data(4, 2)) as made:
        made.run(100)
        made.settle()
        yield made


def store(fleet):
    return FinishedModels(fleet.stage.device_dir(NAME))


def choice(fleet):
    found = store(fleet).personal(store(fleet).models()[-1])
    return None if found is None else found[0]


def finisher(fleet):
    return fleet.devices[NAME].runtime._finisher


def session(fleet, **changes):
    return dataclasses.replace(fleet.devices[NAME].runtime.session, **changes)


def logged(caplog, text):
    return [r.kv for r in caplog.records if r.getMessage() == text and hasattr(r, "kv")]


def test_device_chooses_once_and_logs_losses(fleet, caplog):
    """The choice is in a file of its own: what a running device writes doesn't lose it, and a restart makes no other."""
    status = fleet.stage.device_dir(NAME) / "status.json"
    before = json.loads(status.read_text())
    assert fleet.devices[NAME].runtime.finishing
    with caplog.at_level(logging.INFO, "shoal.edge"):
        assert finish_of(fleet, NAME)
    found = choice(fleet)
    assert [fit.name for fit in found.fits] == ["cluster", "1", "3", "10", "alone"]
    assert found.choice != "cluster"
    (facts,) = logged(caplog, "personal finish done")
    assert facts["choice"] == found.choice
    assert all(f"{fit.name}={fit.loss:.4f}" in facts["losses"] for fit in found.fits)
    assert facts["took_s"] >= 0
    assert not finish_of(fleet, NAME)
    assert not fleet.devices[NAME].runtime.finishing
    assert json.loads(status.read_text())["ended"] == before["ended"]
    restart(fleet)
    assert not finish_of(fleet, NAME)
    assert choice(fleet) == found


def restart(fleet):
    fleet.kill_device(NAME)
    fleet.revive_device(NAME)
    fleet.run_until(lambda: finisher(fleet).is_pending(idle=session(fleet).idle) or choice(fleet) is not None, 100)
    fleet.settle()


def test_killed_finish_is_done_again(fleet, monkeypatch):
    """A finish that was killed is done again at the next start."""
    left = [False] * 30

    def count():
        if not left:
            raise KeyboardInterrupt
        return left.pop()

    before = sorted(p.name for p in fleet.stage.device_dir(NAME).rglob("*"))
    with monkeypatch.context() as patch:
        patch.setattr(finishing, "finish", lambda ended, shares, backend, _: finish(ended, shares, backend, count))
        with pytest.raises(KeyboardInterrupt):
            finish_of(fleet, NAME)
    assert sorted(p.name for p in fleet.stage.device_dir(NAME).rglob("*")) == before
    restart(fleet)
    assert finish_of(fleet, NAME)
    assert choice(fleet).choice != "cluster"


def test_a_damaged_choice_is_made_again(fleet):
    finish_of(fleet, NAME)
    (path,) = (fleet.stage.device_dir(NAME) / "finished").glob(PERSONAL_FILES)
    path.write_bytes(b"x" * 60)
    finisher(fleet).follow(fleet.devices[NAME].runtime._run)
    assert finish_of(fleet, NAME)
    assert choice(fleet).choice != "cluster"


def test_finish_waits_for_a_round(fleet):
    """The finish waits while a round needs the device."""
    for stage in (Stage.FETCHING, Stage.WORKING, Stage.SENDING):
        busy = session(fleet, round=dataclasses.replace(session(fleet).round, stage=stage))
        finisher(fleet).keep_up(idle=busy.idle)
        assert not finisher(fleet).is_pending(idle=busy.idle)
        assert not fleet.devices[NAME].finish_worker.work()
    assert finish_of(fleet, NAME)


def test_another_run_cancels_the_finish(fleet, caplog):
    """Another runs announcement cancels the finish at once."""
    device = fleet.devices[NAME]
    device.runtime.tick(fleet.now_s)
    with caplog.at_level(logging.INFO, "shoal.edge"):
        finisher(fleet).give_way(idle=session(fleet, waiting=announcement(run=2)).idle)
    assert "personal finish stopped: the fleet needs this device" in caplog.messages
    assert not device.finish_worker.work()
    assert choice(fleet) is None
    assert finish_of(fleet, NAME)


@pytest.mark.parametrize("change", [{"stop_at_s": 5.0}, {"latest": announcement(run=9)}, {"late": object()}])
def test_stopping_device_is_not_idle(fleet, change):
    """A device that stops or hears of another run is not idle."""
    assert finisher(fleet).is_pending(idle=session(fleet).idle)
    assert not finisher(fleet).is_pending(idle=session(fleet, **change).idle)


def test_late_result_is_dropped(fleet):
    """A result that comes after the cancellation is dropped."""
    device = fleet.devices[NAME]
    handed = []
    device.runtime._finisher._hand_back = handed.append
    device.runtime.tick(fleet.now_s)
    device.finish_worker.work()
    finisher(fleet).cancel()
    (callback,) = handed
    callback()
    assert choice(fleet) is None
    assert finisher(fleet).is_pending(idle=session(fleet).idle)


def test_full_disk_keeps_the_clusters_model(fleet, caplog, monkeypatch):
    """A full disk leaves the clusters model and a warning."""
    monkeypatch.setattr("edge_client.storage.finished_models.free_bytes", lambda _: LOW_DISK_BYTES)
    assert finish_of(fleet, NAME)
    assert choice(fleet) is None
    (facts,) = logged(caplog, "personal finish failed: the cluster's model stays in use")
    assert "too few for a personal model" in facts["reason"]
    assert not finish_of(fleet, NAME)


def test_without_a_worker_there_is_no_finish(fleet):
    runtime = fleet.devices[NAME].runtime
    runtime._finisher._worker = None
    runtime._finisher.follow(runtime._run)
    assert not runtime.finishing
    assert not finish_of(fleet, NAME)


def test_forged_plan_is_refused(fleet):
    """A run that left no start or a forged plan is refused."""
    runtime, model = fleet.devices[NAME].runtime, store(fleet).models()[-1]
    (path,) = (fleet.stage.device_dir(NAME) / "finished").glob(START_FILES)
    path.unlink()
    with pytest.raises(ConfigError, match="nothing to train from after run 1"):
        finishing.ended_run(store(fleet), model, fleet.bundle, runtime._membership, 0.0)
    forged = store(fleet)
    forged.start_of = lambda _: b"no plan"
    with pytest.raises(IntegrityError, match="the plan of run 1 is damaged"):
        finishing.ended_run(forged, model, fleet.bundle, runtime._membership, 0.0)
