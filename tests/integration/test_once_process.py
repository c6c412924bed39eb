"""`shoal-edge run --once` over several runs of one fleet, and two programs that use one device's name, on a real broker."""

from __future__ import annotations

import shutil

import numpy as np
import pytest

from shoal.protocol.recipe import LocalTraining, Recipe
from shoal.transport.local_broker import find_mosquitto, start_broker
from tests.helpers.forked_stages import ForkedStage
from tests.helpers.tasks import logistic_bundle, samples
from tests.helpers.waiting import until

pytestmark = [
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.timeout(180),
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]
NAMES = ("dev-0", "dev-1")
LOCAL = LocalTraining(epochs=1, batch_size=16, lr=0.2)
OPTIONS = Recipe("fedavg", rounds=2, local=LOCAL, min_contributors=1, quorum=1.0, deadline_s=30.0, seed=1)


@pytest.fixture
def stage(tmp_path):
    """A fleet at a broker, with data for each device."""
    for seed, name in enumerate(NAMES):
        x, y = samples(60, seed=seed)
        np.savez(tmp_path / f"{name}.npz", x=x, y=y)
    (tmp_path / "broker").mkdir()
    with (
        start_broker("mosquitto", tmp_path / "broker") as broker,
        ForkedStage(tmp_path / "s", broker.url, NAMES) as made,
    ):
        yield made


def sign(stage):
    bundle = logistic_bundle()
    return stage.add_run(bundle, np.zeros((1, bundle.length), np.float32), OPTIONS).run


def test_every_run_of_fleet_gets_its_devices(stage, tmp_path):
    """A device that starts before the second run's plan finds the first run's on the broker, and waits."""
    stage.start_aggregator()
    for number in (1, 2):
        programs = [stage.start_device(name, tmp_path / f"{name}.npz", "--once") for name in NAMES]
        for program in programs:
            ready = "waiting for the next run" if number == 2 else "connected"
            until(lambda p=program, ready=ready: ready in p.log.read_text(), ready)
        run = sign(stage)
        for program in programs:
            until(lambda p=program: p.process.poll() is not None, program.name)
            assert stage.stop(program.name) == 0, program.tail()
            assert program.log.read_text().count("run finished") == number
        until(lambda run=run: stage.finished(run), "the final round")
        assert stage.records(run)[0]["contributed"] == len(NAMES)


def test_copied_directory_ends_saying_so(stage, tmp_path):
    """One of the two programs ends and says why; nothing that it does on its way out hides that.

    mosquitto closes the older connection and sends no reason. The presences tell which program began later: that one
    ends.
    """
    programs = [stage.start_device("dev-0", tmp_path / "dev-0.npz")]
    until(lambda: "connected" in programs[0].log.read_text(), "the first")
    shutil.copytree(stage.device_dir("dev-0"), tmp_path / "s" / "devices" / "copy")
    programs.append(stage.start_device("copy", tmp_path / "dev-0.npz"))
    until(lambda: any(p.process.poll() is not None for p in programs), "the end of one of them")
    (ended,) = [p for p in programs if p.process.poll() is not None]
    assert ended.process.returncode == 12
    told = ended.log.read_text()
    assert "error: another device connected as dev-0" in told
    assert "hint: it began before" in told
