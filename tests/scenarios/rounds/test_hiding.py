"""Figures that devices withhold if the owner says so: sample counts (uniform weighting) and exact norms (norm_noise)."""

import numpy as np
import pytest

from edge_client.learning.data import Dataset
from shoal.protocol.recipe import LocalTraining
from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    grouped_data,
    make_fleet,
    open_upload,
    same_partition,
    truth_of,
    uploads_of,
)

QUICK = LocalTraining(epochs=2, batch_size=10, lr=0.5)
ALONE = LocalTraining(epochs=6, batch_size=10, lr=0.5)
GROUPS = {"rounds": 5, "local": QUICK, "pretrain": ALONE}
RUNS = {
    "fedavg": {"local": QUICK},
    "ifca": {"algorithm": "ifca", "rounds": 5, "settings": {"k": "2"}, "local": QUICK, "seed": 2},
    "ifca, restarts": {
        "algorithm": "ifca",
        "rounds": 8,
        "settings": {"k": "2", "restarts": "2", "restart_rounds": "3"},
        "local": QUICK,
        "seed": 2,
    },
    "cfl": {"algorithm": "cfl", "rounds": 8, "local": QUICK},
    "fedgroup": {"algorithm": "fedgroup", **GROUPS, "settings": {"groups": "2", "alpha": "2"}},
    "one-shot": {"algorithm": "one-shot", **GROUPS, "settings": {"k": "2"}},
    "fesem": {
        "algorithm": "fesem",
        "rounds": 5,
        "settings": {"k": "2"},
        "local": LocalTraining(epochs=30, batch_size=10, lr=0.8),
        "seed": 3,
    },
}

CASES = with_long(RUNS, "ifca", "cfl")


def uneven_data(count, groups):
    """As `grouped_data`, but every device has another number of samples."""
    data = grouped_data(count, groups, n=90)
    return {name: Dataset(b.x[: 50 + 7 * i], b.y[: 50 + 7 * i]) for i, (name, b) in enumerate(data.items())}


def norms_of_the_first_round(fleet):
    fleet.run_until(fleet.records, 30)
    return fleet.records()[0]["norms"]


def finish(fleet, options):
    records = fleet.run(30)
    if options.get("algorithm"):
        assert same_partition(records[-1]["clusters"], truth_of(6, 2))
    assert 0.75 < records[-1]["correct"] / records[-1]["tested"] <= 1 or not options.get("algorithm")
    return records


@pytest.mark.parametrize("name", CASES)
def test_uniform_uploads_hide_data_sizes(tmp_path, name, tap):
    """Every algorithm still works; counts and sizes of test shares are the same for all, though their data is not."""
    with make_fleet(tmp_path / "fleet", uneven_data(6, 2), faults=tap, weighting="uniform", **RUNS[name]) as fleet:
        finish(fleet, RUNS[name])
        seen = [open_upload(fleet, d, sealed)[0] for d in fleet.stage.devices for sealed in uploads_of(fleet, tap, d)]
        assert {u.samples for u in seen} == {1}
        assert {u.tested for u in seen} <= {0, 100}
        assert any(u.tested for u in seen)


def test_under_sample_weighting_they_do(tmp_path, tap):
    """The control: otherwise the counts are as uneven as the data."""
    with make_fleet(tmp_path / "fleet", uneven_data(6, 2), faults=tap, local=QUICK) as fleet:
        fleet.run(30)
        seen = [open_upload(fleet, d, uploads_of(fleet, tap, d)[0])[0] for d in fleet.stage.devices]
        assert len({u.samples for u in seen}) == 6


@pytest.mark.parametrize("name", CASES)
def test_blurred_norms_lead_to_same_groups(tmp_path, name):
    """One per cent on every norm: the hidden groups as before, and every recorded norm differs."""
    with make_fleet(tmp_path / "exact", grouped_data(6, 2), **RUNS[name]) as fleet:
        exact = norms_of_the_first_round(fleet)
    with make_fleet(tmp_path / "blurred", grouped_data(6, 2), **RUNS[name], norm_noise=0.01) as fleet:
        blurred = finish(fleet, RUNS[name])[0]["norms"]
    assert set(exact) == set(blurred)
    ratios = np.array([blurred[d] / exact[d] for d in exact])
    assert len(set(ratios.tolist())) == len(ratios)
    assert (np.abs(ratios - 1) <= 0.041).all()
    assert (ratios != 1).all()
