"""`shoal-edge run --once` over several runs of one fleet on a real broker."""

from __future__ import annotations

import pytest

from shoal.protocol.recipe import LocalTraining, Recipe
from shoal.transport.local_broker import find_mosquitto
from tests.helpers.forked_stages import (
    begin,
    stage_of,
)
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
    with stage_of(tmp_path, NAMES) as (made, _):
        yield made


def test_every_run_of_fleet_gets_its_devices(stage, tmp_path):
    """A device that starts before the second run's plan finds the first run's on the broker, and waits."""
    stage.start_aggregator()
    for number in (1, 2):
        programs = [stage.start_device(name, tmp_path / f"{name}.npz", "--once") for name in NAMES]
        for program in programs:
            ready = "waiting for the next run" if number == 2 else "connected"
            until(lambda p=program, ready=ready: ready in p.log.read_text(), ready)
        run = begin(stage, OPTIONS).run
        for program in programs:
            until(lambda p=program: p.process.poll() is not None, program.name)
            assert stage.stop(program.name) == 0, program.tail()
            assert program.log.read_text().count("run finished") == number
        until(lambda run=run: stage.finished(run), "the final round")
        assert stage.records(run)[0]["contributed"] == len(NAMES)
