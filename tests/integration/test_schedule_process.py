"""A standing order with real programs: run after run without the owner, while each party is killed once."""

from __future__ import annotations

import json
import signal
import time

import pytest

from aggregator.storage.store import read_last_record
from edge_client.storage.finished_models import FinishedModels
from shoal.protocol.documents import Schedule
from shoal.protocol.recipe import Recipe
from shoal.transport.local_broker import find_mosquitto
from tests.helpers import calls, waiting
from tests.helpers.cases import with_long
from tests.helpers.fleets import FULL_BATCH
from tests.helpers.forked_stages import (
    begin,
    stage_of,
)

pytestmark = [
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.timeout(5400),
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]
WAIT_S = 120.0


def until(reached, stage, wait_s=WAIT_S):
    waiting.until(reached, lambda: stage.log_of("aggregator").read_text()[-3000:], wait_s)


@pytest.mark.parametrize(("count", "runs", "every_s"), with_long([(8, 60, 60), (3, 3, 1)], (3, 3, 1)))
def test_runs_follow_while_the_owner_is_away(tmp_path, count, runs, every_s):
    """All runs end with all devices, a new one never sooner than the order says, and the owner finds the order as it is."""
    names = tuple(f"dev-{i}" for i in range(count))
    with stage_of(tmp_path, names) as (stage, broker):
        order = Schedule(order=bytes(16), count=runs, interval_s=every_s, until_s=int(time.time()) + 7200)
        options = Recipe("fedavg", rounds=2, local=FULL_BATCH, min_contributors=2, quorum=0.5, deadline_s=5.0)
        begin(stage, options, schedule=order)
        stage.start_aggregator()
        for name in names:
            stage.start_device(name, tmp_path / f"{name}.npz")

        def ended(run):
            last = read_last_record(stage.aggregator_dir / f"run-{run:06d}")
            return last is not None and last["final"]

        for run in range(1, runs + 1):
            until(lambda run=run: ended(run), stage, every_s + WAIT_S)
            if run == 1:
                stage.stop("aggregator", signal.SIGKILL)
                stage.start_aggregator()
            if run == 2:
                stage.stop(names[0], signal.SIGKILL)
                stage.start_device(names[0], tmp_path / f"{names[0]}.npz")
                broker.kill()
                broker.start()
        done = calls.call("shoal-fleet", ["schedule", "list", str(stage.fleet.path), "--json"], tmp_path, {}, "")
        told = json.loads(done.out)["data"]
        assert (told["begun"], told["waits"]) == (runs, f"all of its {runs} runs have begun")
        until(
            # The first device was killed, and may have been away in the last run.
            lambda: all(FinishedModels(stage.device_dir(name)).standing().models[-1].run == runs for name in names[1:]),
            stage,
        )
