"""What each algorithm's settings imply for the run plan: capabilities, origins, rounds, clusters."""

import dataclasses

import pytest

from aggregator.strategies.base import StrategySettings
from aggregator.strategies.registry import STRATEGIES, make_strategy, settings_of
from shoal.errors import ConfigError
from shoal.protocol.documents import Capabilities
from tests.helpers.plans import run_plan

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


@pytest.mark.parametrize("name", ["k", "restarts", "restart_rounds"])
def test_counts_below_one_are_refused(name):
    with pytest.raises(ConfigError, match="at least 1"):
        settings_of("ifca", {name: "0"})


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


def test_fesem_has_no_way_to_find_the_number():
    with pytest.raises(ConfigError, match="k is a whole number, not 'auto'"):
        settings_of("fesem", {"k": "auto"})


def test_random_starts_need_number_of_models():
    with pytest.raises(ConfigError, match="3 random starts of a number of models that is not given"):
        settings_of("ifca", {"restarts": "3"})


@pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=list(STRATEGIES))
def test_the_setting_of_clusters_exists(strategy):
    kind = strategy.settings_type
    assert kind.clusters_setting in ("", *(f.name for f in dataclasses.fields(kind)))
