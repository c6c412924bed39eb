"""Runs on tiny fleets: the fixed names, the figures of devices, settings, and the references beside a strategy."""

from __future__ import annotations

import functools

import numpy as np
import pytest
from shoal_lab.experiments import registry
from shoal_lab.experiments.wild import runs

from aggregator.rounds.standstill import STANDS_STILL
from shoal.errors import ConfigError, UsageError
from tests.helpers import studies

FIXED = {
    *("scenario", "strategy", "seed", "mean", "worst", "personal_mean", "personal_worst"),
    *("ari", "clusters", "rounds", "history"),
}


def run(scenario="table-wine", algorithm="fedavg", **changes):
    return studies.run("wild", **{"scenario": scenario, "algorithm": algorithm, "rounds": 2, **changes})


@functools.cache
def wine(algorithm):
    """Return two rounds of an algorithm with its defaults, which several tests look at."""
    return run(algorithm=algorithm, seed=3)


def small(scenario, bars, algorithm="fedavg", **changes):
    """Run a scenario of images on a few of them."""
    settings = {"test_images": "5", **changes.pop("settings", {})}
    return run(scenario, algorithm, data_dir=bars, samples=5, settings=settings, **changes)


def kinds(data):
    return {event["kind"] for event in data["events"]}


@pytest.mark.parametrize("algorithm", registry.find("wild").algorithms)
def test_every_strategy_has_the_fixed_names(algorithm):
    data = wine(algorithm)
    assert data.keys() >= FIXED
    assert (data["scenario"], data["strategy"], data["seed"], data["rounds"]) == ("table-wine", algorithm, 3, 2)
    assert [row["round"] for row in data["history"]] == [1, 2]
    assert data["worst"] <= data["mean"] <= 100
    assert data["mean"] == pytest.approx(np.mean(data["by_device"]["plain"]), abs=1e-3)
    assert data["personal_worst"] == pytest.approx(min(data["by_device"]["personal"]), abs=1e-3)


def test_only_the_number_of_groups_is_given():
    assert wine("cfl")["parameters"]["settings"] == {}
    data = wine("fesem")
    assert data["parameters"]["settings"] == {"k": "2"}
    assert data["parameters"]["min_contributors"] == [3]
    assert run(algorithm="fesem", settings={"given_groups": "off"})["parameters"]["settings"] == {}
    assert wine("fedgroup")["parameters"]["settings"] == {}, "it finds the number itself"
    assert run(algorithm="ifca", settings={"k": "3"})["parameters"]["settings"] == {"k": "3"}
    assert run("table-iris", "fesem")["parameters"]["settings"] == {"k": "2"}, "without groups"


def test_a_scenario_may_allow_means_of_two():
    assert run("few-3-2")["parameters"]["min_contributors"] == [2]
    assert run("few-3-2", settings={"min_contributors": "3"})["parameters"]["min_contributors"] == [3]


def test_local_devices_have_own_models(bars):
    """And true groups are trained apart, also one of a lone device."""
    data, groups = wine("local"), wine("true-groups")
    assert (data["clusters"], data["parameters"]["min_contributors"]) == (6, [1])
    assert "alone" not in data["choices"]
    assert (groups["ari"], groups["clusters"], groups["parameters"]["min_contributors"]) == (1.0, 2, [3, 3])
    lone = small("unequal-10-9-1", bars, "true-groups")
    assert sorted(lone["parameters"]["min_contributors"]) == [1, 3, 3]


def test_a_regression_has_a_squared_error():
    data = run("table-diabetes", "local", rounds=5)
    assert (data["measure"], data["accuracy"]) == ("squared error", None)
    assert data["worst"] >= data["mean"] > 0
    assert data["history"][-1]["accuracy"] is None
    assert data["history"][-1]["test_loss"] == pytest.approx(data["mean"], rel=0.05)


def test_no_group_is_too_small_for_a_mean(bars):
    """Two groups of four devices, which one-shot clustering finds: enough for a mean of three, too few for one of five."""
    found = small("permuted-2-of-4", bars, algorithm="one-shot", rounds=12, settings={"k": "2"})
    assert (found["clusters"], found["standing_still"]) == (2, 0)
    one = small("permuted-2-of-4", bars, algorithm="one-shot", rounds=12, settings={"k": "2", "min_contributors": "5"})
    assert (one["clusters"], one["standing_still"]) == (1, 0)
    assert STANDS_STILL not in kinds(found) | kinds(one)


def test_a_fifth_of_20_is_a_mean_of_three(bars):
    moving = small("part-0.2-of-20", bars, rounds=11)
    assert (moving["standing_still"], moving["parameters"]["participation"]) == (0, 0.2)
    with pytest.raises(ConfigError, match="4 devices take part in a round, and a mean takes 5"):
        small("part-0.2-of-20", bars, rounds=11, settings={"min_contributors": "5"})


def test_faulty_devices_count_apart(bars):
    data = small("faulty-2-noise", bars)
    plain = np.array(data["by_device"]["plain"])
    sound = np.array(data["by_device"]["groups"]) >= 0
    assert sound.sum() == 18
    assert data["sound"]["mean"] == pytest.approx(plain[sound].mean(), abs=1e-3)
    assert data["parameters"]["groups"] == 2


def test_data_change_in_the_middle(bars):
    data = small("drift-together", bars, rounds=4)
    assert data["parameters"]["groups"] == 1
    assert set(data["by_device"]["groups"]) == {0}
    assert len(small("drift-together", bars, "true-groups", rounds=4)["history"]) == 2


def test_events_keep_three_digits():
    assert runs._short([0.123456, (1.23456e-9, 7)]) == [0.123, [1.23e-9, 7]]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scenario": None}, "which scenario?"),
        ({"devices": 5}, "fixes the number of devices"),
        ({"settings": {"test_images": "0"}}, "0 test_images"),
        ({"algorithm": "local", "settings": {"k": "2"}}, "no setting 'k' with local"),
    ],
)
def test_refusals(changes, message):
    with pytest.raises(UsageError, match=message):
        run(**changes)
