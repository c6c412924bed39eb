"""A fleet that standardises with its own statistics: in every mask mode and algorithm, with devices that crash or come late."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from shoal_lab.bench.attacks.features import blocks
from shoal_lab.loopback.fleet import LoopbackFleet

from aggregator.uploads.validation import UploadVerifier
from edge_client.learning.data import Dataset, split
from edge_client.learning.statistics import scale_from, statistics_of
from edge_client.storage.scales import Scales
from shoal.protocol.messages import Phase
from shoal.protocol.recipe import LocalTraining
from shoal.task.data_declaration import DataDeclaration
from tests.helpers.cases import with_long
from tests.helpers.fleets import restart_aggregator, restart_device
from tests.helpers.plans import a_recipe
from tests.helpers.tasks import logistic_bundle, samples

LOCAL = LocalTraining(epochs=1, batch_size=8, lr=0.2)
DATA = DataDeclaration(
    features=("a", "b", "c", "d"),
    low=(-10, -1e5, -1, 0),
    high=(10, 1e5, 1, 1000),
    standardise="federated",
    missing="mean",
)
LIMIT_S = 3600.0
WIDE = 160_000
"""Coordinates of a model in which the rotation has as many blocks as the attack needs."""
UNITS = np.array([1, 1e4, 0.1, 50], np.float32), np.array([0, 100, 0, 500], np.float32)


def bundle():
    plain = logistic_bundle()
    return dataclasses.replace(plain, manifest=dataclasses.replace(plain.manifest, data=DATA))


def data(n=4):
    """Return samples of n devices in units of very different size, some values missing, each device with another shift."""
    found = {}
    for i in range(n):
        x, y = samples(60, seed=i)
        x = x * UNITS[0] + UNITS[1] + np.float32(i) * UNITS[0] / 4
        x[::7, 1] = np.nan
        found[f"dev-{i}"] = Dataset(x, y)
    return found


def options(algorithm="fedavg", **changes):
    fields = {"rounds": 4, "local": LOCAL, "min_contributors": 3, "quorum": 1.0, "deadline_s": 30.0, "seed": 1}
    return a_recipe(algorithm, **{**fields, **changes})


def expected(fleet):
    """Return the scale that the mean of all devices' statistics gives, computed in the clear."""
    found = [
        statistics_of(split(samples_, f"{fleet.stage.fleet.name}/{name}".encode()).train.x, DATA, 15)
        for name, samples_ in sorted(data().items())
    ]
    return scale_from(np.mean(np.array(found, np.float64), axis=0).astype(np.float32), DATA, fleet.plan.run_id)


def scales(fleet):
    return {n: Scales(fleet.stage.device_dir(n)).load(fleet.plan.run_id) for n in fleet.stage.devices}


@pytest.mark.parametrize(
    "mode", with_long(["rotation", "permutation", "signed-permutation", "none"], "rotation", "none")
)
def test_all_modes_have_the_fleets_scale(tmp_path, mode):
    """All devices have the scale of the fleet in every mode."""
    with LoopbackFleet(tmp_path, bundle(), data(), options(mode=mode)) as fleet:
        records = fleet.run(LIMIT_S)
        losses = [record["loss"] for record in records[1:-1]]
        assert losses[-1] < losses[0] < 2.0, "in the units of the data the first loss is in the thousands"
        assert np.abs(fleet.model("dev-0").theta).max() < 10
        (scale,) = set(scales(fleet).values())
        np.testing.assert_allclose(scale.deviations, expected(fleet).deviations, rtol=2e-3)
        off = np.subtract(scale.means, expected(fleet).means) / scale.deviations
        assert np.abs(off).max() < 1e-3


@pytest.mark.parametrize(("shards", "changes"), [(2, {}), (1, {"norm_noise": 0.05, "weighting": "uniform"})])
def test_other_choices_keep_one_scale(tmp_path, shards, changes):
    """Workers noise and uniform weights leave the fleet one scale."""
    with LoopbackFleet(
        tmp_path, logistic_bundle(classes=100, data=DATA), data(), options(**changes), shards=shards
    ) as fleet:
        fleet.run(LIMIT_S)
        (scale,) = set(scales(fleet).values())
        assert fleet.finished
        assert scale.doubted == ()
        np.testing.assert_allclose(scale.deviations, expected(fleet).deviations, rtol=0.05)


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("cfl", {}),
        ("fedgroup", {"groups": "1"}),
        ("local", {}),
        *with_long([("ifca", {"k": "2"}), ("one-shot", {"k": "1"}), ("fesem", {"k": "1"})]),
    ],
)
def test_every_algorithm_follows_statistics(tmp_path, algorithm, settings):
    least = 1 if algorithm == "local" else 3
    chosen = options(algorithm, settings=settings, rounds=5, min_contributors=least)
    with LoopbackFleet(tmp_path, bundle(), data(), chosen) as fleet:
        fleet.run(LIMIT_S)
        assert len(set(scales(fleet).values())) == 1
        assert None not in scales(fleet).values()
        assert [event["kind"] for event in fleet.records()[0]["events"]] == ["statistics"]


@pytest.mark.parametrize("before", [True, False], ids=["before its statistics", "after them"])
def test_killed_device_has_the_same_scale(tmp_path, before):
    """A device that is killed has the same scale afterwards; after the statistics the aggregator may be killed as well."""
    with LoopbackFleet(tmp_path, bundle(), data(), options(deadline_s=3600.0)) as fleet:
        if before:
            fleet.run_until(lambda: fleet.service is not None and fleet.service.state.plan is not None, LIMIT_S)
        else:
            fleet.run_until(lambda: fleet.closed() >= 1, LIMIT_S)
            restart_aggregator(fleet)
        restart_device(fleet, "dev-2")
        fleet.run(LIMIT_S)
        assert len(set(scales(fleet).values())) == 1
        assert sum(event["kind"] == "statistics" for r in fleet.records() for event in r["events"]) == 1


def test_later_device_finds_scale_sealed(tmp_path):
    """A device that joins later gets the scale by a checkpoint."""
    with LoopbackFleet(tmp_path, bundle(), data(), options(rounds=16)) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 3, LIMIT_S)
        fleet.add_device("dev-9", data(1)["dev-0"])
        fleet.publish()
        fleet.run(LIMIT_S)
        found = scales(fleet)
        assert found["dev-9"] == found["dev-0"]
        assert fleet.model("dev-9").cluster == 0


def test_statistics_of_too_few_are_repeated(tmp_path):
    """Statistics of too few devices are repeated and nothing is trained."""
    given = data()
    given["dev-3"].x[:, 2] = np.nan  # it declines: a feature without a value has no statistics
    chosen = options(min_contributors=4, quorum=0.5, rounds=3, deadline_s=5.0)
    with LoopbackFleet(tmp_path, bundle(), given, chosen) as fleet:
        fleet.run_until(lambda: fleet.closed() == 3, LIMIT_S)
        assert [[event["kind"] for event in r["events"]] for r in fleet.records()] == [["statistics"]] * 3
        assert set(scales(fleet).values()) == {None}
        assert not fleet.finished


@pytest.mark.parametrize("matrix", [False, True], ids=["under the mask alone", "as fleets send them"])
def test_aggregator_reads_no_statistics(tmp_path, monkeypatch, matrix):
    """The attack reads them to a few hundredths of their spread in a fleet whose devices leave the dense matrix out."""
    if not matrix:
        monkeypatch.setattr("edge_client.run.held_models.behind_matrix", lambda key, _secret, _size: key)
    uploads = []
    real = UploadVerifier.upload

    def verified(self, *given):
        found = real(self, *given)
        uploads.append(found)
        return found

    monkeypatch.setattr(UploadVerifier, "upload", verified)
    rng = np.random.default_rng(3)
    data, shifts = DataDeclaration(features=tuple("abcd"), low=(-9,) * 4, high=(9,) * 4, standardise="federated"), {}
    for i in range(12):
        x, y = samples(40, seed=i)
        shifts[f"dev-{i:02}"] = Dataset(
            x * np.float32(rng.uniform(0.5, 1.5)) + rng.normal(0, 2, 4).astype(np.float32), y
        )
    wide = logistic_bundle(classes=WIDE // 5, data=data)
    with LoopbackFleet(tmp_path, wide, shifts, options(rounds=1)) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 1, LIMIT_S)
        seed = fleet.stage.fleet.name
        clear = [statistics_of(split(d, f"{seed}/{n}".encode()).train.x, data, 9) for n, d in sorted(shifts.items())]
    rows = {u.header.device: np.frombuffer(u.body, "<f4", WIDE) for u in uploads if u.header.phase is Phase.STATISTICS}
    found = blocks(np.stack([rows[name] for name in sorted(rows)]).astype(np.float64), 9)
    truth = np.array(clear, np.float64)[:, :8]
    nearest = np.minimum(
        np.abs(found[:, :, None] - truth[:, None]).mean(0), np.abs(found[:, :, None] + truth[:, None]).mean(0)
    )
    errors = nearest.min(0) / truth.std(0)
    if matrix:
        assert np.median(errors) > 0.5
    else:
        assert np.median(errors) < 0.1
