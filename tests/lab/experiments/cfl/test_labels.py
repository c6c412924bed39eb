"""cfl-label-permutation and cfl-label-swap on tiny files in the true format."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from shoal_lab.experiments.cfl import labels as cfl_labels
from shoal_lab.experiments.cfl.labels import ALONE, settings_of
from shoal_lab.experiments.common.experiment import Options, Quiet
from shoal_lab.experiments.data.datasets import MissingDataError

from shoal.errors import ConfigError, UsageError
from tests.helpers.mnist import write_bars

MLP = {"model": "mlp", "hidden": "24", "lr": "0.1"}


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images whose label is the height of a bright bar, in MNIST's files."""
    return write_bars(tmp_path_factory.mktemp("mnist"), seed=1, train=1000, test=40)


def run(folder: Path, runner: Any = cfl_labels.label_permutation, **given: Any) -> dict[str, Any]:
    settings = {**MLP, **given.pop("settings", {})}
    options = {"devices": 10, "samples": 100, "rounds": 45, "mask": "none", **given}
    data: dict[str, Any] = runner(Options(data_dir=folder, settings=settings, **options), Quiet()).data()
    return data


@pytest.fixture(scope="module")
def both(mnist: Path) -> dict[str, dict[str, Any]]:
    """The same run in the clear and masked."""
    return {mask: run(mnist, mask=mask, settings={"groups": "2"}) for mask in ("none", "permutation")}


def test_groups_are_found_and_splits_reported(both: dict[str, dict[str, Any]]) -> None:
    """The clusters are the hidden groups, and the split raised its devices' accuracy."""
    data = both["permutation"]
    assert data["ari"] == 1.0
    assert data["purity"] == 1.0
    assert data["clusters"] == 2
    (split,) = data["splits"]
    assert split["right"]
    assert sorted(split["sizes"]) == [5, 5]
    assert split["accuracy_later"] > split["accuracy_before"] + 20
    assert data["true_partition_from_round"] == split["round"]
    assert data["pure_clusters_split"] == data["wrong_splits"] == 0
    assert [row["round"] for row in data["history"]] == list(range(1, 46))
    assert data["accuracy"] > 80
    assert (data["parameters"]["train"], data["parameters"]["validation"], data["parameters"]["test"]) == (60, 20, 20)


def test_a_masked_run_finds_the_same_clusters_at_the_same_accuracy(both: dict[str, dict[str, Any]]) -> None:
    """Cosines, norms and means don't see the mask."""
    clear, masked = both["none"], both["permutation"]
    assert [s["round"] for s in clear["splits"]] == [s["round"] for s in masked["splits"]]
    assert [r["clusters"] for r in clear["history"]] == [r["clusters"] for r in masked["history"]]
    assert abs(clear["accuracy"] - masked["accuracy"]) < 0.1


def test_data_without_groups_stays_in_one_piece(mnist: Path) -> None:
    """No candidate survives its trial where devices differ by chance alone."""
    data = run(mnist, settings={"groups": "1"})
    assert data["clusters"] == 1
    assert data["splits"] == []
    assert data["true_partition"] is True


def test_swapped_labels_and_fedavg_run(mnist: Path) -> None:
    """Both experiments know both algorithms; plain federated learning splits nothing."""
    data = run(mnist, cfl_labels.label_swap, algorithm="fedavg", rounds=3)
    assert data["experiment"] == "cfl-label-swap"
    assert data["algorithm"] == "fedavg"
    assert data["clusters"] == 1
    assert "splits" not in data
    assert data["parameters"]["groups"] == 4


def test_the_cnn_is_the_default(mnist: Path) -> None:
    """6 and 16 filters of 5x5."""
    options = Options(data_dir=mnist, devices=4, samples=10, rounds=1)
    data = cfl_labels.label_permutation(options, Quiet()).data()
    assert data["parameters"]["coordinates"] == 44426
    assert "filters=(6, 16)" in data["parameters"]["model"]


def test_alg_5_alone_has_its_own_declared_eps() -> None:
    """validate=off brings stricter tests, which settings by hand override; the default brings none."""
    assert settings_of("cfl", Options(settings={"model": "mlp"})) == {}
    assert settings_of("cfl", Options(settings={"validate": "off"})) == {**ALONE, "validate": "off"}
    assert settings_of("cfl", Options(settings={"validate": "off", "eps1": ".3"}))["eps1"] == ".3"


def test_impossible_options_are_refused(mnist: Path, tmp_path: Path) -> None:
    """Absent data, unknown networks, settings and groups."""
    with pytest.raises(MissingDataError, match="cifar10 is not here") as missing:
        run(tmp_path, settings={"dataset": "cifar10"})
    assert missing.value.exit_code == 8
    with pytest.raises(UsageError, match="no network"):
        run(mnist, settings={"model": "tree"}, rounds=1)
    with pytest.raises(UsageError, match="0 groups"):
        run(mnist, settings={"groups": "0"}, rounds=1)
    with pytest.raises(UsageError, match="no setting"):
        run(mnist, algorithm="fedavg", settings={"eps1": "1"}, rounds=1)
    with pytest.raises(ConfigError, match="no setting 'eps3'"):
        run(mnist, settings={"eps3": "1"}, rounds=1)
