"""What attackers upload."""

import types

import numpy as np
import pytest
from shoal_lab.bench.poison.attacks import ALIE_DEVIATIONS, ATTACKS, BOOST, CAP, tamper

from crypto.mask.masking import mask
from tests.helpers.masks import key_of
from tests.helpers.plans import contribution, run_plan

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


def attacked(name, given, key=None):
    return tamper(ATTACKS[name].change, FALSE, given, workforce(key))


@pytest.mark.parametrize(
    ("name", "factor"),
    [("sign-flip", -1), ("boosted", BOOST), ("boosted-100", 100), ("boosted-flip", -9), ("boosted-labels", 9)],
)
def test_false_updates_are_multiplied(name, factor):
    rows, given = uploads()
    found = attacked(name, given)
    for row, c in zip(rows, found, strict=True):
        wanted = row * np.float32(factor) if c.device in FALSE else row
        np.testing.assert_allclose(c.row, wanted, rtol=1e-6)
        assert c.norm == pytest.approx(np.linalg.norm(wanted), rel=1e-6)


@pytest.mark.parametrize(("name", "factor"), [("backdoor-2", 1.0), ("backdoor-cap-3", CAP)])
def test_backdoors_length_is_in_median_norms(name, factor):
    rows, given = uploads()
    usual = np.median(np.linalg.norm(rows[2:], axis=1))
    found = attacked(name, given)
    assert [c.norm for c in found[:2]] == pytest.approx([factor * usual] * 2, rel=1e-5)
    assert [c.device for c in found] == [c.device for c in given]
    assert found[2:] == given[2:]


def test_noise_has_the_updates_length():
    _, given = uploads()
    found = attacked("noise", given)
    for before, after in zip(given[:2], found[:2], strict=True):
        assert after.norm == pytest.approx(before.norm, rel=1e-5)
        assert abs(before.row @ after.row) < 0.5 * before.norm**2
    assert found[0].row.tolist() != found[1].row.tolist()


def test_little_is_computed_of_clear_updates():
    key = key_of("rotation", D)
    rows, given = uploads(key)
    expected = rows[2:].mean(0) - ALIE_DEVIATIONS * rows[2:].std(0)
    found = attacked("alie", given, key)
    np.testing.assert_allclose(found[0].row, mask(expected.astype(np.float32), key).values, atol=1e-5)
    clear = attacked("alie", uploads()[1])
    np.testing.assert_allclose(clear[1].row, expected, atol=1e-5)


def test_false_counts_and_losses():
    _, given = uploads()
    counts = attacked("false-counts", given)
    assert [c.samples for c in counts] == [run_plan().recipe.max_samples] * 2 + [10] * 3
    given = [*uploads(model=1)[1][:2], *uploads(model=7, loss=2.0)[1][2:]]
    losses = attacked("false-losses", given)
    assert {(c.model, c.loss) for c in losses[:2]} == {(7, 0.0)}
    assert losses[2:] == given[2:]


def test_uploads_without_an_update_stay():
    given = [contribution(f"dev-{i}") for i in range(5)]
    assert attacked("sign-flip", given) == given
