"""The daemon after a run's end answers the uploads not answered before, also after a restart."""

from __future__ import annotations

import signal

import numpy as np
import pytest

from shoal.protocol.recipe import LocalTraining, Recipe
from shoal.transport.local_broker import find_mosquitto, start_broker
from tests.helpers.forked_stages import ForkedStage
from tests.helpers.tasks import logistic_bundle, samples
from tests.helpers.waiting import until

pytestmark = [pytest.mark.broker, pytest.mark.process, pytest.mark.timeout(180)]
NAMES = ("dev-0", "dev-1", "dev-2")


@pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")
@pytest.mark.long
@pytest.mark.parametrize("again", [False, True])
def test_straggler_of_final_round_ends_too(tmp_path, again):
    """Every program was started with --once: the aggregator ends too, some time after the run."""
    bundle = logistic_bundle()
    options = Recipe(
        "fedavg",
        rounds=4,
        local=LocalTraining(epochs=1, batch_size=16, lr=0.2),
        min_contributors=1,
        quorum=0.6,
        deadline_s=1.0,
        seed=1,
    )
    (tmp_path / "broker").mkdir()
    with (
        start_broker("mosquitto", tmp_path / "broker") as broker,
        ForkedStage(tmp_path / "s", broker.url, NAMES) as stage,
    ):
        run = stage.add_run(bundle, np.zeros((1, bundle.length), np.float32), options).run
        programs = {"aggregator": stage.start_aggregator("--once")}
        for seed, name in enumerate(NAMES):
            x, y = samples(60, seed=seed)
            np.savez(tmp_path / f"{name}.npz", x=x, y=y)
            programs[name] = stage.start_device(name, tmp_path / f"{name}.npz", "--once")
        until(lambda: len(stage.records(run)) >= 3, "round 3")
        programs["dev-2"].process.send_signal(signal.SIGSTOP)
        until(lambda: stage.finished(run), "the final round")
        records = stage.records(run)
        assert records[-1]["missing"] == ["dev-2"]
        if again:
            stage.stop("aggregator", signal.SIGKILL)
            programs["aggregator"] = stage.start_aggregator("--once")
        programs["dev-2"].process.send_signal(signal.SIGCONT)
        for program in programs.values():
            until(lambda p=program: p.process.poll() is not None, program.name)
            assert program.process.returncode == 0, program.tail()
        assert stage.records(run) == records
