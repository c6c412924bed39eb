"""The cells of which a strategy's mean is."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from aggregator.rounds.summed import OpenedSum, short_unit, summed_body
from aggregator.strategies.base import RoundPlan
from crypto.sums.ring import SHORT_BITS, average, fixed, unit_of
from shoal.errors import IntegrityError
from shoal.protocol.codec import decode
from shoal.protocol.messages import Assignment, Phase, Share
from shoal.protocol.sums import SumCodes
from tests.helpers.keepers import MOST, plan_of
from tests.helpers.plans import D

TRAIN = Assignment(Phase.TRAIN, (0,), Share.TRAIN, train=True, evaluate=False, margins=False)
UNIT = unit_of(plan_of().recipe.norm_limit, D, MOST)


def cell(model, count):
    rng = np.random.default_rng([model, count])
    words = [fixed(rng.normal(size=D).astype(np.float32), UNIT, MOST) for _ in range(count)]
    total = sum(words, np.zeros(D, np.uint32))
    return OpenedSum(model, count, total, average(total, count, UNIT), (model, count))


CELLS = [cell(model, 3 + model) for model in range(8)]


@pytest.mark.parametrize("chosen", [[0], [7], [1, 4], [0, 2, 3, 5], list(range(8))])
def test_mean_is_found_among_cells(chosen):
    count = sum(CELLS[at].count for at in chosen)
    mean = sum(CELLS[at].count / count * CELLS[at].mean.astype(np.float64) for at in chosen)
    body, vector = summed_body(mean.astype(np.float32), CELLS, "", plan_of())
    told = decode(body[4 * D :], SumCodes)
    assert told.models == tuple(chosen)
    assert told.counts == tuple(CELLS[at].count for at in chosen)
    assert np.abs(vector - mean).max() < 1e-5


def plan_in(phase, **changes):
    return RoundPlan(2, {}, {"dev-1": TRAIN, "dev-2": dataclasses.replace(TRAIN, phase=phase, **changes)})


@pytest.mark.parametrize(
    ("levels", "plan", "longest"),
    [
        ({"train": 3.0, "train/0": 2.0, "train/1": 4.0}, plan_in(Phase.TRIAL), 6.0),
        ({"train/0": 1e9}, plan_in(Phase.TRAIN), 100.0),
        ({"pretrain/0": 2.0}, plan_in(Phase.TRAIN), 0),
        ({"train/0": 2.0}, plan_in(Phase.STATISTICS), 0),
        ({"train/0": 2.0}, plan_in(Phase.SCORE, train=False), 3.0),
        ({}, plan_in(Phase.TRAIN), 0),
    ],
)
def test_short_numbers_follow_the_norms(levels, plan, longest):
    short = dataclasses.replace(plan_of().recipe, precision_up="float16")
    run = dataclasses.replace(plan_of(), recipe=short)
    expected = unit_of(longest, D, MOST, SHORT_BITS) if longest else 0.0
    assert short_unit(run, plan, levels) == pytest.approx(expected)
    alone = dataclasses.replace(run, keeper=None, most_summed=0)
    assert short_unit(alone, plan, levels) == short_unit(plan_of(), plan, levels) == 0.0


@pytest.mark.parametrize("cells", [CELLS, []])
def test_another_mean_is_refused(cells):
    with pytest.raises(IntegrityError, match="not one of opened cells"):
        summed_body(CELLS[0].mean * np.float32(1.01), cells, "", plan_of())
