"""As tests/integration/test_owner_console_process.py, with orders and restarts at random times."""

import random
import signal
import time

import pytest

from shoal.transport.local_broker import find_mosquitto
from tests.helpers.waiting import until
from tests.integration.consoles import console_of
from tests.integration.taken_away import NAMES

pytestmark = [
    pytest.mark.long,
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.timeout(3600),
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]
TIMES = 20
RUNS = 4


def test_random_orders_to_a_run(tmp_path):
    """Every round has its three uploads, whatever happens in between, but one that a stop closes at once."""
    draw = random.Random(1)
    with console_of(tmp_path) as (console, _):
        stage = console.stage
        stage.start_aggregator()
        for name in NAMES:
            stage.start_device(name, tmp_path / f"{name}.npz")
        until(lambda: "serving" in stage.programs["aggregator"].tail(50), "the aggregator")
        for turn in range(TIMES):
            if turn % (TIMES // RUNS) == 0:
                run = console.sign()
                console.run("start", "--run", run)
            console.goes_on(run)
            time.sleep(draw.uniform(0.0, 0.3))
            console.run("pause", run)
            time.sleep(draw.uniform(0.0, 0.3))
            if draw.random() < 0.7:
                console.restart(draw.choice((signal.SIGKILL, signal.SIGTERM)))
            until(lambda: console.status()["connected"], "the aggregator")
            last = (turn + 1) % (TIMES // RUNS) == 0
            if not last or draw.random() < 0.5:
                console.run("resume", run)
                console.goes_on(run)
            if not last:
                continue
            now = draw.random() < 0.5
            console.run("stop", run, *(["--now"] if now else []))
            if draw.random() < 0.7:
                console.restart(draw.choice((signal.SIGKILL, signal.SIGTERM)))
            until(lambda run=run: stage.finished(run), f"the end of run {run}")
            records = stage.records(run)
            cut = records[-2]["round"] if now else 0
            assert [r["round"] for r in records[:-1]] == list(range(1, len(records)))
            assert all(r["contributed"] == 3 for r in records if r["round"] != cut)
            stage.check()
