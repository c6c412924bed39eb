"""The aggregator's side of a run with a keeper: cells, the durable request, stand-ins, and what is left out."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from aggregator.keeper.answer import answered
from aggregator.keeper.memory import KeeperMemory
from aggregator.sums import FALSE_SHARE, NOT_OPENED, CellOpener, KeeperAwaitedError, chosen_cells
from crypto.sums.ring import hidden, unit_of
from shoal.protocol.cells import OpenCells
from shoal.protocol.codec import decode
from shoal.protocol.sums import Figures
from tests.helpers.keepers import MOST, NAMES, NONCE, identity, plan_of, roster_of, seed_of, share
from tests.helpers.plans import D, contribution


def update(name, values, model=0, round_=1, pad=None, figures=None):
    """Return a device's update as it arrives: padded words, and a share for the keeper."""
    values = np.asarray(values, np.float32)
    figures = figures or Figures(loss=float(values[0]), correct=1, tested=2, norm=float(np.linalg.norm(values)))
    sealed = share(name, model=model, round_=round_, pad=pad, figures=figures)
    words = hidden(values, unit_of(plan_of().recipe.norm_limit, D, MOST), MOST, [seed_of(name)])
    made = contribution(name, np.zeros(D, np.float32), model=model)
    told = {"share": sealed, "checks": (1, 2), "loss": 0.0, "samples": 0}
    return dataclasses.replace(made, round=round_, vector=words.view(np.float32), **told)


class Keeper:
    """A keeper that is asked and answers when it is told to."""

    def __init__(self, directory):
        self.asked, self.memory = [], KeeperMemory()
        self.opener = self.make(directory)

    def make(self, directory):
        return CellOpener(plan_of(), b"plan", directory, roster_of, self.asked.append)

    def answer(self, at=-1):
        request = decode(self.asked[at], OpenCells)
        found = answered(request, plan_of(), roster=roster_of(), identity=identity("keeper"), memory=self.memory)
        self.memory = found.memory
        body = b"".join(pads.astype("<u4").tobytes() for pads in found.pads())
        self.opener.take(found.message, memoryview(body))
        return found.message

    def ask(self, updates):
        """Close a round on updates whose cells are not opened yet; return the keeper's answer."""
        with pytest.raises(KeeperAwaitedError):
            self.opener.open(1, NONCE, updates)
        return self.answer()

    def open(self, updates, round_=1):
        """Return what a round is closed on."""
        for _ in range(5):
            try:
                return self.opener.open(round_, NONCE, updates)
            except KeeperAwaitedError:
                self.answer()
        raise AssertionError("no end")


@pytest.fixture
def keeper(tmp_path):
    return Keeper(tmp_path)


def values(at):
    return np.full(D, 0.25 * (at + 1), np.float32)


def updates_of(names, model=lambda _at: 0, round_=1):
    return [update(name, values(at), model=model(at), round_=round_) for at, name in enumerate(names)]


def test_stand_ins_are_the_means_of_cells(keeper):
    """Nothing of a single device is left."""
    opened = keeper.open(updates_of(NAMES[:8], lambda at: at % 2))
    assert [u.device for u in opened.updates] == list(NAMES[:8])
    for u in opened.updates:
        mine = [values(at) for at in range(8) if at % 2 == u.model]
        assert np.allclose(u.vector, np.mean(mine, axis=0), atol=1e-5)
        assert (u.loss, u.samples) == (pytest.approx(np.mean([v[0] for v in mine])), 1)
    assert len({(u.vector.tobytes(), u.loss, u.norm) for u in opened.updates}) == 2
    assert sum(u.correct for u in opened.updates) == 8
    assert sum(u.tested for u in opened.updates) == 16
    assert opened.events == ()


def test_two_in_a_cell_are_not_opened(keeper):
    opened = keeper.open(updates_of(NAMES[:7], lambda at: int(at > 4)))
    assert [u.device for u in opened.updates] == list(NAMES[:5])
    (event,) = opened.events
    assert (event.kind, event.detail["devices"]) == (NOT_OPENED, ["dev-5", "dev-6"])


def test_too_few_ask_nobody(keeper):
    assert keeper.open([update(name, values(0)) for name in NAMES[:2]]).updates == ()
    assert keeper.asked == []


def test_a_restart_asks_the_same(keeper, tmp_path):
    updates = updates_of(NAMES[:5])
    keeper.ask(updates)
    keeper.opener = keeper.make(tmp_path)
    opened = keeper.open([*updates, update(NAMES[5], values(5))])
    assert keeper.asked[0] == keeper.asked[-1]
    assert [u.device for u in opened.updates] == list(NAMES[:5])
    assert opened.events[0].detail["devices"] == ["dev-5"]


def test_false_share_costs_its_device(keeper):
    updates = updates_of(NAMES[:6])
    updates[2] = update(NAMES[2], values(2), figures=Figures(norm=-1.0))
    opened = keeper.open(updates)
    assert [u.device for u in opened.updates] == ["dev-0", "dev-1", "dev-3", "dev-4", "dev-5"]
    assert [event.detail for event in opened.events] == [{"devices": ["dev-2"], "reason": FALSE_SHARE}]


def test_keeper_that_answers_anything(keeper):
    """It names one that is not there, then cells that were never opened, again and again: the round closes without a sum."""
    updates = updates_of(NAMES[:6])
    told = dataclasses.replace(keeper.ask(updates), cells=())
    for changes in ({"false": ("nobody",)}, {"refused": "no", "recent": ((bytes(16),),)}):
        keeper.opener._answers.clear()
        keeper.opener.take(dataclasses.replace(told, **changes), memoryview(b""))
        opened = keeper.opener.open(1, NONCE, updates)
        assert opened.updates == ()
        assert "the keeper refuses" in opened.events[0].detail["reason"]


def test_all_cells_together_fit_a_sum():
    """CFL's control is a sum over several cells."""
    updates = updates_of(NAMES, lambda at: at % 2)
    ids = {name: name.encode() for name in NAMES}
    cells = chosen_cells(updates, ids, [], dataclasses.replace(plan_of(), most_summed=9), NONCE, {})
    assert sum(map(len, cells)) <= 9


def test_wrong_pad_costs_its_cell(keeper):
    updates = updates_of(NAMES[:8], lambda at: int(at > 3))
    updates[1] = update(NAMES[1], values(1), pad=b"w" * 32)
    opened = keeper.open(updates)
    assert [u.device for u in opened.updates] == list(NAMES[4:8])
    assert "above the limit" in opened.events[0].detail["reason"]
    assert opened.events[0].detail["devices"] == list(NAMES[:4])


@pytest.mark.parametrize("restart", [False, True], ids=["same life", "after a restart"])
def test_one_who_is_missing_takes_two_along(keeper, tmp_path, restart):
    keeper.open(updates_of(NAMES))
    if restart:
        keeper.opener = keeper.make(tmp_path)
    opened = keeper.open(updates_of(NAMES[1:], round_=2), 2)
    assert (len(opened.updates), len(opened.events[0].detail["devices"])) == (9, 2)
    assert len(keeper.memory.opened) == 2


def test_refusal_gives_the_round_up(keeper, tmp_path):
    updates = updates_of(NAMES[:5])
    keeper.open(updates)
    keeper.opener = keeper.make(tmp_path)
    keeper.opener._path.unlink()
    opened = keeper.open(updates[:4])
    assert (opened.updates, opened.events[0].detail["devices"]) == ((), list(NAMES[:4]))


def test_other_answers_are_ignored(keeper):
    told = keeper.ask(updates_of(NAMES[:5]))
    keeper.opener._answers.clear()
    keeper.opener.take(dataclasses.replace(told, request=bytes(32)), memoryview(b""))
    assert not keeper.opener.answered


def test_requests_count_as_at_the_keeper(keeper):
    """A set that may not be opened beside the first one may again after ten others."""
    first, other = NAMES[:11], NAMES[:8]
    for round_, names in enumerate((first, *[other] * 10, NAMES), 1):
        opened = keeper.open(updates_of(names, round_=round_), round_)
        assert [u.device for u in opened.updates] == list(names)
    assert keeper.opener._recent == keeper.memory.recent
