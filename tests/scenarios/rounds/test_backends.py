"""The same fleet with numpy's products and means and with torch's: the same clusters in every round, and the same models."""

import numpy as np
import pytest

from shoal.protocol.recipe import LocalTraining
from tests.helpers.cases import with_long
from tests.helpers.fleets import grouped_data, make_fleet
from tests.scenarios.rounds.backends import BACKENDS, make

QUICK = LocalTraining(epochs=2, batch_size=10, lr=0.5)
ALONE = LocalTraining(epochs=6, batch_size=10, lr=0.5)
FORGETFUL = LocalTraining(epochs=30, batch_size=10, lr=0.8)
CASES = {
    "cfl": {"rounds": 8, "local": QUICK},
    "ifca": {"rounds": 5, "settings": {"k": "2"}, "local": QUICK},
    "fedgroup": {"rounds": 4, "settings": {"groups": "2", "alpha": "2"}, "local": QUICK, "pretrain": ALONE},
    "one-shot": {"rounds": 3, "settings": {"k": "2"}, "local": QUICK, "pretrain": ALONE},
    "fesem": {"rounds": 4, "settings": {"k": "2"}, "local": FORGETFUL, "seed": 3},
}


@pytest.mark.slow
@pytest.mark.parametrize("device", BACKENDS[1:])
@pytest.mark.parametrize("algorithm", with_long(CASES, "fedgroup"))
def test_torch_finds_numpys_clusters(tmp_path, algorithm, device):
    """Torch finds the clusters that numpy finds."""
    clusters, thetas = [], []
    for number, backend in enumerate([make("numpy"), make(device)]):
        options = {"algorithm": algorithm, "mode": "rotation", "seed": 1, **CASES[algorithm]}
        place = tmp_path / str(number)
        with make_fleet(place, grouped_data(8, 2), backend=backend, **options) as fleet:
            records = fleet.run(30)
            clusters.append([(r["round"], r["clusters"], [e["kind"] for e in r["events"]]) for r in records])
            thetas.append({device: fleet.model(device).theta for device in fleet.stage.devices})
    assert clusters[0] == clusters[1]
    assert len(set(clusters[0][-1][1].values())) > 1
    # Masks of the two fleets differ, and with them the rounding of float32.
    for device_name, theta in thetas[0].items():
        np.testing.assert_allclose(thetas[1][device_name], theta, atol=2e-4)
