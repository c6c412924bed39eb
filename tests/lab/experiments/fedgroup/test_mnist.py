"""fedgroup-mnist-mclr, -mlp and fedgroup-heterogeneity on tiny files in MNIST's format."""

import gzip

import numpy as np
import pytest
from shoal_lab.experiments.common.experiment import Options, Quiet
from shoal_lab.experiments.data.datasets import MissingDataError
from shoal_lab.experiments.fedgroup import mnist as fedgroup_mnist
from shoal_lab.experiments.fedgroup.runs import METHODS

from shoal.errors import ConfigError, UsageError
from shoal.report.plot import panels_of
from shoal.simulation.data import Population, Shard

SETTINGS = {"cohort": "5", "epochs": "2", "pretrain_steps": "10", "alpha": "5"}


def write_idx(path, values):
    header = bytes([0, 0, 8, values.ndim]) + b"".join(int(s).to_bytes(4, "big") for s in values.shape)
    path.write_bytes(gzip.compress(header + values.tobytes()))


@pytest.fixture(scope="module")
def mnist(tmp_path_factory):
    """Images whose label is the height of a bright row."""
    folder = tmp_path_factory.mktemp("mnist")
    rng = np.random.default_rng(1)
    for name, count in (("train", 700), ("t10k", 100)):
        labels = rng.integers(0, 10, count).astype(np.uint8)
        images = rng.integers(0, 120, (count, 28, 28))
        for image, label in zip(images, labels, strict=True):
            image[2 + 2 * label : 4 + 2 * label] += 100
        write_idx(folder / f"{name}-images-idx3-ubyte.gz", np.clip(images, 0, 255).astype(np.uint8))
        write_idx(folder / f"{name}-labels-idx1-ubyte.gz", labels)
    return folder


def run(
    folder, algorithm="fg-edc", *, mask="permutation", rounds=4, seed=0, experiment=fedgroup_mnist.mclr, **settings
):
    chosen = {**SETTINGS, **settings}
    if METHODS[algorithm].strategy not in ("fedgroup", "fedgrouprox"):
        chosen.pop("alpha")
    options = Options(
        algorithm=algorithm,
        devices=20,
        samples=None,
        rounds=rounds,
        seed=seed,
        mask=mask,
        data_dir=folder,
        settings=chosen,
    )
    return experiment(options, Quiet()).data()


@pytest.mark.parametrize("algorithm", list(METHODS))
def test_every_column_of_the_table_runs(mnist, algorithm):
    data = run(mnist, algorithm)
    assert data["published"] == fedgroup_mnist.MCLR[algorithm]
    assert [row["round"] for row in data["history"]] == [1, 2, 3, 4]
    scores = [row["accuracy"] for row in data["history"]]
    assert data["accuracy"] == max(scores)
    assert data["accuracy_last"] == scores[-1]
    assert data["best_of_most_tested"] <= data["accuracy"]
    method = METHODS[algorithm]
    assert data["parameters"]["mu"] == (1.0 if method.proximal else 0.0)
    assert data["parameters"]["weighting"] == ("uniform" if algorithm in ("ifca", "fesem") else "samples")
    assert data["clusters"] == (len(data["sizes"]))
    assert all(row["discrepancy"] > 0 for row in data["history"])


def test_only_devices_that_were_ever_assigned_are_tested(mnist):
    """The group cold start takes 15 of 20; a round adds at most its cohort of 5, and FedAvg is tested on all."""
    tested = [row["tested"] for row in run(mnist)["history"]]
    assert 15 <= tested[0] <= 20
    assert tested == sorted(tested)
    assert next(row["tested"] for row in run(mnist, "ifca")["history"]) == 5
    assert {row["tested"] for row in run(mnist, "fedavg")["history"]} == {20}


def test_the_split_is_reported(mnist):
    population = run(mnist, rounds=2)["population"]
    assert population["devices"] == population["samples"] / population["samples_a_device"]["mean"] == 20
    assert population["groups"] == 10
    assert population["train"] > 7 * population["test"]


@pytest.mark.parametrize("algorithm", ["fg-edc", "fgp-madc", "ifca", "fesem", "fedprox", "rcc", "rac"])
def test_masked_and_clear_runs_agree(mnist, algorithm):
    clear, masked = (run(mnist, algorithm, mask=mask) for mask in ("none", "permutation"))
    assert clear["sizes"] == masked["sizes"]
    for a, b in zip(clear["history"], masked["history"], strict=True):
        assert a["accuracy"] == pytest.approx(b["accuracy"], abs=0.1)


def test_the_same_seed_gives_the_same_result_and_another_one_another(mnist):
    one, again, other = (run(mnist, seed=seed) for seed in (0, 0, 1))
    assert one["history"] == again["history"]
    assert one["population"] != other["population"]


def test_the_mlp_has_the_published_size(mnist):
    data = run(mnist, experiment=fedgroup_mnist.mlp, rounds=2)
    assert data["parameters"]["coordinates"] == 101_770
    assert data["published"] == 97.9
    assert run(mnist, rounds=2)["parameters"]["coordinates"] == 7_850


def test_rounds_between_two_tests_have_no_accuracy(mnist):
    data = run(mnist, evaluate_every="3")
    assert [row["accuracy"] is None for row in data["history"]] == [True, True, False, False]


def test_heterogeneity_reports_table_one(mnist):
    options = Options(
        algorithm=None,
        devices=20,
        samples=None,
        rounds=3,
        seed=0,
        mask="permutation",
        data_dir=mnist,
        settings={"cohort": "5", "epochs": "2"},
    )
    data = fedgroup_mnist.heterogeneity(options, Quiet()).data()
    assert list(data["classes"]) == ["1", "3", "5", "10"] == list(data["published"])
    for found in data["classes"].values():
        assert found.keys() >= data["published"]["1"].keys()
        assert found["median"] <= found["max"]
        assert found["discrepancy_mean"] > 0
    assert [len(p.lines) for p in panels_of([data], "panels")] == [4, 4]
    assert data["populations"]["10"]["groups"] == 1


def test_the_iid_split_keeps_sizes_and_samples_and_mixes_classes():
    def shards(*sizes):
        return tuple(Shard(np.full((n, 1), 10 * i, np.float32), np.full(n, i, np.int64)) for i, n in enumerate(sizes))

    given = Population(shards(40, 4, 30), test=shards(4, 1, 3), groups=(0, 1, 2))
    dealt = fedgroup_mnist.identical(given, 3)
    for before, after in ((given.train, dealt.train), (given.test, dealt.test)):
        assert [len(s) for s in before] == [len(s) for s in after]
        labels = np.concatenate([s.y for s in after])
        assert sorted(labels) == sorted(np.concatenate([s.y for s in before]))
        assert np.array_equal(np.concatenate([s.x for s in after])[:, 0], 10 * labels)
    assert len(set(dealt.train[0].y)) == 3
    assert dealt.groups == (0, 0, 0)
    assert np.array_equal(dealt.train[2].y, fedgroup_mnist.identical(given, 3).train[2].y)


def test_table_one_figures():
    rows = [
        {"round": 1, "accuracy": 60.0, "discrepancy": 1.0, "discrepancy_after": 0.5},
        {"round": 2, "accuracy": 85.0, "discrepancy": 3.0, "discrepancy_after": 1.5},
        {"round": 3, "accuracy": None},
        {"round": 4, "accuracy": 90.0},
    ]
    found = fedgroup_mnist.figures(rows)
    assert (found["max"], found["median"], found["rounds_to_85"]) == (90.0, 85.0, 2)
    assert (found["discrepancy_mean"], found["discrepancy_variance"]) == (1.0, 0.25)
    assert (found["discrepancy_before_mean"], found["discrepancy_before_variance"]) == (2.0, 1.0)
    assert fedgroup_mnist.figures(rows[:1])["rounds_to_85"] is None


def test_wrong_options_are_refused(mnist):
    with pytest.raises(UsageError, match="power law"):
        fedgroup_mnist.mclr(Options(samples=5, data_dir=mnist), Quiet())
    with pytest.raises(UsageError, match="no algorithm"):
        fedgroup_mnist.mclr(Options(algorithm="cfl", devices=20, data_dir=mnist), Quiet())
    with pytest.raises(ConfigError, match="colour"):
        run(mnist, colour="red")


@pytest.mark.parametrize("runner", [fedgroup_mnist.mclr, fedgroup_mnist.heterogeneity])
def test_absent_data_exits_with_8(runner, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SHOAL_DATA_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingDataError) as caught:
        runner(Options(data_dir=tmp_path), Quiet())
    assert caught.value.exit_code == 8


def test_an_accuracy_figure_has_a_line_an_algorithm(mnist):
    panels = panels_of([run(mnist, a, rounds=2) for a in ("fg-edc", "ifca")], "accuracy")
    assert [line.label for line in panels[0].lines] == ["fg-edc", "ifca"]
    assert panels[0].levels["fg-edc, published"] == 96.0
