"""A device that sends false statistics of its features: the run goes on, the features are named, and the scale is limited."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from shoal_lab.loopback.fleet import LoopbackFleet

from edge_client.learning.data import Dataset
from edge_client.learning.statistics import COUNT, LEAST_DEVIATION
from edge_client.run.jobs import JobFactory
from edge_client.storage.scales import Scales
from edge_client.storage.state import DeviceState
from shoal.protocol.recipe import LocalTraining
from shoal.task.data_declaration import DataDeclaration
from tests.helpers.plans import a_recipe
from tests.helpers.tasks import logistic_bundle, samples

DATA = DataDeclaration(features=tuple("abcd"), low=(-10,) * 4, high=(10,) * 4, standardise="federated", missing="mean")
WIDTH = 4
NAMED = tuple(f"feature {name!r}" for name in DATA.features)
LIMIT_S = 3600.0


def put(at, value):
    """Return a lie: this value at these places of the vector."""

    def change(vector):
        vector[at] = value

    return change


LIES = {
    "squares": put(slice(WIDTH, 2 * WIDTH), -0.9),
    "one square": put(WIDTH, -0.9),
    "means": put(slice(WIDTH), 1.0),
    "upper bounds": put(slice(2 * WIDTH), 1.0),
    "lower bounds": put(slice(2 * WIDTH), -1.0),
    "zero": put(slice(None), 0.0),
    "huge": put(slice(None), 1e30),
    "nan": put(slice(None), np.nan),
    "infinite": put(slice(None), np.inf),
    "count": put(2 * WIDTH, -3.0),
}


def fleet_with(tmp_path, monkeypatch, devices, liar, lie, **changes):
    """A fleet of narrow features, a tenth of half their range, in which one device falsifies its vector before the mask."""
    honest = JobFactory._statistics

    def false(factory, *given):
        vector = honest(factory, *given)
        if factory._membership.name == liar:
            lie(vector)
        return vector

    monkeypatch.setattr(JobFactory, "_statistics", false)
    data = {f"dev-{i:02}": Dataset(x + 3, y) for i in range(devices) for x, y in [samples(60, seed=i)]}
    plain = logistic_bundle()
    bundle = dataclasses.replace(plain, manifest=dataclasses.replace(plain.manifest, data=DATA))
    fields = {
        "rounds": 5,
        "local": LocalTraining(epochs=1, batch_size=8, lr=0.2),
        "min_contributors": min(3, devices - 1),
        "quorum": 0.6,
        "deadline_s": 30.0,
        "seed": 1,
    }
    return LoopbackFleet(tmp_path, bundle, data, a_recipe("fedavg", **{**fields, **changes}))


def finished(fleet):
    """Run to the end; return the scale that all devices have."""
    records = fleet.run(LIMIT_S)
    assert fleet.finished
    losses = [record["loss"] for record in records[1:]]
    assert losses[-1] < losses[0], "the models have learned"
    found = {Scales(fleet.stage.device_dir(name)).load(fleet.plan.run_id) for name in fleet.stage.devices}
    (scale,) = found
    for deviation, mean in zip(scale.deviations, scale.means, strict=True):
        assert 10 * LEAST_DEVIATION <= deviation <= 10
        assert abs(mean) <= 10
    return scale


def test_false_mean_square_ends_no_run(tmp_path, monkeypatch):
    """A false mean square ends no run and every device names the feature."""
    with fleet_with(tmp_path, monkeypatch, 5, "dev-01", LIES["squares"]) as fleet:
        scale = finished(fleet)
        assert scale.doubted == NAMED
        np.testing.assert_allclose(scale.deviations, 10 * LEAST_DEVIATION)
        np.testing.assert_allclose(scale.means, 3, atol=0.5)
        for name in fleet.stage.devices:
            (warning, *_) = DeviceState(fleet.stage.device_dir(name)).load_status()["warnings"]
            assert all(feature in warning for feature in NAMED)


@pytest.mark.filterwarnings("ignore:overflow encountered in dot")  # the liar's own norm of a huge vector
@pytest.mark.long
@pytest.mark.parametrize("devices", [3, 5, 8, 12])
@pytest.mark.parametrize("lie", LIES)
@pytest.mark.parametrize("place", ["first", "last"])
def test_no_lie_of_one_device_ends_a_run(tmp_path, monkeypatch, devices, lie, place):
    liar = "dev-00" if place == "first" else f"dev-{devices - 1:02}"
    with fleet_with(tmp_path, monkeypatch, devices, liar, LIES[lie]) as fleet:
        scale = finished(fleet)
        if lie == "count":
            assert set(scale.doubted) <= {COUNT, *NAMED}
        if lie in ("huge", "nan", "infinite"):
            assert scale.doubted == (), "refused, and in no mean"


def test_no_honest_statistics_are_doubted(tmp_path, monkeypatch):
    """Statistics are doubted in no honest fleet."""
    with fleet_with(tmp_path, monkeypatch, 3, "", LIES["squares"]) as fleet:
        scale = finished(fleet)
        assert scale.doubted == ()
