"""newcomers on tiny files in MNIST's format, whose turns by a quarter rename labels."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from shoal_lab.experiments.data.datasets import Dataset
from shoal_lab.experiments.fedgroup.newcomers import MAJORITIES, TRUE_GROUPS, Placements, deal, leaders

from aggregator.strategies.base import Outcome, RoundPlan
from shoal.errors import UsageError
from tests.helpers import studies
from tests.helpers.mnist import idx

TINY = {"hidden": "16", "newcomers": "8"}
PLACES = [(4, 4), (18, 4), (18, 18), (4, 18), (4, 11), (11, 4), (18, 11), (11, 18), (11, 11)]
"""Of a blob, by label; a quarter turn takes 0, 1, 2, 3 and 4, 5, 6, 7 each to the next one. Label 9 has none."""


@pytest.fixture(scope="module")
def mnist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Images whose label is the place of a bright blob, in MNIST's files."""
    folder = tmp_path_factory.mktemp("mnist")
    rng = np.random.default_rng(1)
    for name, count in (("train", 3600), ("t10k", 10)):
        labels = rng.integers(0, 10, count).astype(np.uint8)
        images = rng.integers(0, 90, (count, 28, 28)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            if label < len(PLACES):
                row, column = PLACES[label]
                image[row : row + 6, column : column + 6] = 230
        (folder / f"{name}-images-idx3-ubyte").write_bytes(idx(images))
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(idx(labels))
    return folder


def run(folder: Path, **given: Any) -> dict[str, Any]:
    settings = {**TINY, **given.pop("settings", {})}
    return studies.run("newcomers", folder, settings=settings, **{"devices": 16, "samples": 150, **given})


CFL: dict[str, Any] = {"rounds": 26, "settings": {"lr": "0.3", "epochs": "6", "placing_rounds": "4"}}
FEDGROUP: dict[str, Any] = {"rounds": 2, "settings": {"placing_rounds": "2", "epochs": "1"}}
RUNS = {"cfl": CFL, "fedgroup": FEDGROUP}
WAITED = {"cfl": {1, 2, 3}, "fedgroup": {1}}


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", RUNS)
def test_newcomers_join_their_angles_group(mnist: Path, algorithm: str) -> None:
    """All eight, by direction: for FedGroup in the round after their arrival, for CFL within one for each edge of its tree."""
    data = run(mnist, algorithm=algorithm, **RUNS[algorithm])
    founders, found = data["founders"], data["newcomers"]
    assert (founders["purity"], founders["clusters"], founders["sizes"]) == (1.0, 4, [4, 4, 4, 4])
    assert founders["stood_from_round"] <= founders["rounds"] == data["parameters"]["founders_rounds"]
    assert (found["right"], found["tries"], found["placed"], found["right_at_end"]) == (8, 8, 8, 8)
    assert found["measured_against"] == TRUE_GROUPS
    assert [e["device"] for e in found["each"]] == [f"dev-{i:04d}" for i in range(16, 24)]
    assert sorted(e["turn"] for e in found["each"]) == [0, 0, 1, 1, 2, 2, 3, 3]
    waited = {e["round"] - founders["rounds"] for e in found["each"]}
    assert waited == WAITED[algorithm]
    assert (data["purity"], data["clusters"]) == (1.0, 4)
    assert data["accuracy"] > 50


def test_before_any_split_nobody_is_right(mnist: Path) -> None:
    """They join the only cluster, in which no angle leads, and the result names the measure."""
    data = run(mnist, rounds=1, settings={"placing_rounds": "1", "warm_up": "5"})
    found = data["newcomers"]
    assert (found["right"], found["placed"], found["tries"]) == (0, 8, 8)
    assert found["measured_against"] == MAJORITIES
    assert (data["founders"]["purity"], data["founders"]["true_groups"]) == (0.25, False)


def pixels(count: int) -> Dataset:
    """Return images of 3 x 3 whose pixels tell which image it is and how it is turned."""
    x = np.arange(9 * count, dtype=np.float32).reshape(count, 3, 3)
    return Dataset(
        name="tiny",
        x_train=x,
        y_train=np.zeros(count, np.int64),
        x_test=x[:1],
        y_test=np.zeros(1, np.int64),
    )


def test_each_image_is_dealt_once_and_turned() -> None:
    """Founders first, as many of each angle, and the split depends on the seed."""
    data = pixels(120)
    population, late = deal(data, founders=8, newcomers=4, samples=10, seed=5)
    assert late == ("dev-0008", "dev-0009", "dev-0010", "dev-0011")
    assert population.groups is not None
    assert sorted(population.groups[:8]) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert sorted(population.groups[8:]) == [0, 1, 2, 3]
    seen = set()
    for i, turn in enumerate(population.groups):
        parts = [s[i].x for s in (population.train, population.validation, population.test)]
        assert [len(p) for p in parts] == [6, 2, 2]
        for image in np.concatenate(parts).reshape(-1, 3, 3):
            upright = np.rot90(image, -turn)
            number = int(upright[0, 0]) // 9
            np.testing.assert_array_equal(upright, data.x_train[number])
            seen.add(number)
    assert len(seen) == 120
    other, _ = deal(data, founders=8, newcomers=4, samples=10, seed=6)
    assert not np.array_equal(other.train[0].x, population.train[0].x)


def test_a_tie_has_no_leading_angle() -> None:
    """A share that two angles have in equal parts belongs to neither."""
    turns = {"a": 0, "b": 0, "c": 1, "d": 1, "e": 2}
    assert leaders({"a": 7, "b": 7, "c": 7, "d": 9, "e": 9}, turns) == {7: 0, 9: None}


def watched(*rounds: dict[str, int]) -> dict[str, Any]:
    """Return the report on founders a to d (angles 0, 0, 1, 1) and newcomers x (0), y (1), who arrive in round 3."""
    watch = Placements({"a": 0, "b": 0, "c": 1, "d": 1, "x": 0, "y": 1}, ("x", "y"), 3)
    for i, clusters in enumerate(rounds, 1):
        watch(SimpleNamespace(plan=RoundPlan(i, {}, {}), outcome=Outcome(clusters)))  # type: ignore[arg-type]
    return watch.report()


def test_the_moment_of_joining_counts() -> None:
    """One is wrong and one still waits at the end; a later move shows in ``right_at_end`` alone."""
    true = {"a": 1, "b": 1, "c": 2, "d": 2}
    report = watched(dict.fromkeys("abcd", 0), true, {**true, "x": 2}, {**true, "x": 1})
    found = report["newcomers"]
    assert (found["right"], found["placed"], found["right_at_end"]) == (0, 1, 1)
    assert [(e["round"], e["cluster"], e["group_turn"], e["right"]) for e in found["each"]] == [
        (3, 2, 1, False),
        (None, None, None, False),
    ]
    assert (report["founders"]["stood_from_round"], report["founders"]["rounds"]) == (2, 2)
    assert found["measured_against"] == TRUE_GROUPS


def test_impure_groups_are_called_majorities() -> None:
    """Impure groups before the arrival, and groups that change while newcomers join."""
    impure, true = {"a": 1, "b": 1, "c": 1, "d": 2}, {"a": 1, "b": 1, "c": 2, "d": 2}
    report = watched(impure, impure, {**impure, "x": 1, "y": 2})
    assert (report["newcomers"]["right"], report["newcomers"]["measured_against"]) == (2, MAJORITIES)
    assert report["founders"]["purity"] == 0.75
    later = watched(true, true, {**dict.fromkeys("abcd", 0), "x": 0, "y": 0})
    assert (later["newcomers"]["right"], later["newcomers"]["measured_against"]) == (0, MAJORITIES)


def test_what_makes_no_sense_is_refused(mnist: Path) -> None:
    """Numbers of devices, rounds and settings."""
    with pytest.raises(UsageError, match="6 newcomers"):
        run(mnist, settings={"newcomers": "6"})
    with pytest.raises(UsageError, match="10 founders"):
        run(mnist, devices=10)
    with pytest.raises(UsageError, match="placing_rounds"):
        run(mnist, settings={"placing_rounds": "0"})
