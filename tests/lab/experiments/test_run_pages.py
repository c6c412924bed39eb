"""The page of simulated runs: every round of every run, whoever starts it."""

import json

import numpy as np
import pytest
from shoal_lab.experiments.run_pages import RunRecorder, write_page

from aggregator.numerics.backend import NumpyBackend
from shoal.errors import ConfigError
from shoal.page.page import MOST_RUNS
from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Population, Shard
from shoal.simulation.engine.fleet import fleet_options, fleet_run
from shoal.simulation.engine.simulate import simulate
from shoal.simulation.engine.watching import watched_by
from shoal.simulation.trainers.networks import Softmax

pytestmark = pytest.mark.torch


def population(devices=4, n=24):
    rng = np.random.default_rng(0)
    shards = []
    for i in range(devices):
        x = rng.standard_normal((n, 3)).astype(np.float32)
        shards.append(Shard(x, ((x[:, 0] > 0) ^ (i % 2)).astype(np.int64)))
    return Population(tuple(shards), tuple(shards), tuple(shards))


def simulated(strategy="fedavg", settings=None, rounds=3):
    fleet = fleet_run(strategy, settings or {}, robust="off")
    options = fleet_options(
        fleet,
        rounds=rounds,
        local=LocalTraining(epochs=1, batch_size=8, lr=0.5),
        seed=1,
        participation=1.0,
        mode="none",
    )
    return simulate(strategy, fleet.values, population(), Softmax(3, 2), options, backend=NumpyBackend())


def embedded(path):
    text = path.read_text().partition('<script type="application/json" id="data">')[2].partition("</script>")[0]
    return json.loads(text)


def test_each_run_becomes_a_history(tmp_path):
    recorder = RunRecorder()
    with watched_by(recorder.round_closed):
        first = simulated()
        simulated("local", rounds=2)
    simulated()
    assert (recorder.seen, [run.closed for run in recorder.runs]) == (2, [3, 2])
    path = tmp_path / "page.html"
    results = [{"algorithm": "fedavg", "ari": 0.25, "purity": None, "published": {"data": "x"}}]
    write_page(path, "toy", recorder, results, "four devices")
    fedavg, local = embedded(path)["runs"]
    assert (fedavg["name"], local["name"], fedavg["finished"]) == ("fedavg", "2: local", True)
    assert fedavg["results"] == [["Agreement with the true groups (ARI)", "0.25"]]
    assert fedavg["points"]["accuracy"] == pytest.approx([r.accuracy / 100 for r in first.history], rel=1e-4)
    assert fedavg["points"]["loss"] == pytest.approx([r.loss for r in first.history], rel=1e-4)
    assert fedavg["tree"]["steps"] == [{"first": 1, "last": 3, "sizes": [[0, 4]]}]
    assert fedavg["cosines"][-1]["round"] == 3
    assert [row["marks"] for row in fedavg["participation"]["devices"]] == ["uuu"] * 4
    assert fedavg["points"]["seconds"] == [None] * 3


def test_of_starts_the_kept_one_is_shown():
    recorder = RunRecorder()
    settings = {"k": "2", "restarts": "3", "restart_rounds": "2"}
    with watched_by(recorder.round_closed):
        done = simulated("ifca", settings, rounds=5)
    assert recorder.seen == 1
    found = recorder.runs[0].document()["points"]
    assert found["round"] == [r.round for r in done.history]
    assert found["loss"] == pytest.approx([r.loss for r in done.history], rel=1e-4)


def test_a_sweep_shows_its_first_runs(tmp_path):
    recorder = RunRecorder()
    with watched_by(recorder.round_closed):
        for _ in range(MOST_RUNS + 2):
            simulated(rounds=1)
    path = tmp_path / "page.html"
    write_page(path, "sweep", recorder, [], "a sweep")
    assert len(embedded(path)["runs"]) == MOST_RUNS
    assert f"The first {MOST_RUNS} of {MOST_RUNS + 2} runs." in embedded(path)["note"]


def test_results_histories_stand_in_for_runs(tmp_path):
    history = [{"round": 1, "accuracy": 50.0, "loss": 1.0}, {"round": 2, "accuracy": None, "loss": 0.5}, {"n": 3}]
    path = tmp_path / "page.html"
    write_page(path, "x", RunRecorder(), [{"algorithm": "ifca", "rounds": 2, "history": history}], "x")
    assert embedded(path)["runs"][0]["points"]["accuracy"] == [0.5, None]
    with pytest.raises(ConfigError):
        write_page(tmp_path / "missing" / "x.html", "x", RunRecorder(), [], "x")
