"""Runs of Ghosh et al.'s experiments: settings, restarts, and the options that each algorithm runs with."""

from types import SimpleNamespace

import numpy as np
import pytest
from shoal_lab.experiments.common.experiment import Options, Quiet
from shoal_lab.experiments.ifca import runs
from shoal_lab.experiments.ifca.alone import Alone
from shoal_lab.experiments.ifca.runs import Setup, Starts, ifca_settings, run_setup

from aggregator.strategies.base import Event
from shoal.errors import UsageError
from shoal.simulation.data import Population, Shard
from shoal.simulation.trainers.networks import Softmax
from shoal.task.manifest import LocalTraining

LOCAL = LocalTraining(epochs=0, steps=2, batch_size=0, lr=0.3)


def shard(seed, n=6):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 3)).astype(np.float32)
    return Shard(x, (x[:, 0] > 0).astype(np.int64))


def setup(**changes):
    tests = tuple(shard(9 + i) for i in range(4))
    fields = {
        "experiment": "toy",
        "population": Population(tuple(map(shard, range(4))), test=tests, groups=(0, 0, 1, 1)),
        "network": Softmax(3, 2),
        "local": LOCAL,
        "rounds": 30,
        "k": 2,
        "published": {"ifca": 95},
        "restarts": 3,
        "evaluate_every": 1,
    }
    return Setup(**{**fields, **changes})


@pytest.mark.parametrize(
    ("changes", "given", "expected"),
    [
        ({}, {}, {"k": "2", "restarts": "3", "restart_rounds": "10"}),
        ({"rounds": 11}, {}, {"k": "2", "restarts": "3", "restart_rounds": "10"}),
        ({"rounds": 3}, {}, {"k": "2", "restarts": "3", "restart_rounds": "2"}),
        ({"rounds": 1}, {}, {"k": "2"}),
        ({"restarts": 1}, {}, {"k": "2", "restarts": "1"}),
        ({}, {"restarts": "1"}, {"k": "2", "restarts": "1"}),
        ({}, {"k": "5", "restart_rounds": "4"}, {"k": "5", "restarts": "3", "restart_rounds": "4"}),
        (
            {"defaults": {"stable_rounds": "5", "probe_every": "9"}},
            {"stable_rounds": "0"},
            {"k": "2", "restarts": "3", "restart_rounds": "10", "stable_rounds": "0", "probe_every": "9"},
        ),
    ],
)
def test_settings_by_hand_win_over_the_experiments_and_these_over_ours(changes, given, expected):
    """A run too short to drop starts has a single one; and a single start is never dropped."""
    assert ifca_settings(setup(**changes), given) == expected


def test_starts_are_read_off_the_events():
    found = Starts(
        [
            (0, Event(3, "start-ended", {"start": 0, "loss": 2.0})),
            (0, Event(6, "start-ended", {"start": 1, "loss": 1.0})),
            (3, Event(6, "start-kept", {"start": 1})),
            (7, Event(10, "broadcast-narrowed", {})),
            (8, Event(11, "split", {})),
        ]
    )
    assert [e["loss"] for e in found.ended] == [2.0, 1.0]
    assert found.kept == 1
    assert found.broadcasts == [{"round": 7, "kind": "broadcast-narrowed"}]
    assert Starts([]).kept is None


@pytest.mark.parametrize("algorithm", ["global", "local"])
def test_algorithms_without_settings_refuse_them(algorithm):
    options = Options(algorithm=algorithm, settings={"mine": "1", "stable_rounds": "3"})
    with pytest.raises(UsageError, match=f"{algorithm} has no setting 'stable_rounds'"):
        run_setup(setup(), options, Quiet(), ("mine",))


@pytest.fixture
def asked(monkeypatch):
    """Return the arguments that the simulator is called with; the run ends there."""
    seen = {}

    def simulate(strategy, settings, _population, _network, options, _told):
        seen.update(strategy=strategy, settings=settings, options=options)
        raise InterruptedError

    monkeypatch.setattr(runs, "simulate", simulate)

    def call(algorithm, **changes):
        options = Options(algorithm=algorithm, seed=4, mask="rotation", settings={"mine": "1"})
        with pytest.raises(InterruptedError):
            run_setup(setup(**changes), options, Quiet(), ("mine",))
        return SimpleNamespace(**seen)

    return call


@pytest.mark.parametrize(
    ("algorithm", "strategy", "settings", "protocol", "shared"),
    [
        ("ifca", "ifca", {"k": "2", "restarts": "3", "restart_rounds": "10"}, "argmin", True),
        (None, "ifca", {"k": "2", "restarts": "3", "restart_rounds": "10"}, "argmin", True),
        ("global", "fedavg", {}, "argmin", False),
        ("one-shot", "one-shot", {"k": "2"}, "assigned", False),
    ],
)
def test_each_algorithm_has_its_strategy_protocol_and_segments(asked, algorithm, strategy, settings, protocol, shared):
    """Only IFCA shares layers; the papers know neither a cap nor a screen."""
    segments = (("shared", 6), ("cluster", 2))
    seen = asked(algorithm, segments=segments, participation=0.5, evaluate_every=7)
    given = seen.options
    assert (seen.strategy, seen.settings, given.protocol) == (strategy, settings, protocol)
    assert given.segments == (segments if shared else ())
    assert (given.seed, given.mask, given.participation, given.evaluate_every) == (4, "rotation", 0.5, 7)
    assert (given.weighting, given.weight_cap, given.norm_screen) == ("uniform", 0.0, False)


def test_a_run_reports_its_starts():
    groups = (0, 0, 1, 1)
    probes = tuple(shard(20 + i, 9) for i in range(2))
    data = Population(tuple(map(shard, range(4))), groups=groups, probes=probes, probe_groups=(0, 1))
    found = run_setup(setup(population=data, rounds=3, restarts=2), Options(), Quiet(), ()).data()
    assert (found["experiment"], found["algorithm"], found["rounds"]) == ("toy", "ifca", 3)
    assert len(found["starts"]) == 2
    losses = [s["loss"] for s in found["starts"]]
    assert found["start_kept"] == losses.index(min(losses))
    assert found["restart_rounds"] == 2
    assert set(found["identity_test"]) == {"purity", "ari"}
    assert [h["round"] for h in found["history"]] == [1, 2, 3]
    assert found["best_accuracy"] == max(h["accuracy"] for h in found["history"])
    assert found["parameters"]["settings"] == {"k": "2", "restarts": "2", "restart_rounds": "2"}
    assert (found["parameters"]["steps"], found["parameters"]["lr"], found["parameters"]["samples"]) == (2, 0.3, 6)


def closed(round_, purity):
    figures = {"purity": purity, "accuracy": None}
    return SimpleNamespace(round=round_, sizes=(2, 2), clusters=2, ari=None, as_dict=lambda: figures, **figures)


@pytest.mark.parametrize(
    ("purities", "expected"),
    [([1.0, 0.5, 0.5, 1.0, 1.0], 4), ([1.0, 1.0], 1), ([0.5, 1.0, 0.5], None), ([None, 1.0], 2), ([1.0, 0.75], None)],
)
def test_clusters_count_as_pure_from_the_round_after_the_last_impure_one(monkeypatch, purities, expected):
    """A round in which they were pure for a while does not count, nor does one without clusters."""
    history = [closed(i + 1, p) for i, p in enumerate(purities)]
    done = SimpleNamespace(history=history, events=(), final=None, best_accuracy=None, cpu_seconds_per_round=0.1)
    monkeypatch.setattr(runs, "simulate", lambda *_: done)
    assert run_setup(setup(), Options(), Quiet(), ()).data()["pure_from_round"] == expected


@pytest.mark.parametrize(
    ("accuracies", "mean", "spread"), [([50.0, np.nan, 70.0], 60.0, 10.0), ([np.nan, np.nan, np.nan], None, None)]
)
def test_devices_that_train_alone_are_averaged_over_those_that_were_tested(monkeypatch, accuracies, mean, spread):
    seen = {}

    def train_alone(_population, _network, _local, *, rounds, seed, told, threads):
        seen.update(rounds=rounds, seed=seed, threads=threads)
        return Alone(np.array(accuracies), np.array([1.0, 2.0, 3.0]), 8.0)

    monkeypatch.setattr(runs, "train_alone", train_alone)
    options = Options(algorithm="local", seed=3, threads=2)
    found = run_setup(setup(alone_rounds=40), options, Quiet(), ()).data()
    assert seen == {"rounds": 40, "seed": 3, "threads": 2}
    assert (found["accuracy"], found["accuracy_spread"]) == (mean, spread)
    assert found["history"] == [{"round": 40, "accuracy": mean, "loss": 2.0, "purity": None}]
    assert found["cpu_seconds_per_round"] == 0.2
    assert (found["clusters"], found["parameters"]["mask"]) == (4, "nothing leaves a device")
    run_setup(setup(), options, Quiet(), ())
    assert seen["rounds"] == 30
