"""Devices of a cluster standardise by their own statistics: on trial, after the split, and in what they predict."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from shoal_lab.loopback.fleet import LoopbackFleet

from edge_client.learning.data import Dataset, split
from edge_client.learning.standardisation import standardised
from edge_client.learning.statistics import scale_from, statistics_of
from edge_client.run.jobs import JobFactory
from edge_client.storage.scales import Scales
from shoal.protocol.recipe import LocalTraining
from shoal.task.data_declaration import DataDeclaration
from tests.helpers.cases import with_long
from tests.helpers.fleets import restart_aggregator
from tests.helpers.plans import a_recipe
from tests.helpers.tasks import INPUTS, logistic_bundle, samples

DATA = DataDeclaration(features=tuple("abcd"), low=(-40,) * 4, high=(40,) * 4, standardise="federated")
LIMIT_S = 3600.0
DEVICES = 8
FACTORS = (8.0, 1.0)
"""Sizes of the features in the two groups, of which devices are in turn."""


def data(devices=DEVICES):
    """The same rule in either group: the label tells the largest of the features in units of the group."""
    found = {}
    for i in range(devices):
        x, _ = samples(120, seed=i)
        found[f"dev-{i:02}"] = Dataset((x + np.arange(INPUTS)) * np.float32(FACTORS[i % 2]), x[:, :3].argmax(1))
    return found


def bundle():
    plain = logistic_bundle()
    return dataclasses.replace(plain, manifest=dataclasses.replace(plain.manifest, data=DATA))


def options(algorithm="cfl", **changes):
    local = LocalTraining(epochs=1, batch_size=8, lr=0.1)
    fields = {"rounds": 24, "local": local, "min_contributors": 3, "quorum": 1.0, "deadline_s": 30.0, "seed": 1}
    return a_recipe(algorithm, **{**fields, **changes})


def own_scale(fleet, group):
    """Return the scale of a group's training shares, computed in the clear."""
    seed = fleet.stage.fleet.name
    shares = [split(d, f"{seed}/{n}".encode()).train for n, d in sorted(data().items()) if int(n[-2:]) % 2 == group]
    vectors = np.array([statistics_of(share.x, DATA, 15) for share in shares], np.float64)
    return scale_from(vectors.mean(axis=0).astype(np.float32), DATA, fleet.plan.run_id, of_cluster=True)


def events(fleet, kind):
    return [event for record in fleet.records() for event in record["events"] if event["kind"] == kind]


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [("cfl", {}), ("fedgroup", {"groups": "2"}), pytest.param("ifca", {"k": "2"}, marks=pytest.mark.long)],
)
def test_clusters_keep_their_own_scale(tmp_path, algorithm, settings):
    with LoopbackFleet(tmp_path, bundle(), data(), options(algorithm, settings=settings)) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 5, LIMIT_S)
        fleet.kill_device("dev-02")
        restart_aggregator(fleet)
        fleet.revive_device("dev-02")
        fleet.run(LIMIT_S)
        assert [event["devices"] for event in events(fleet, "statistics")] == [8, 4, 4]
        for i, name in enumerate(sorted(fleet.stage.devices)):
            found = Scales(fleet.stage.device_dir(name)).load(fleet.plan.run_id)
            wanted = own_scale(fleet, i % 2)
            np.testing.assert_allclose(found.deviations, wanted.deviations, rtol=5e-3)
            np.testing.assert_allclose(found.means, wanted.means, atol=0.02 * FACTORS[i % 2])
            assert found.doubted == ()
            assert accuracy(fleet, name, data()[name]) > 0.75


def accuracy(fleet, name, share):
    """Return how often a device's model is right, in the scale that the device has stored for it."""
    model, scale = fleet.model(name), Scales(fleet.stage.device_dir(name)).load(fleet.plan.run_id)
    scores = standardised(share.x, scale) @ model.theta[:12].reshape(INPUTS, 3) + model.theta[12:]
    return (scores.argmax(1) == share.y).mean()


def no_variance(vector):
    vector[INPUTS : 2 * INPUTS] = vector[:INPUTS] ** 2


def other_sign(vector):
    vector[:INPUTS] *= -1


LIES = {
    "huge": lambda vector: vector.fill(1e30),
    "nan": lambda vector: vector.fill(np.nan),
    "no variance": no_variance,
    "other sign": other_sign,
    "upper bounds": lambda vector: vector.fill(1.0),
}


@pytest.mark.filterwarnings("ignore:overflow encountered in dot")  # the liar's own norm of a huge vector
@pytest.mark.parametrize("lie", with_long(LIES, "no variance"))
def test_a_lie_costs_the_liar_alone(tmp_path, monkeypatch, lie):
    honest = JobFactory._statistics

    def false(factory, run, before):
        vector = honest(factory, run, before) + before
        if factory._membership.name == "dev-03":
            LIES[lie](vector)
        return vector - before

    monkeypatch.setattr(JobFactory, "_statistics", false)
    with LoopbackFleet(tmp_path, bundle(), data(12), options()) as fleet:
        fleet.run(LIMIT_S)
        clusters = {name: fleet.model(name).cluster for name in data(12)}
        groups = [{clusters[f"dev-{i:02}"] for i in range(group, 12, 2) if i != 3} for group in (0, 1)]
        assert [len(group) for group in groups] == [1, 1]
        assert groups[0] != groups[1]
        for name, share in data(12).items():
            assert name == "dev-03" or accuracy(fleet, name, share) > 0.75, name
