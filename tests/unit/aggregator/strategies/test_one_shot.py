"""One-shot clustering: k-means of the devices' own models, then FedAvg inside the clusters."""

import dataclasses

import numpy as np
import pytest

from aggregator.strategies.base import ClusterModel
from shoal.errors import ConfigError
from shoal.protocol.messages import Phase
from tests.helpers.plans import D, Rounds, contribution, run_plan

DEVICES = tuple(f"dev-{i}" for i in range(6))
TRUTH = {d: i % 2 for i, d in enumerate(DEVICES)}
RNG = np.random.default_rng(4)
GOALS = RNG.standard_normal((2, D)) * 5
OWN = {d: (GOALS[g] + 0.2 * RNG.standard_normal(D)).astype(np.float32) for d, g in TRUTH.items()}
STEP = {d: RNG.standard_normal(D).astype(np.float32) for d in DEVICES}
SAMPLES = {d: 10 * (i + 1) for i, d in enumerate(DEVICES)}


def answer(device, assignment, round_):
    phase = Phase(assignment.phase)
    vector = (OWN if phase is Phase.PRETRAIN else STEP)[device]
    return contribution(
        device, vector, round=round_, model=assignment.candidates[0], phase=phase, samples=SAMPLES[device]
    )


def one_shot(**settings):
    changes = {k: settings.pop(k) for k in ("min_contributors", "participation", "rounds") if k in settings}
    return Rounds(run_plan("one-shot", {"k": 2, **settings}, **changes), DEVICES)


def test_first_round_finds_the_groups():
    """The first round finds the groups and starts them at the mean of their models."""
    rounds = one_shot()
    outcome = rounds.step(answer)
    assert outcome.clusters == TRUTH
    assert [(e.kind, e.detail) for e in outcome.events] == [("clustered", {"sizes": [3, 3]})]
    for j, slot in enumerate(rounds.state.slots):
        mine = [d for d in DEVICES if TRUTH[d] == j]
        expected = np.average([OWN[d] for d in mine], 0, [SAMPLES[d] for d in mine])
        np.testing.assert_allclose(rounds.theta(slot), expected, rtol=1e-5)
        assert rounds.contributors(slot) == 3


def test_each_cluster_is_averaged_alone():
    """Then each cluster is averaged by itself."""
    rounds = one_shot(start="origin").after(answer)
    assert rounds.state.slots == (ClusterModel(), ClusterModel())
    rounds.step(answer)
    for j, slot in enumerate(rounds.state.slots):
        mine = [d for d in DEVICES if TRUTH[d] == j]
        expected = np.average([STEP[d] for d in mine], 0, [SAMPLES[d] for d in mine])
        np.testing.assert_allclose(rounds.theta(slot), expected, rtol=1e-5)


def test_everybody_trains_alone_first():
    """Alg. 1 line 1 is for all devices; later rounds draw among those that have a cluster."""
    rounds, assignments = one_shot(participation=0.34), []

    def spy(device, assignment, round_):
        assignments.append((round_, Phase(assignment.phase), assignment.candidates))
        return answer(device, assignment, round_)

    rounds.step(spy)
    assert {o[1:] for o in assignments} == {(Phase.PRETRAIN, (2,))}
    assert len(assignments) == 6
    rounds.step(spy)
    later = [o for o in assignments if o[0] == 2]
    assert len(later) == 2
    assert {o[1] for o in later} == {Phase.TRAIN}


def test_latecomer_takes_least_loss():
    """Its own model could not be compared with those of the first round, which were masked under another key."""
    rounds, asked = one_shot(start="origin"), []

    def choosing(device, assignment, round_):
        asked.append((round_, device, Phase(assignment.phase), assignment.candidates))
        given = answer(device, assignment, round_)
        return dataclasses.replace(given, model=1) if len(assignment.candidates) > 1 else given

    outcome = rounds.step(choosing, present=DEVICES[:5])
    assert "dev-5" not in outcome.clusters
    outcome = rounds.step(choosing)
    assert [a for a in asked if a[1] == "dev-5"] == [(2, "dev-5", Phase.TRAIN, (0, 1))]
    assert outcome.clusters == TRUTH
    assert [(e.kind, e.detail) for e in outcome.events] == [
        ("newcomer", {"device": "dev-5", "cluster": 1, "by": "loss"})
    ]
    assert [rounds.contributors(s) for s in rounds.state.slots] == [3, 3]
    assert rounds.step(choosing).events == ()


def test_too_few_models_are_asked_for_again():
    rounds = one_shot()
    outcome = rounds.step(lambda d, o, r: answer(d, o, r) if d == "dev-0" else None)
    assert (outcome.clusters, outcome.events[0].kind) == ({}, "clustering-postponed")
    assert rounds.step(answer).clusters == TRUTH


def test_cluster_of_too_few_joins_nearest():
    """Its model could not move. If all devices together are too few, the one cluster stays at the origin."""
    rounds = one_shot(min_contributors=3).after(answer, present=DEVICES[:5])
    assert [s.version for s in rounds.state.slots] == [1]
    rounds = one_shot(min_contributors=6).after(answer, present=DEVICES[:5])
    assert [s.version for s in rounds.state.slots] == [0]


def test_leftover_device_takes_least_loss():
    """In the end a device without a cluster takes the model of least loss."""
    rounds = one_shot()
    assert rounds.strategy.final(rounds.state, 21, DEVICES).assignments["dev-0"].candidates == (2,)
    rounds.step(answer, present=DEVICES[:5])
    assignments = rounds.strategy.final(rounds.state, 21, DEVICES).assignments
    assert (assignments["dev-5"].candidates, assignments["dev-1"].candidates) == ((0, 1), (1,))


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"k": 0}, "k is at least 1, or auto"),
        ({"k": 10**6}, "k is from 1 to"),
        ({"start": "zero"}, "neither mean nor"),
        ({"rounds": 1}, "round of its own"),
    ],
)
def test_senseless_plans_are_refused(settings, reason):
    """Plans that make no sense are refused."""
    with pytest.raises(ConfigError, match=reason):
        one_shot(**settings)
