"""fedgroup-femnist and fedgroup-sent140 on tiny files in LEAF's format."""

import json

import numpy as np
import pytest
from shoal_lab.experiments.common.experiment import Options, Quiet
from shoal_lab.experiments.data.datasets import MissingDataError
from shoal_lab.experiments.data.leaf import Person
from shoal_lab.experiments.fedgroup import leaf as fedgroup_leaf

from shoal.errors import DataError, UsageError
from shoal.simulation.data import Shard

SETTINGS = {"cohort": "4", "epochs": "1", "pretrain_steps": "3"}


def write(root, part, users):
    (root / part).mkdir()
    document = {"users": list(users), "num_samples": [len(u["y"]) for u in users.values()], "user_data": users}
    (root / part / "all_data_0.json").write_text(json.dumps(document))


@pytest.fixture(scope="module")
def femnist(tmp_path_factory):
    """Eight writers of three letters and one digit."""
    root = tmp_path_factory.mktemp("femnist")
    rng = np.random.default_rng(0)
    for part, count in (("train", 16), ("test", 6)):
        users = {}
        for i in range(8):
            y = np.array([5, 36, 40, 61])[rng.integers(0, 4, count)]
            y[0] = 36
            x = rng.uniform(0, 0.3, (count, 784))
            for row, label in zip(x, y, strict=True):
                row[12 * label : 12 * label + 40] += 0.6
            users[f"f{i:04d}_00"] = {"x": x.round(3).tolist(), "y": y.tolist()}
        write(root, part, users)
    return root


@pytest.fixture(scope="module")
def sent140(tmp_path_factory):
    root = tmp_path_factory.mktemp("sent140")
    rng = np.random.default_rng(1)
    for part, count in (("train", 9), ("test", 4)):
        users = {}
        for i in range(6):
            y = [("0", "4")[int(v)] for v in rng.integers(0, 2, count)]
            x = [
                [str(j), "date", "q", f"a{i}", f"i {'love' if v == '4' else 'hate'} this {j}"] for j, v in enumerate(y)
            ]
            users[f"a{i}"] = {"x": x, "y": y}
        write(root, part, users)
    return root


def run(experiment, folder, algorithm="fg-edc", *, mask="permutation", rounds=2, **settings):
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
    return experiment(options, Quiet()).data()


@pytest.mark.parametrize("algorithm", list(fedgroup_leaf.FEMNIST))
def test_every_column_of_femnist_runs(femnist, algorithm):
    data = run(fedgroup_leaf.femnist, femnist, algorithm)
    assert data["published"] == fedgroup_leaf.FEMNIST[algorithm]["mclr"]
    assert data["parameters"]["coordinates"] == 20_410
    assert data["parameters"]["devices"] == 8


def test_the_mlp_has_the_published_size(femnist):
    data = run(fedgroup_leaf.femnist, femnist, "fedavg", network="mlp", rounds=1)
    assert data["parameters"]["coordinates"] == 415_258
    assert data["published"] == 82.7


def test_all_classes_on_request(femnist):
    lower, whole = (run(fedgroup_leaf.femnist, femnist, "fedavg", rounds=1, classes=c) for c in ("lower", "all"))
    assert whole["parameters"]["coordinates"] == 785 * 62
    assert whole["population"]["samples"] > lower["population"]["samples"]


def test_lower_case_letters_become_0_to_25():
    def shard(*labels):
        return Shard(np.array(labels, np.float32)[:, None], np.array(labels, np.int64))

    people = (Person("a", shard(0, 36, 35, 61), shard(40)), Person("b", shard(3), shard(50)))
    kept = fedgroup_leaf.lower_case(people)
    assert [p.name for p in kept] == ["a"]
    assert kept[0].train.y.tolist() == [0, 25]
    assert kept[0].train.x[:, 0].tolist() == [36, 61]
    assert kept[0].test.y.tolist() == [4]
    with pytest.raises(DataError, match="lower-case"):
        fedgroup_leaf.lower_case(people[1:])


@pytest.mark.parametrize("algorithm", ["fg-edc", "fg-madc", "ifca", "fesem", "fedprox"])
def test_columns_of_sent140_run(sent140, algorithm):
    data = run(fedgroup_leaf.sent140, sent140, algorithm, embedding="6", hidden="4")
    assert data["published"] == fedgroup_leaf.SENT140[algorithm]
    assert data["parameters"]["mu"] == (0.01 if algorithm == "fedprox" else 0.0)
    assert data["parameters"]["devices"] == 6
    assert 0 <= data["accuracy"] <= 100


@pytest.mark.parametrize("name", ["femnist", "sent140"])
def test_masked_and_clear_runs_agree(name, request):
    folder, experiment = request.getfixturevalue(name), getattr(fedgroup_leaf, name)
    small = {"embedding": "6", "hidden": "4"} if name == "sent140" else {}
    clear, masked = (run(experiment, folder, mask=mask, **small) for mask in ("none", "permutation"))
    assert clear["sizes"] == masked["sizes"]
    assert clear["accuracy"] == pytest.approx(masked["accuracy"], abs=0.1)


@pytest.mark.parametrize("experiment", [fedgroup_leaf.femnist, fedgroup_leaf.sent140])
def test_absent_data_exits_with_8_and_samples_are_refused(experiment, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SHOAL_DATA_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingDataError) as caught:
        experiment(Options(data_dir=tmp_path), Quiet())
    assert caught.value.exit_code == 8
    with pytest.raises(UsageError, match="samples"):
        experiment(Options(samples=3, data_dir=tmp_path), Quiet())


def test_unknown_kinds_are_refused(femnist):
    for name, value in (("network", "cnn"), ("classes", "upper")):
        with pytest.raises(UsageError, match=value):
            run(fedgroup_leaf.femnist, femnist, **{name: value})
