"""Checks of a run against the roster: refusals and warnings."""

import pytest

from aggregator.strategies.registry import plan_settings
from shoal.errors import ConfigError
from shoal.owner.runs.plan import EXPIRES_SOON_S, check_devices, check_roster, doubts, roster_doubts
from shoal.protocol.documents import Capabilities, Roster
from tests.helpers.plans import run_plan


def roster(count):
    return tuple(f"dev-{n}" for n in range(count))


def told(algorithm, count, settings=None, **changes):
    plan = run_plan(algorithm, settings, **{"min_contributors": 3, **changes})
    parsed = plan_settings(plan)
    check_devices(plan, roster(count), parsed)
    return list(doubts(plan, roster(count), parsed))


@pytest.mark.parametrize(
    ("algorithm", "count", "settings"),
    [
        ("fedavg", 3, {}),
        ("ifca", 6, {"k": 2}),
        ("one-shot", 6, {"k": 2}),
        ("fesem", 6, {}),
        ("fedgroup", 9, {"groups": 3}),
        ("cfl", 6, {}),
    ],
)
def test_as_many_as_clusters_need(algorithm, count, settings):
    """With one fewer the owner gets a warning; a single model with fewer devices never changes and is refused."""
    assert told(algorithm, count, settings) == []
    if algorithm == "fedavg":
        with pytest.raises(ConfigError, match=r"min_contributors 3 wants 3 devices .* there are 2"):
            told(algorithm, 2)
        return
    (doubt,) = told(algorithm, count - 1, settings)
    assert "a cluster of fewer devices than min_contributors keeps its starting model" in doubt


def test_what_cfl_can_not_split_is_told():
    assert "CFL can't split 5 devices: each side needs min_contributors, 3 of them" in told("cfl", 5)[0]


def test_inter_group_leaves_means_plain():
    """Inter group aggregation leaves means plain."""
    scaled = {"capabilities": Capabilities(pretrain=True, scale=True)}
    (doubt,) = told("fedgroup", 9, {"eta_g": 0.1}, robust="rfa", **scaled)
    assert "robust rfa has no effect" in doubt
    assert told("fedgroup", 9, {"eta_g": 0.1}, robust="off", **scaled) == []


def test_drawn_devices_count():
    """Devices drawn for a round are what counts."""
    assert "CFL can't split 5 devices a round" in told("cfl", 10, participation=0.5)[0]
    with pytest.raises(ConfigError, match="draws 2 of 10 devices for a round"):
        told("fedavg", 10, participation=0.2)


def test_given_clusters_take_turns():
    """Given clusters take turns so all devices count."""
    assert told("ifca", 10, {"k": 2}, participation=0.5) == []
    assert "5 devices for 2 clusters" in told("ifca", 5, {"k": 2}, participation=0.7)[0]
    assert "5 devices a round for 6 clusters" in told("ifca", 10, {"k": 6}, participation=0.5, min_contributors=1)[0]


@pytest.mark.parametrize("algorithm", ["ifca", "one-shot", "fedgroup"])
def test_unknown_number_raises_no_doubt(algorithm):
    """A number of clusters that is to be found raises no doubt."""
    assert told(algorithm, 4) == []


@pytest.mark.parametrize(
    ("algorithm", "setting"), [("ifca", "k"), ("one-shot", "k"), ("fesem", "k"), ("fedgroup", "groups")]
)
def test_too_many_clusters_are_refused(algorithm, setting):
    """More clusters than devices are refused."""
    assert told(algorithm, 4, {setting: 4}, min_contributors=1) == []
    with pytest.raises(ConfigError, match=f"{setting} is 5, and there are 4 devices") as caught:
        told(algorithm, 4, {setting: 5}, min_contributors=1)
    assert f"lower {setting}" in caught.value.hint


def test_ending_roster_is_told():
    """1 700 000 000 is the 14th of November 2023."""
    ends_s = 1_700_000_000
    held = Roster(
        fleet="reef",
        sequence=1,
        issued_at_s=ends_s - 10**7,
        expires_at_s=ends_s,
        aggregator=None,
        devices=(),
        revoked=(),
    )
    check_roster(held, ends_s)
    assert list(roster_doubts(held, ends_s - EXPIRES_SOON_S)) == []
    (doubt,) = roster_doubts(held, ends_s - EXPIRES_SOON_S + 1)
    assert doubt.startswith("the roster expires on 2023-11-14")
    with pytest.raises(ConfigError, match="expired on 2023-11-14") as caught:
        check_roster(held, ends_s + 1)
    assert caught.value.hint == "shoal-fleet renew, then shoal-fleet publish"
