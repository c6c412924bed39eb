"""Strategies by name, and the mask modes that each works in."""

import dataclasses

import pytest

from aggregator.numerics.parted import MOST_COMPARED
from aggregator.strategies.base import ORTHOGONAL_MODES, StrategySettings
from aggregator.strategies.fedavg import FedAvg
from aggregator.strategies.registry import (
    STRATEGIES,
    TooManyComparedError,
    build_strategy,
    check_compared,
    find_strategy,
    make_strategy,
    settings_of,
    strategy_names,
)
from crypto.mask.modes.registry import MODES
from shoal.errors import ConfigError, UsageError
from shoal.protocol.documents import Capabilities, SegmentSpec
from shoal.protocol.recipe import LocalTraining
from shoal.util.extensions import STRATEGIES_GROUP
from tests.helpers.extensions import install
from tests.helpers.plans import run_plan
from tests.unit.shoal.protocol.test_shards import with_workers


def test_papers_strategies_take_every_mode():
    """They look at dot products, norms and means alone, which every mode keeps."""
    assert frozenset(MODES) == ORTHOGONAL_MODES
    assert {s.modes for s in STRATEGIES.values()} == {ORTHOGONAL_MODES}


class Sorted(FedAvg):
    """Works in a permutation alone."""

    name = "sorted"
    modes = frozenset({"none", "permutation"})


def test_undeclared_mode_is_refused(monkeypatch):
    """By class and by name: the owner, the aggregator and the simulator all build strategies here."""
    assert build_strategy(Sorted, run_plan(mode="permutation")).name == "sorted"
    for build in (lambda run: build_strategy(Sorted, run), make_strategy):
        monkeypatch.setitem(STRATEGIES, "fedavg", Sorted)
        with pytest.raises(ConfigError, match="sorted does not work in mask mode rotation") as caught:
            build(run_plan(mode="rotation"))
        assert caught.value.hint == "it works in: none, permutation"


EXTRA = """
from aggregator.strategies.fedavg import FedAvg

class Slow(FedAvg):
    name = "slow"

class Impostor(FedAvg):
    name = "fedavg"
"""


def test_packages_strategy_is_found(tmp_path, monkeypatch):
    """A packages strategy is found by its name."""
    install(
        tmp_path, monkeypatch, STRATEGIES_GROUP, {"slow": "Slow", "other": "Slow", "text": "EXTRA"}, EXTRA + "EXTRA = 1"
    )
    assert make_strategy(run_plan(algorithm="slow")).name == "slow"
    assert [*STRATEGIES, "other", "slow", "text"] == strategy_names()
    with pytest.raises(ConfigError, match="installed as 'other' calls itself 'slow'"):
        find_strategy("other")
    with pytest.raises(UsageError, match="a strategy is a class, not 1"):
        find_strategy("text")


def test_our_names_can_not_be_replaced(tmp_path, monkeypatch):
    """A package cannot replace a strategy of ours."""
    install(tmp_path, monkeypatch, STRATEGIES_GROUP, {"fedavg": "Impostor"}, EXTRA)
    assert find_strategy("fedavg") is FedAvg
    assert strategy_names() == list(STRATEGIES)


def test_an_unknown_name_is_refused():
    with pytest.raises(ConfigError, match="no algorithm 'fedagv'") as caught:
        find_strategy("fedagv")
    assert "fedavg" in caught.value.hint


SHARDED = {"segments": (SegmentSpec("cluster", 100),), "workers": with_workers(2).workers}


@pytest.mark.parametrize(
    ("algorithm", "settings", "participation", "devices", "hint"),
    [
        ("cfl", {}, 1.0, MOST_COMPARED, None),
        ("cfl", {}, 1.0, MOST_COMPARED + 1, "give --participation 0.999 or less; or take fedavg"),
        ("cfl", {}, 0.289, 20_000, None),
        ("cfl", {}, 0.3, 20_000, "give --participation 0.289 or less"),
        ("one-shot", {"k": "4"}, 0.1, 20_000, "give --set k=auto, which compares a sample; or take"),
        ("one-shot", {}, 1.0, 20_000, None),
        ("fedgroup", {"groups": "3"}, 1.0, 60_000, None),
        ("fedgroup", {"groups": "3", "alpha": "3000"}, 0.1, 60_000, "give --set groups=auto"),
        ("fedgroup", {"groups": "3", "alpha": "3000", "rcc": "true"}, 1.0, 60_000, None),
        *((name, {}, 1.0, 60_000, None) for name in ("fedavg", "fedprox", "ifca", "fesem", "local")),
    ],
)
def test_too_many_comparisons_are_refused(algorithm, settings, participation, devices, hint):
    """A sharded run that would compare too many updates is refused."""
    run = run_plan(algorithm, settings, participation=participation, **SHARDED)
    check_compared(dataclasses.replace(run, workers=()), devices)
    if hint is None:
        check_compared(run, devices)
        return
    with pytest.raises(TooManyComparedError, match=f"workers compares {MOST_COMPARED} at most") as caught:
        check_compared(run, devices)
    assert caught.value.hint.startswith(hint)
    assert "--participation" in caught.value.hint or algorithm != "cfl"


@pytest.mark.parametrize("algorithm", [name for name in STRATEGIES if STRATEGIES[name].settings_type.most_kept > 1])
def test_all_choose_among_earlier_models(algorithm):
    """Each device is offered the models of all earlier clusters: in the first round, or in the final one if it was away."""
    settings = {"k": 3} if algorithm == "fesem" else {}
    strategy = make_strategy(run_plan(algorithm, settings, origins=3, local=LocalTraining(prox_mu=1.0), rounds=9))
    state, plan = strategy.plan(strategy.init(("a", "b", "c")), 1, ("a", "b"))
    for found, asked in ((plan, {"a", "b"}), (strategy.final(state, 10, ("a", "b", "c")), {"a", "b", "c"})):
        assert found.assignments.keys() == asked
        (candidates,) = {order.candidates for order in found.assignments.values()}
        assert sorted(found.models[model].origin for model in candidates) == [0, 1, 2]


# -- What each algorithm's settings imply for the run plan: capabilities, origins, rounds, clusters --


NONE = Capabilities()
COLD = Capabilities(pretrain=True)
GROUPS = Capabilities(pretrain=True, compare=True)
CFL = Capabilities(margins=True, compare=True)
CASES = [
    ("fedavg", {"discrepancy": "on"}, NONE),
    ("fedprox", {}, NONE),
    ("local", {}, NONE),
    ("ifca", {}, NONE),
    ("ifca", {"k": "2", "restarts": "3"}, NONE),
    ("fesem", {}, Capabilities(compare=True)),
    ("one-shot", {}, COLD),
    ("fedgroup", {}, GROUPS),
    ("fedgrouprox", {}, GROUPS),
    ("fedgroup", {"rac": "on"}, COLD),
    *(("fedgroup", {"eta_g": text}, GROUPS) for text in ("0", "0.0", "0e5", "-0")),
    *(("fedgroup", {"eta_g": t}, dataclasses.replace(GROUPS, scale=True)) for t in ("0.5", "1", "1e-3", "+.01")),
    ("cfl", {}, CFL),
    ("cfl", {"path": "on"}, dataclasses.replace(CFL, keep_path=True)),
    ("cfl", {"path": "TRUE"}, dataclasses.replace(CFL, keep_path=True)),
    ("cfl", {"path": "off"}, CFL),
    ("cfl", {"validate": "off"}, dataclasses.replace(CFL, margins=False)),
    ("cfl", {"validate": "off", "merge_every": "5"}, CFL),
]


@pytest.mark.parametrize(("algorithm", "settings", "expected"), CASES)
def test_capabilities_of_each_algorithm(algorithm, settings, expected):
    assert settings_of(algorithm, settings).capabilities == expected


def test_every_algorithm_has_a_case():
    assert {name for name, _, _ in CASES} == set(STRATEGIES)


def test_the_defaults_ask_for_nothing():
    plain = StrategySettings()
    assert (plain.capabilities, plain.origins, plain.discarded_rounds) == (NONE, 1, 0)
    assert (plain.clusters_setting, plain.splits, plain.reads) == ("", False, "updates")


@pytest.mark.parametrize(("algorithm", "name"), [("ifca", "k"), ("one-shot", "k"), ("fedgroup", "groups")])
def test_number_of_clusters_may_be_found(algorithm, name):
    """The number of clusters may be left to the strategy."""
    found, given = settings_of(algorithm, {name: "auto"}), settings_of(algorithm, {name: "3"})
    assert found == settings_of(algorithm, {})
    assert (found.clusters, given.clusters, found.origins) == (1, 3, 1)
    assert found.reads == "updates"
    for wrong in ("0", "-1", "many", ""):
        with pytest.raises(ConfigError, match=r"auto|at least 1"):
            make_strategy(run_plan(algorithm, {name: wrong}))


@pytest.mark.parametrize(
    ("algorithm", "settings", "match"),
    [
        ("fesem", {"k": "auto"}, "k is a whole number, not 'auto'"),
        ("ifca", {"restarts": "3"}, "3 random starts of a number of models that is not given"),
    ],
)
def test_number_of_models_must_be_given(algorithm, settings, match):
    """FeSEM can't find it, and IFCA can't while it draws random starts."""
    with pytest.raises(ConfigError, match=match):
        settings_of(algorithm, settings)


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
def test_the_setting_of_clusters_exists(strategy):
    kind = strategy.settings_type
    assert kind.clusters_setting in ("", *(f.name for f in dataclasses.fields(kind)))
