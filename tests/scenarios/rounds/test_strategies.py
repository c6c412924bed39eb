"""Whole runs on the loopback fleet: local training, FedProx, FeSEM, one-shot clustering, FedGroup and FedGrouProx."""

import dataclasses

import numpy as np
import pytest

from shoal.protocol.recipe import LocalTraining
from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    all_but_the_first,
    events,
    grouped_data,
    make_exact_fleet,
    make_fleet,
    restart_aggregator,
    same_partition,
    thetas,
    truth_of,
)
from tests.scenarios.round_fleets import clear_means, held_states, relayed_steps

QUICK = LocalTraining(epochs=2, batch_size=10, lr=0.5)
ALONE = LocalTraining(epochs=6, batch_size=10, lr=0.5)
FORGETFUL = LocalTraining(epochs=30, batch_size=10, lr=0.8)
PROXIMAL = dataclasses.replace(QUICK, prox_mu=0.05)

FEDGROUP = {
    "algorithm": "fedgroup",
    "rounds": 6,
    "settings": {"groups": "2", "alpha": "2"},
    "local": QUICK,
    "pretrain": ALONE,
}
MADC = {**FEDGROUP, "settings": {"groups": "2", "alpha": "2", "measure": "madc"}}
FEDGROUPROX = {**FEDGROUP, "algorithm": "fedgrouprox", "local": PROXIMAL}
ONE_SHOT = {"algorithm": "one-shot", "rounds": 4, "settings": {"k": "2"}, "local": QUICK, "pretrain": ALONE}
FESEM = {"algorithm": "fesem", "rounds": 5, "settings": {"k": "2"}, "local": FORGETFUL, "seed": 3}
FEDPROX = {"algorithm": "fedprox", "local": PROXIMAL}
LOCAL = {"algorithm": "local", "local": QUICK}
CLUSTERING = {"fedgroup": FEDGROUP, "madc": MADC, "fedgrouprox": FEDGROUPROX, "one-shot": ONE_SHOT, "fesem": FESEM}


def by_name(cases, *repeated):
    """Return the cases with their names; those that are like another are left to `make long`."""
    return [
        pytest.param(options, id=name, marks=pytest.mark.long if name in repeated else ())
        for name, options in cases.items()
    ]


def test_fedgroup_groups_all_in_the_end(tmp_path):
    """With partial participation, too, everybody is grouped in the end."""
    options = {**FEDGROUP, "rounds": 14, "participation": 0.5}
    with make_fleet(tmp_path / "fleet", grouped_data(8, 2), **options) as fleet:
        records = fleet.run(20)
        assert same_partition(records[-1]["clusters"], truth_of(8, 2))
        assert {r["ordered"] for r in records[3:-1]} <= {1, 2, 3, 4}


@pytest.mark.parametrize("options", by_name(CLUSTERING, "madc", "fedgrouprox"))
def test_hidden_groups_are_found_with_models(tmp_path, options):
    """The hidden groups are found and each has its model."""
    with make_fleet(tmp_path / "fleet", grouped_data(8, 2), **options) as fleet:
        records = fleet.run(20)
        assert same_partition(records[-1]["clusters"], truth_of(8, 2))
        assert records[-1]["correct"] / records[-1]["tested"] > 0.75
        assert same_partition({d: hash(m) for d, m in thetas(fleet).items()}, truth_of(8, 2))


def test_local_training_gives_own_models(tmp_path):
    """Local training gives everybody a model of its own."""
    with make_fleet(tmp_path / "fleet", grouped_data(4), **LOCAL) as fleet:
        records = fleet.run(10)
        assert sorted(records[-1]["clusters"].values()) == [0, 1, 2, 3]
        assert len(set(thetas(fleet).values())) == 4
        assert records[2]["loss"] < records[0]["loss"]


def test_proximal_term_holds_devices_back(tmp_path):
    """The same fleet with and without it: the updates are shorter, and only the algorithm's name differs."""
    norms = []
    for options in (FEDPROX, {"algorithm": "fedavg", "local": QUICK}):
        with make_fleet(tmp_path / options["algorithm"], **options) as fleet:
            norms.append(fleet.run(10)[0]["norms"])
    assert all(norms[0][d] < norms[1][d] for d in norms[0])


@pytest.mark.parametrize("mode", with_long(["permutation", "rotation"], "rotation"))
def test_newcomers_follow_their_direction(tmp_path, mode):
    """Devices that the group cold start did not draw, and one that joins the fleet later, with keys of its own."""
    data = grouped_data(7, 2)
    late = data.pop("dev-06")
    with make_fleet(tmp_path / "fleet", data, mode=mode, **{**FEDGROUP, "rounds": 9}) as fleet:
        fleet.run_until(lambda: fleet.closed() == 3, 10)
        fleet.add_device("dev-06", late)
        records = fleet.run(100)
        (cold,) = events(records, "cold-start")
        assert (cold["round"], cold["devices"], sum(cold["sizes"])) == (1, 4, 4)
        first, second = events(records, "newcomers")
        assert (first["round"], len(first["groups"])) == (2, 2)
        assert list(second["groups"]) == ["dev-06"]
        assert {first["by"], second["by"]} == {"direction"}
        assert [r["ordered"] for r in records[:3]] == [4, 2, 6]
        assert records[second["round"] - 1]["ordered"] == 1
        assert records[-2]["ordered"] == 7
        assert same_partition(records[-1]["clusters"], truth_of(7, 2))
        # Round 1 is the cold start; the two placements move no model either.
        assert len(events(records, "discrepancy")) == len(records) - 4


def test_added_models_go_over_the_wire(tmp_path):
    """Alg. 2, line 18: each group adds a share of the other's model to its own, and the mask changes it by rounding."""
    eta_g, options = 0.05, {**FEDGROUP, "rounds": 4}
    settings = {**FEDGROUP["settings"], "eta_g": str(eta_g)}
    ends = []
    for mode in ("permutation", "none"):
        with make_fleet(tmp_path / mode, grouped_data(6, 2), mode=mode, **{**options, "settings": settings}) as fleet:
            fleet.run_until(lambda f=fleet: len(f.records()) == f.plan.recipe.rounds - 1, 20)
            before = held_states(fleet, "dev-00")
            records = fleet.run(20)
            assert same_partition(records[-1]["clusters"], truth_of(6, 2))
            last = relayed_steps(fleet)[-1]
            assert last.step.round == fleet.plan.recipe.rounds
            own, other = zip(*(r.terms for r in last.step.recipes if r.model < 2), strict=True)
            assert [term.weight for term in own] == [1, 1]
            share, start = [term.weight for term in other], [before[term.state] for term in own]
            # The mean of each group has the share of the other's mean in it.
            relayed = clear_means(fleet, last)
            trained = [
                start[g] + (relayed[g] - share[g] * relayed[1 - g]) / (1 - share[g] * share[1 - g]) for g in (0, 1)
            ]
            np.testing.assert_allclose(share[::-1], eta_g / np.linalg.norm(trained, axis=1), rtol=1e-4)
            for device, group in records[-1]["clusters"].items():
                expected = trained[group] + share[group] * trained[1 - group]
                np.testing.assert_allclose(fleet.model(device).theta, expected, rtol=1e-4, atol=1e-5)
            ends.append(np.stack([fleet.model(d).theta for d in fleet.stage.devices]))
    np.testing.assert_allclose(ends[0], ends[1], rtol=1e-4, atol=1e-5)


def test_unmet_devices_get_auxiliary_model(tmp_path):
    """The cold start took all rounds there were: the others take the mean of the groups' models."""
    options = {**FEDGROUP, "rounds": 2, "participation": 0.25}
    with make_fleet(tmp_path / "fleet", grouped_data(8, 2), **options) as fleet:
        records = fleet.run(10)
        strangers = [d for d, j in records[-1]["clusters"].items() if j == 2]
        assert strangers
        group = {j: fleet.model(d).theta for d, j in records[-1]["clusters"].items()}
        assert not np.array_equal(group[0], group[1])
        np.testing.assert_allclose(group[2], (group[0] + group[1]) / 2, rtol=1e-5, atol=1e-7)
        assert len({fleet.model(d).theta.tobytes() for d in strangers}) == 1


def test_missed_first_round_is_joined_later(tmp_path):
    """A device that missed the first round of one shot joins later."""
    data = grouped_data(6, 2)
    late = data.pop("dev-05")
    with make_fleet(tmp_path / "fleet", data, **{**ONE_SHOT, "rounds": 5}) as fleet:
        fleet.run_until(lambda: fleet.closed() == 2, 10)
        fleet.add_device("dev-05", late)
        records = fleet.run(100)
        (placed,) = events(records, "newcomer")
        assert (placed["device"], placed["cluster"]) == ("dev-05", records[-1]["clusters"]["dev-03"])
        assert same_partition(records[-1]["clusters"], truth_of(6, 2))


# FedGroup is killed in each of its phases, one-shot clustering in one; `make long` kills all in all.
# tests/scenarios/rounds/test_fesem_round_keys.py kills FeSEM.
KILLED = {"fedgroup": (1, 2, 3), "one-shot": (2,)}
CRASHES = [
    (name, round_) if round_ in KILLED.get(name, ()) else pytest.param(name, round_, marks=pytest.mark.long)
    for name in CLUSTERING
    for round_ in (1, 2, 3)
]


@pytest.fixture(scope="module")
def calm(request, tmp_path_factory):
    """(options, clusters and models that an undisturbed run ends with)."""
    options = {**CLUSTERING[request.param], "quorum": 1.0}
    with make_exact_fleet(tmp_path_factory.mktemp("calm") / "fleet", grouped_data(6, 2), **options) as fleet:
        return options, fleet.run(20)[-1]["clusters"], thetas(fleet)


@pytest.mark.parametrize(("calm", "round_"), CRASHES, indirect=["calm"])
def test_crash_in_any_phase_changes_no_bit(tmp_path, calm, round_, tap):
    """Killed with some uploads of the round durable: cold starts, cohorts that wait and centres are all continued."""
    options, clusters, models = calm
    with make_exact_fleet(tmp_path / "fleet", grouped_data(6, 2), faults=tap, **options) as fleet:
        fleet.run_until(lambda: fleet.closed() == round_ - 1, 20)
        tap.rules.append(all_but_the_first(fleet))
        fleet.settle()
        state = fleet.service.state
        assert (state.round, len(state.received)) == (round_, 1)
        assert state.waiting
        restart_aggregator(fleet, steps=1)
        tap.rules.clear()
        records = fleet.run(100)
        assert records[-1]["clusters"] == clusters
        assert thetas(fleet) == models
