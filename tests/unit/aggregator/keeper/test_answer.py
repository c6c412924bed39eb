"""The keeper's answers: exact sums of pads for what the rules allow, and a reason for everything else."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from aggregator.keeper.answer import answered
from aggregator.keeper.memory import KeeperMemory
from crypto.sums.ring import add_pad
from shoal.errors import UntrustedError
from shoal.protocol.cells import Cell, OpenCells
from shoal.protocol.messages import Phase
from shoal.protocol.sums import Figures, KeeperShare
from tests.helpers.keepers import NAMES, NONCE, identity, plan_of, roster_of, seed_of, share
from tests.helpers.plans import D, run_plan

NOTHING = KeeperMemory()


def request(*cells, run=1, round_=1, **changes):
    plan = plan_of(run)
    made = tuple(
        Cell(Phase.TRAIN, model, True, tuple(share(n, run=run, round_=round_, model=model) for n in names))
        if isinstance(names[0], str)
        else Cell(Phase.TRAIN, model, True, names)
        for model, names in enumerate(cells)
    )
    asked = OpenCells(run_id=plan.run_id, round=round_, nonce=NONCE, plan=b"", cells=made)
    return dataclasses.replace(asked, **changes)


def answer(asked, memory=NOTHING, *, run=1, roster=None):
    return answered(asked, plan_of(run), roster=roster or roster_of(), identity=identity("keeper"), memory=memory)


def opened(asked, memory=NOTHING, **options):
    found = answer(asked, memory, **options)
    assert found.message.cells, found.message
    return found


def refused(asked, memory=NOTHING, **options):
    found = answer(asked, memory, **options)
    assert not found.message.cells
    assert found.memory is memory
    assert not list(found.pads())
    return found.message.refused or ", ".join(found.message.false)


def pads_of(names):
    total = np.zeros(D, np.uint32)
    for name in names:
        add_pad(total, seed_of(name))
    return total


def test_sums_of_pads():
    found = opened(request(NAMES[:5], NAMES[5:9]))
    sums = list(found.pads())
    assert (sums[0] == pads_of(NAMES[:5])).all()
    assert (sums[1] == pads_of(NAMES[5:9])).all()
    assert [cell.count for cell in found.message.cells] == [5, 4]


def test_figures_are_of_the_cell():
    told = [Figures(loss=at, correct=at, tested=10, norm=at + 1.0) for at in range(5)]
    shares = tuple(share(n, figures=f) for n, f in zip(NAMES, told, strict=False))
    (cell,) = opened(request(shares)).message.cells
    assert (cell.loss, cell.correct, cell.tested, cell.norm, cell.longest) == (2.0, 10, 50, 3.0, 4.0)


def test_margins_have_no_names():
    told = [Figures(norm=1.0, margins=(0.0, margin)) for margin in (0.3, -0.1, 0.2)]
    shares = tuple(share(n, figures=f) for n, f in zip(NAMES, told, strict=False))
    (cell,) = opened(request(shares)).message.cells
    assert cell.margins == ((0.0, 0.0, 0.0), (-0.1, 0.2, 0.3))


@pytest.mark.parametrize("announced", [0.0, 0.5])
def test_updates_in_another_step_are_false(announced):
    """A device in steps of a hundredth would count a hundred times in the sum."""
    shares = [share(n, unit=0.01 if n == "dev-2" else announced) for n in NAMES[:5]]
    assert refused(request(tuple(shares))) == "dev-2"
    opened(request(tuple(s for s, n in zip(shares, NAMES, strict=False) if n != "dev-2")))


@pytest.mark.parametrize(
    ("norms", "named"), [((1, 2, 21), "dev-2"), ((1, 2, 20), ""), ((0, 0, 0, 1, 1), ""), ((1e-3, 1, 1, 1, 11), "dev-4")]
)
def test_long_updates_are_named(norms, named):
    """As without a keeper: above ten times the median, unless most have nothing left to learn."""
    shares = tuple(share(n, figures=Figures(norm=float(at))) for n, at in zip(NAMES, norms, strict=False))
    if named:
        assert refused(request(shares)) == named
    else:
        (cell,) = opened(request(shares)).message.cells
        assert cell.norm == sum(norms) / len(norms)


def test_same_request_same_answer():
    asked = request(NAMES[:5])
    first = opened(asked)
    again = opened(asked, first.memory)
    assert again.message == first.message
    assert again.memory is first.memory
    assert (next(again.pads()) == next(first.pads())).all()


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (lambda: request(NAMES[:4]), "round 1 was opened before, with other cells"),
        (lambda: request(NAMES[:6], round_=1), "round 1 was opened before, with other cells"),
        (lambda: request(NAMES[:4], round_=2), "differ too little"),
        (lambda: request(NAMES[:6], round_=2), "differ too little"),
        (lambda: request(NAMES[:2], round_=2), "a cell of 2 devices, and 3 are needed"),
        (lambda: request(NAMES[:4], NAMES[3:8], round_=2), "a device is named twice"),
    ],
)
def test_refused_after_five_were_opened(asked, reason):
    before = opened(request(NAMES[:5])).memory
    assert reason in refused(asked(), before)


def test_earlier_round_and_run_are_refused():
    later = opened(request(NAMES[:5], run=2, round_=4), run=2).memory
    assert "round 4 was opened before" in refused(request(NAMES[5:9], run=2, round_=3), later, run=2)
    assert "run 2 has begun since" in refused(request(NAMES[5:9]), later)


def test_rule_on_differences_spans_runs():
    before = opened(request(NAMES[:5])).memory
    assert "differ too little" in refused(request(NAMES[:4], run=2), before, run=2)
    assert opened(request(NAMES[:5], run=2), before, run=2)


def test_refusal_names_what_was_opened():
    before = opened(request(NAMES[:5])).memory
    found = answer(request(NAMES[:4], round_=2), before)
    assert [[len(cell) for cell in cells] for cells in found.message.recent] == [[5]]


@pytest.mark.parametrize(
    "false",
    [
        {"signer": "dev-1"},
        {"round_": 2},
        {"nonce": b"x" * 16},
        {"model": 1},
        {"phase": Phase.TRIAL},
        {"length": D - 1},
        {"length": 0},
        {"recipient": bytes(32)},
        {"device": "dev-2"},
        {"figures": Figures(loss=1e39, norm=1.0)},
        {"figures": Figures(correct=3, tested=2, norm=1.0)},
        {"figures": Figures(norm=-1.0)},
        {"figures": Figures(norm=1.0, margins=(0.0, 0.1))},
    ],
)
def test_false_share_is_named(false):
    assert refused(request((share("dev-0", **false), *(share(name) for name in NAMES[1:5])))) == "dev-0"


def test_no_share_at_all():
    assert refused(request((b"", *(share(name) for name in NAMES[1:5])))) == ""


def test_revoked_device_is_false():
    assert refused(request(NAMES[:5]), roster=roster_of(("dev-3",))) == "dev-3"


def test_same_device_twice():
    assert refused(request((*map(share, NAMES[:3]), share("dev-0")))) == "a device is named twice"
    assert refused(request((share("dev-0"),) * 3)) == "a cell of 1 devices, and 3 are needed"


def test_another_keeper_gets_no_answer():
    with pytest.raises(UntrustedError, match="another keeper"):
        answered(request(NAMES[:3]), run_plan(), roster=roster_of(), identity=identity("keeper"), memory=NOTHING)
    with pytest.raises(UntrustedError, match="another keeper"):
        answer(request(NAMES[:3], run_id=b"z" * 16))


def test_memory_holds_ten_requests():
    memory = KeeperMemory()
    for round_ in range(1, 15):
        memory = opened(request(NAMES[:5], round_=round_), memory).memory
    assert [one.round for one in memory.opened] == list(range(5, 15))


def test_share_shows_no_pad():
    told = KeeperShare(
        fleet="demo",
        run_id=bytes(16),
        round=1,
        phase=Phase.TRAIN,
        nonce=NONCE,
        device="dev-0",
        recipient=bytes(32),
        model=0,
        length=D,
        pad=b"secret-pad-seed!" * 2,
        figures=Figures(loss=3.25),
    )
    assert "secret" not in repr(told)
    assert "3.25" not in repr(told)
