"""CFL's cut: what is known of it beforehand, and what events tell."""

import dataclasses
import math
from collections import Counter

import numpy as np
import pytest

from aggregator.numerics.backend import cosine_matrix
from aggregator.numerics.gap import overlap
from aggregator.strategies.cfl.split import Norms, describe, find_cuts, has_gap, noise, settled, statistics_cut
from aggregator.strategies.cfl.state import CflSettings
from tests.helpers.plans import contribution
from tests.unit.aggregator.strategies.cfl.quadratics import (
    ALG_5,
    TRIED,
    TRUTH,
    partition,
    ran,
)

FIGURES = {"cross_max", "gamma_limit", "mean_norm", "max_norm", "intra_min", "intra_min_estimate"}


def rows_about(centres, each=4, spread=0.3, seed=0):
    """Return contributions about each centre (d,), with noise of ``spread`` times its length."""
    rng = np.random.default_rng(seed)
    made = []
    for g, centre in enumerate(centres):
        for i in range(each):
            off = rng.standard_normal(len(centre))
            off *= spread * rng.uniform(0.5, 1.0) * np.linalg.norm(centre) / np.linalg.norm(off)
            made.append(contribution(f"dev-{g}{i}", centre + off))
    return made


def test_noise_is_distance_in_lengths():
    """Eq. 16 of the CFL paper from cosines and norms equals the same from the vectors."""
    rows = rows_about([np.arange(1.0, 31.0)], each=6, spread=0.8)
    vectors = np.stack([c.row.astype(np.float64) for c in rows])
    mean = vectors.mean(axis=0)
    expected = np.linalg.norm(vectors - mean, axis=1) / np.linalg.norm(mean)
    found = noise(cosine_matrix([c.row for c in rows]), np.array([c.norm for c in rows]))
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert found.max() > 0.3
    opposed = np.array([[1.0, -1.0], [-1.0, 1.0]])
    assert noise(opposed, np.array([2.0, 2.0])).tolist() == [math.inf, math.inf], "their mean vanishes"


def test_the_figures_of_a_cut():
    """The estimate of Eq. 37 is a worst case for what is measured inside; Eq. 39's limit follows from what is across."""
    centre = np.random.default_rng(4).standard_normal(50)
    rows = rows_about([centre, -centre], spread=0.4)
    (cut, *_) = find_cuts(CflSettings(), rows, 2, Norms(0.25, 9.0), None)
    assert {len(side) for side in cut.sides} == {4}
    figures = cut.figures
    assert (set(figures), figures["mean_norm"], figures["max_norm"]) == (FIGURES, 0.25, 9.0)
    assert figures["gamma_limit"] == pytest.approx(math.sqrt((1 - figures["cross_max"]) / 2))
    cosines = cosine_matrix([c.row for c in rows])
    assert figures["cross_max"] == pytest.approx(cosines[:4, 4:].max())
    for side, inside in enumerate((cosines[:4, :4], cosines[4:, 4:])):
        assert figures["intra_min"][side] == pytest.approx(inside.min())
        gammas = np.sort(noise(inside, np.array([c.norm for c in rows[4 * side : 4 * side + 4]])))
        assert figures["intra_min_estimate"][side] == pytest.approx(overlap(gammas[-1], gammas[-2]))
        assert figures["intra_min_estimate"][side] <= figures["intra_min"][side]


def test_what_can_not_be_computed_is_none():
    """A side of one device has no pair; one noisier than its own mean has no bound."""
    cosines = np.eye(4)
    cosines[1, 2] = cosines[2, 1] = -0.9
    found = describe(cosines, np.ones(4), ((0,), (1, 2, 3)), 0.0, Norms(0.0, 1.0))
    assert (found["intra_min"], found["intra_min_estimate"]) == ([None, -0.9], [None, None])


@pytest.mark.parametrize(
    ("changes", "least", "found"),
    [({}, 2, True), ({}, 5, False), ({"gamma_max": 0.7}, 2, True), ({"gamma_max": 0.999}, 2, False)],
)
def test_where_a_cut_may_not_be_made(changes, least, found):
    """Sides too small, or noise that could explain the cut (Eq. 39)."""
    centre = np.eye(20)[0]
    rows = rows_about([centre, -centre])
    settings = dataclasses.replace(CflSettings(), **changes)
    assert bool(find_cuts(settings, rows, least, Norms(0.0, 1.0), None)) == found


@pytest.mark.parametrize(
    ("form", "norms", "early", "expected"),
    [
        ("absolute", (0.3, 2.0), 0.0, True),
        ("absolute", (0.5, 2.0), 0.0, False),
        ("absolute", (0.3, 0.1), 0.0, False),
        ("relative", (0.3, 1.0), 4.0, True),
        ("relative", (0.5, 1.0), 4.0, False),
        ("relative", (0.3, 1.0), 10.0, False),
    ],
)
def test_settled_is_a_small_mean(form, norms, early, expected):
    """Eqs 32 and 33, as norms or as shares of the round's largest and of the early rounds' largest."""
    assert settled(CflSettings(form=form, eps1=0.4, eps2=0.2), Norms(*norms), early) == expected


@pytest.mark.parametrize(
    "settings", [ALG_5, {**ALG_5, "linkage": "complete"}, TRIED], ids=["alg-5", "complete", "validated"]
)
def test_every_split_reports_its_figures(settings):
    rounds, _ = ran(40, **settings)
    assert partition(rounds) == TRUTH
    told = [e for e in rounds.events if e.kind in ("split", "trial-opened", "split-refused")]
    kinds = Counter(e.kind for e in told)
    assert (kinds["split"], kinds["trial-opened"]) == (3, 3 + kinds["split-refused"] if settings is TRIED else 0)
    assert "norms" not in {e.kind for e in rounds.events}, "nobody asked for a trace"
    for event in told:
        assert set(event.detail) >= FIGURES
    first = next(e for e in rounds.events if e.kind == "split")
    assert first.detail["mean_norm"] < 0.4 * first.detail["max_norm"]
    assert max(first.detail["intra_min"]) > first.detail["cross_max"]


def test_trace_reports_norms_in_every_round():
    """The mean update's norm and the largest single one (Eqs 32 and 33), for the figure of norms over rounds."""
    rounds, answer = ran(0, **ALG_5, trace="on")
    for round_ in range(1, 13):
        training = set(rounds.state.clusters)
        given = {}

        def keep(device, assignment, r, given=given):
            given[device] = answer(device, assignment, r)
            return given[device]

        outcome = rounds.step(keep)
        told = [e.detail for e in outcome.events if e.kind == "norms"]
        assert [e.round for e in outcome.events if e.kind == "norms"] == [round_] * len(training)
        assert {d["cluster"] for d in told} == training
        for detail in told:
            mine = [c for c in given.values() if c.model == detail["cluster"]]
            mean = np.mean([c.vector for c in mine], axis=0)
            assert detail["mean_norm"] == pytest.approx(float(np.linalg.norm(mean)), rel=1e-4, abs=1e-6)
            assert detail["max_norm"] == max(c.norm for c in mine)
    assert partition(rounds) == TRUTH


@pytest.mark.parametrize(
    ("cross", "within", "gap"),
    [(-0.4, [0.6, 0.5], True), (0.3, [0.6, 0.2], False), (0.3, [0.6, None], True), (0.3, [None, None], False)],
)
def test_gap_needs_each_cosine_above_across(cross, within, gap):
    """A cut has a gap if each cosine within is above each across."""
    assert has_gap({"cross_max": cross, "intra_min": within}) is gap


def statistics_of_groups(groups, each=4, spread=0.02, seed=0):
    """Return vectors about the same long vector, in which each of so many groups has its own small difference."""
    rng = np.random.default_rng(seed)
    common, own = rng.uniform(-1, 1, 40), rng.standard_normal((groups, 40)) / 4
    rows = [
        (f"dev-{g}{i}", common + own[g] + spread * rng.standard_normal(40)) for g in range(groups) for i in range(each)
    ]
    return [contribution(name, values) for name, values in rows]


@pytest.mark.parametrize("groups", [2, 3])
def test_statistics_show_a_group(groups):
    cut = statistics_cut(statistics_of_groups(groups, each=5), 3, None)
    sides = [{device[4] for device in side} for side in cut.sides]
    assert sorted(map(len, sides)) == sorted([1, groups - 1])
    assert not sides[0] & sides[1]
    assert set(cut.figures) == FIGURES


def test_one_group_shows_no_cut():
    assert statistics_cut(statistics_of_groups(1, each=12), 3, None) is None
    assert statistics_cut(statistics_of_groups(2, each=4), 5, None) is None
    assert statistics_cut([contribution(f"dev-{i}", np.ones(9)) for i in range(6)], 3, None) is None
