"""The real fleets, from small files in the shape of the real ones."""

from __future__ import annotations

import numpy as np
import pytest
from shoal_lab.experiments.data.datasets import MissingDataError
from shoal_lab.experiments.wild import tables as natural
from shoal_lab.experiments.wild.scenarios import SCENARIOS

from shoal.errors import DataError
from shoal.simulation.api.standardisation import scales_of


@pytest.fixture
def folder(tmp_path):
    """Two subsets of 7 and 13 engines, whose first figure is the engine; and twelve stations, whose last is the hour."""
    rng = np.random.default_rng(0)
    counts, cycles, hours = (7, 13), 180, 1200
    subset, unit = np.array([(kind, engine) for kind, n in enumerate(counts) for engine in range(n)]).T.repeat(
        cycles, 1
    )
    x = np.column_stack([100 * subset + unit, rng.normal(size=(len(unit), 2))])
    rul = np.tile(np.arange(cycles)[::-1], sum(counts))
    np.savez(tmp_path / "cmapss.npz", x=x, rul=rul, unit=unit, subset=subset)
    air = np.stack([rng.exponential(50, (12, hours)), np.tile(np.arange(hours), (12, 1))], axis=2)
    air[3, 5, 0] = np.nan
    np.savez(tmp_path / "air.npz", x=air, stations=np.array(["Huairou", *(f"s{i}" for i in range(11))]))
    return tmp_path


@pytest.mark.parametrize("name", [name for name, s in SCENARIOS.items() if s.data in ("cmapss", "air")])
def test_shares_are_raw_or_in_fleet_scale(name, folder):
    fleet = natural.deal_real(SCENARIOS[name], seed=0, data_dir=folder)
    shares = fleet.population.train, fleet.population.validation, fleet.population.test
    assert [{len(s) for s in shards} for shards in shares] == [{180}, {60}, {200}]
    kind = np.float32 if SCENARIOS[name].regression else np.int64
    assert all(
        s.x.dtype == np.float32 and s.y.dtype == kind and np.isfinite(s.x).all() for share in shares for s in share
    )
    assert {s.x.shape[1] for s in shares[0]} == {fleet.network.shapes[0][1]}
    # A regression's model is too small for rounds of statistics, so its data are dealt in the fleet's scale.
    assert (fleet.declared is None) is SCENARIOS[name].regression
    scaled = fleet.population.scaled(scales_of(fleet.population, "federated", 3.0))
    together = np.concatenate([s.x for s in (fleet.population if fleet.declared is None else scaled).train])
    assert np.allclose(together.mean(0), 0, atol=1e-3)
    assert np.allclose(together.std(0), 1, atol=1e-3)
    assert fleet.population.groups == ((0, 1, 1) if "cmapss" in name else (1, *[0] * 11))


def test_no_engine_is_in_two_shares(folder):
    population = natural.deal_real(SCENARIOS["cmapss"], seed=1, data_dir=folder).population
    engines = [
        {round(float(v), 4) for v in s.x[:, 0]} for s in (*population.train, *population.validation, *population.test)
    ]
    assert [len(found) for found in engines] == [3] * 3 + [1] * 3 + [2] * 3
    assert len(set.union(*engines)) == sum(map(len, engines))


def test_validation_and_test_are_later(folder):
    population = natural.deal_real(SCENARIOS["air"], seed=1, data_dir=folder).population
    for train, validation, test in zip(population.train, population.validation, population.test, strict=True):
        assert train.x[:, 1].max() < validation.x[:, 1].min()
        assert validation.x[:, 1].max() < test.x[:, 1].min()


def test_a_missing_or_broken_file_is_named(folder):
    (folder / "air.npz").write_bytes(b"PK\x03\x04 no archive")
    with pytest.raises(DataError, match=r"air.npz can't be read") as caught:
        natural.deal_real(SCENARIOS["air"], seed=0, data_dir=folder)
    assert "numpy.savez" in caught.value.hint
    (folder / "cmapss.npz").unlink()
    with pytest.raises(MissingDataError, match=r"cmapss.npz is missing"):
        natural.deal_real(SCENARIOS["cmapss"], seed=0, data_dir=folder)
