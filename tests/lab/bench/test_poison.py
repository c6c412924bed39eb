"""A short run of the benchmark: its rows, what the filter does against reversed updates, and its poison."""

import types

import numpy as np
import pytest
from shoal_lab.bench import poison
from shoal_lab.bench.poison import ALIE_DEVIATIONS, ATTACKS, BOOST, CAP, attacked, measure, tamper

from crypto.mask.masking import mask
from shoal import limits
from tests.helpers.masks import key_of
from tests.helpers.plans import contribution, run_plan

pytestmark = pytest.mark.torch


def run(**options):
    return measure(**{"data": ("digits",), "rounds": 15} | options, progress=print)["rows"]


@pytest.mark.slow
def test_filter_stands_what_a_mean_does_not():
    """The filter stands what the plain mean does not."""
    rows = run(attacks=("absent", "none", "boosted-flip"), rules=("off", "filter"))
    accuracy = {(r["attack"], r["rule"]): r["accuracy"] for r in rows}
    assert len(rows) == 5
    assert accuracy["none", "filter"] == accuracy["none", "off"]
    assert accuracy["boosted-flip", "filter"] > accuracy["absent", "off"] - 3
    assert accuracy["boosted-flip", "off"] < accuracy["absent", "off"] - 10
    flipped = next(r for r in rows if (r["attack"], r["rule"]) == ("boosted-flip", "filter"))
    assert (flipped["named"], flipped["accused"], flipped["mode"]) == (3, 0, "rotation")
    assert 0 < max(r["error"] for r in rows) < 1e-6


@pytest.mark.long
def test_stretched_backdoor_passes_filter():
    """And not nnm."""
    rows = run(attacks=("backdoor-0", "backdoor-cap-3"), rules=("filter", "nnm"), rounds=50)
    success = {(r["attack"], r["rule"]): r["success"] for r in rows}
    assert success["backdoor-0", "filter"] < 5
    assert success["backdoor-cap-3", "filter"] > 50
    assert success["backdoor-cap-3", "nnm"] < 5
    assert min(r["accuracy"] for r in rows) > 85


def test_every_rule_runs():
    rows = run(attacks=("sign-flip",), rounds=2)
    assert [(r["rule"], r["mode"]) for r in rows] == [(rule, "rotation") for rule in limits.ROBUST_RULES]
    assert 0 < max(r["error"] for r in rows) < 1e-6


def test_digits_are_dealt_without_a_file():
    """No image twice; the seed decides."""
    one, same, other = (poison.deal("digits", seed, None, 10).population for seed in (1, 1, 2))
    shares = (one.train, one.validation, one.test)
    assert [{len(s) for s in share} for share in shares] == [{90}, {30}, {50}]
    assert len(np.unique(np.vstack([s.x for share in shares for s in share]), axis=0)) > 1690
    assert one.train[0].y.tolist() == same.train[0].y.tolist() != other.train[0].y.tolist()
    assert "digits" in poison.present(None)


def test_attackers_are_left_out_or_lie():
    population = poison.deal("digits", 0, None, 10).population
    false = population.names[:3]
    assert attacked(population, "absent").names == population.names[3:]
    assert attacked(population, "sign-flip") is population
    flipped = attacked(population, "label-flip")
    for before, after, name in zip(population.train, flipped.train, population.names, strict=True):
        assert (after.y == (9 - before.y if name in false else before.y)).all()


def test_backdoor_is_white_corner_with_label():
    """On a part of an attacker's images; success is measured on all images of other classes."""
    population = poison.deal("digits", 0, None, 20).population
    share, test = population.train[0], population.test[0]
    poisoned, triggered = poison.poisoned(share), poison.triggered(test)
    assert len(triggered) == np.count_nonzero(test.y != poison.TARGET) < len(test)
    painted = np.arange(len(share)) % poison.PAINTED == 0
    for found in (triggered.x, poisoned.x[painted]):
        assert (found.reshape(-1, 8, 8)[:, -2:, -2:] == 1.0).all()
    assert (np.concatenate([triggered.y, poisoned.y[painted]]) == poison.TARGET).all()
    assert (poisoned.x[~painted] == share.x[~painted]).all()
    assert (poisoned.y[~painted] == share.y[~painted]).all()


D = 50
FALSE = ("dev-0", "dev-1")


def uploads(key=None, **changes):
    rng = np.random.default_rng(0)
    rows = rng.standard_normal((5, D)).astype(np.float32)
    masked = rows if key is None else [mask(row, key).values for row in rows]
    return rows, [contribution(f"dev-{i}", row, **changes) for i, row in enumerate(masked)]


def workforce(key=None):
    return types.SimpleNamespace(
        run=run_plan(), models=types.SimpleNamespace(mask=key), place_of={f"dev-{i}": i for i in range(5)}
    )


def changed(name, given, key=None):
    return tamper(ATTACKS[name].change, FALSE, given, workforce(key))


@pytest.mark.parametrize(
    ("name", "factor"),
    [("sign-flip", -1), ("boosted", BOOST), ("boosted-100", 100), ("boosted-flip", -9), ("boosted-labels", 9)],
)
def test_false_updates_are_multiplied(name, factor):
    rows, given = uploads()
    found = changed(name, given)
    without_update = [contribution(f"dev-{i}") for i in range(5)]
    assert changed(name, without_update) == without_update
    for row, c in zip(rows, found, strict=True):
        wanted = row * np.float32(factor) if c.device in FALSE else row
        np.testing.assert_allclose(c.row, wanted, rtol=1e-6)
        assert c.norm == pytest.approx(np.linalg.norm(wanted), rel=1e-6)


@pytest.mark.parametrize(("name", "factor"), [("backdoor-2", 1.0), ("backdoor-cap-3", CAP)])
def test_backdoors_length_is_in_median_norms(name, factor):
    rows, given = uploads()
    usual = np.median(np.linalg.norm(rows[2:], axis=1))
    found = changed(name, given)
    assert [c.norm for c in found[:2]] == pytest.approx([factor * usual] * 2, rel=1e-5)
    assert [c.device for c in found] == [c.device for c in given]
    assert found[2:] == given[2:]


def test_noise_has_the_updates_length():
    _, given = uploads()
    found = changed("noise", given)
    for before, after in zip(given[:2], found[:2], strict=True):
        assert after.norm == pytest.approx(before.norm, rel=1e-5)
        assert abs(before.row @ after.row) < 0.5 * before.norm**2
    assert found[0].row.tolist() != found[1].row.tolist()


def test_little_is_computed_of_clear_updates():
    key = key_of("rotation", D)
    rows, given = uploads(key)
    expected = rows[2:].mean(0) - ALIE_DEVIATIONS * rows[2:].std(0)
    found = changed("alie", given, key)
    np.testing.assert_allclose(found[0].row, mask(expected.astype(np.float32), key).values, atol=1e-5)
    clear = changed("alie", uploads()[1])
    np.testing.assert_allclose(clear[1].row, expected, atol=1e-5)


def test_false_counts_and_losses():
    _, given = uploads()
    counts = changed("false-counts", given)
    assert [c.samples for c in counts] == [run_plan().recipe.max_samples] * 2 + [10] * 3
    given = [*uploads(model=1)[1][:2], *uploads(model=7, loss=2.0)[1][2:]]
    losses = changed("false-losses", given)
    assert {(c.model, c.loss) for c in losses[:2]} == {(7, 0.0)}
    assert losses[2:] == given[2:]


def row(attack, rule, accuracy, **changes):
    fields = {"attack": attack, "rule": rule, "accuracy": accuracy, "data": "digits", "strategy": "fedavg"}
    return {**fields, "mode": "rotation", "error": 1e-7, **changes}


ROWS = [
    row("absent", "off", 90.0),
    row("none", "off", 91.0),
    row("none", "filter", 91.25),
    row("sign-flip", "off", 60.0, error=3e-7),
    row("false-losses", "filter", 88.0, strategy="ifca"),
]


def test_a_backdoor_has_a_table_of_its_own():
    """Seeds have their mean and the lowest."""
    assert "| none | 90.5 (90.0) |" in poison.lines([row("none", "off", 90.0), row("none", "off", 91.0)])
    seeds = [row("backdoor-1", "filter", 90.0, success=10.0), row("backdoor-1", "filter", 92.0, success=30.0)]
    lines = poison.lines([*ROWS, *seeds])
    at = lines.index("**digits, fedavg**: success of a backdoor / accuracy")
    assert lines[at + 4 : at + 6] == ["| backdoor-1 | 20.0 (30.0) / 91.0 (90.0) |", ""]


def test_attack_a_line_and_a_rule_a_column():
    lines = poison.lines(ROWS)
    assert lines[0] == "**digits, fedavg**: 90.0 without the three"
    assert lines[2:7] == [
        "| attack | off | filter |",
        "|---|---|---|",
        "| none | 91.0 | 91.2 |",
        "| sign-flip | 60.0 | - |",
        "| false-losses | - | 88.0 |",
    ]
    assert lines[-1] == "Largest error of a mean under the mask (rotation): 3e-07."
