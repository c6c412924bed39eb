"""ifca-femnist on tiny files in LEAF's format: shared and clustered segments, and every algorithm."""

import json

import numpy as np
import pytest
from shoal_lab.experiments.common.experiment import Options, Quiet
from shoal_lab.experiments.data.datasets import MissingDataError
from shoal_lab.experiments.ifca import femnist as ifca_femnist

from shoal.errors import UsageError

SETTINGS = {"filters": "2,2", "dense": "6", "evaluate_every": "1", "epochs_alone": "1", "lr": "0.05"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Eight writers; the second four press twice as hard and write the next label."""
    root = tmp_path_factory.mktemp("femnist")
    rng = np.random.default_rng(0)
    for part, count in (("train", 12), ("test", 5)):
        (root / part).mkdir()
        users = [f"f{i:04d}_00" for i in range(8)]
        held = {}
        for i, user in enumerate(users):
            y = rng.integers(0, 3, count)
            x = rng.uniform(0, 0.2, (count, 784))
            for row, label in zip(x, y, strict=True):
                row[200 * label : 200 * label + 150] += 0.4 * (1 + i // 4)
            held[user] = {"x": x.round(3).tolist(), "y": ((y + i // 4) % 3).tolist()}
        document = {"users": users, "num_samples": [count] * 8, "user_data": held}
        (root / part / "all_data_0.json").write_text(json.dumps(document))
    return root


def run(folder, algorithm="ifca", *, mask="permutation", rounds=3, **settings):
    options = Options(
        algorithm=algorithm,
        devices=None,
        samples=None,
        rounds=rounds,
        seed=0,
        mask=mask,
        data_dir=folder,
        settings={**SETTINGS, **settings},
    )
    return ifca_femnist.femnist(options, Quiet()).data()


@pytest.mark.parametrize("algorithm", ["ifca", "one-shot", "global", "local"])
def test_every_algorithm_of_the_table_runs(folder, algorithm):
    data = run(folder, algorithm)
    assert data["algorithm"] == algorithm
    assert 0 <= data["accuracy"] <= 100
    published = ifca_femnist.PUBLISHED[algorithm]
    assert data["published"] == (published["2"] if isinstance(published, dict) else published)


def test_only_the_last_layer_is_clustered(folder):
    parameters = run(folder)["parameters"]
    assert parameters["clustered_coordinates"] == 6 * 62 + 62
    assert parameters["coordinates"] > parameters["clustered_coordinates"]
    assert parameters["settings"]["normalise"] == "samples"


def test_six_writers_are_drawn_a_round(folder):
    assert run(folder, rounds=1)["parameters"]["participation"] == 6 / 8


def test_k_chooses_the_published_column(folder):
    data = run(folder, rounds=2, k="3")
    assert data["published"] == ifca_femnist.PUBLISHED["ifca"]["3"]
    assert data["parameters"]["settings"]["k"] == "3"


def test_masked_and_clear_runs_agree(folder):
    clear, masked = (run(folder, mask=mask, rounds=4) for mask in ("none", "permutation"))
    assert clear["accuracy"] == pytest.approx(masked["accuracy"], abs=0.1)
    assert [h["sizes"] for h in clear["history"]] == [h["sizes"] for h in masked["history"]]


def test_samples_can_not_be_asked_for(folder):
    with pytest.raises(UsageError, match="samples"):
        ifca_femnist.femnist(Options(samples=5, data_dir=folder), Quiet())


def test_absent_data_exits_with_8(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SHOAL_DATA_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingDataError) as caught:
        ifca_femnist.femnist(Options(data_dir=tmp_path), Quiet())
    assert caught.value.exit_code == 8


def test_the_papers_network_has_its_size():
    """32 and 64 filters, 2048 units: 6.6 million coordinates, of which the last layer has 126,976 + 62."""
    from shoal.simulation.trainers.networks import Cnn

    network = Cnn(side=28, classes=62, filters=(32, 64), dense=(2048,), same=True)
    assert network.length == 32 * 25 + 32 + 64 * 32 * 25 + 64 + 3136 * 2048 + 2048 + 2048 * 62 + 62
