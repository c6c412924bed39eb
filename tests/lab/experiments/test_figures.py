"""Figures: the right lines from results, and files that a viewer opens."""

from __future__ import annotations

import pytest
from shoal_lab.experiments import figures

from shoal.errors import UsageError


def data(algorithm="ifca", published=95.0, **extra):
    """Return a result as `Result.data` gives it."""
    history = [{"round": r, "accuracy": 50.0 + r, "loss": 1 / r, "purity": 0.5} for r in (1, 2, 3)]
    return {"experiment": "toy", "algorithm": algorithm, "published": published, "history": history, **extra}


def test_accuracy_has_a_line_an_algorithm():
    """Accuracy has a line an algorithm and the published levels."""
    (panel,) = figures.panels_of([data(), data("fedavg", None)], "accuracy")
    assert [(line.label, list(line.x), list(line.y)) for line in panel.lines] == [
        ("ifca", [1, 2, 3], [51.0, 52.0, 53.0]),
        ("fedavg", [1, 2, 3], [51.0, 52.0, 53.0]),
    ]
    assert panel.levels == {"ifca, published": 95.0}


@pytest.mark.parametrize("splits", [[2, 3], [{"round": 2, "sizes": [1, 2]}, {"round": 3}]])
def test_splits_are_marked(splits):
    (panel,) = figures.panels_of([data(splits=splits)], "accuracy")
    assert panel.marks == [2.0, 3.0]


def test_unmeasured_rounds_are_left_out():
    """Rounds that were not measured are left out."""
    made = data()
    made["history"][1]["accuracy"] = None
    (panel,) = figures.panels_of([made], "accuracy")
    assert list(panel.lines[0].x) == [1, 3]


def test_identity_shows_purity_in_percent():
    identity, accuracy = figures.panels_of([data()], "identity")
    assert list(identity.lines[0].y) == [50.0] * 3
    assert list(accuracy.lines[0].y) == [51.0, 52.0, 53.0]


def test_gaps_are_over_samples():
    """Gaps are over samples where there are samples."""
    rows = [{"round": 50, "samples": n, "gap_updates": 0.1 * n, "gap_gradients": -0.1} for n in (10, 20)]
    (panel,) = figures.panels_of([data() | {"history": rows}], "gap")
    assert {line.label: list(line.y) for line in panel.lines} == {"updates": [1.0, 2.0], "gradients": [-0.1, -0.1]}
    assert (panel.x_label, list(panel.lines[0].x)) == ("samples a device", [10, 20])


def test_norms_are_on_a_logarithmic_axis():
    rows = [{"round": r, "norm_mean": 1 / r, "norm_max": 2 / r} for r in (1, 2)]
    (panel,) = figures.panels_of([data() | {"history": rows}], "norms")
    assert panel.logarithmic
    assert [line.label for line in panel.lines] == ["mean", "max"]


def test_success_has_a_panel_a_curve():
    """Success has a panel a curve and a line a value."""
    points = [{"R": r, "sigma": s, "probability": r} for s in (0.1, 0.4) for r in (1.0, 0.5)]
    success = {
        "a": {"axis": "R", "line": "sigma", "points": points},
        "b": {"axis": "R", "line": "sigma", "points": points},
    }
    panels = figures.panels_of([data(success=success)], "success")
    assert [p.title for p in panels] == ["(a)", "(b)"]
    assert [(line.label, line.x, line.y) for line in panels[0].lines][1] == ("sigma = 0.4", [0.5, 1.0], [0.5, 1.0])
    assert panels[0].chance


def test_chances_are_lines_over_gamma():
    rows = [{"k": k, "gamma": g, "chance": g / 2} for k in (4, 2) for g in (2.0, 1.0)]
    (panel,) = figures.panels_of([data() | {"history": rows}], "chance")
    assert [(line.label, line.x, line.y) for line in panel.lines] == [
        ("k = 2", [1.0, 2.0], [0.5, 1.0]),
        ("k = 4", [1.0, 2.0], [0.5, 1.0]),
    ]


def test_experiment_lays_out_panels():
    """An experiment may lay out panels itself."""
    laid = [{"title": "path", "x_label": "w1", "y_label": "w2", "lines": [{"label": "fl", "x": [0, 1], "y": [1, 0]}]}]
    (panel,) = figures.panels_of([data(panels=laid)], "panels")
    assert (panel.title, panel.lines[0].label) == ("path", "fl")


@pytest.mark.slow
@pytest.mark.parametrize(("name", "magic"), [("f.png", b"\x89PNG"), ("f.svg", b"<?xml"), ("f.pdf", b"%PDF")])
def test_the_file_is_a_picture(tmp_path, name, magic):
    figures.plot([data(), data("fedavg")], tmp_path / name, "identity")
    assert (tmp_path / name).read_bytes().startswith(magic)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_undrawable_is_refused() -> None:
    with pytest.raises(UsageError, match="no kind of figure 'pie'"):
        figures.panels_of([data()], "pie")
    with pytest.raises(UsageError, match="nothing for a figure of gap"):
        figures.panels_of([data()], "gap")


@pytest.mark.parametrize(
    ("measure", "key", "worst"), [("accuracy", "accuracy", [20.0, 90.0]), ("squared error", "test_loss", [90.0, 20.0])]
)
def test_devices_are_drawn_worst_first(measure, key, worst):
    """A fleets devices are drawn worst first."""
    made = data(measure=measure, scenario="x", by_device={"plain": [90.0, 20.0], "personal": [95.0, 70.0]})
    for row in made["history"]:
        row["test_loss"] = row["round"] / 2
    over, plain, personal = figures.panels_of([made], "fleet")
    assert (over.title, list(over.lines[0].y)) == ("x", [row[key] for row in made["history"]])
    assert list(plain.lines[0].y) == worst
    assert sorted(personal.lines[0].y) == [70.0, 95.0]
