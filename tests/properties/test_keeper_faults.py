"""Aggregator and keeper under faults: crashes before and after each write of either, lost and repeated messages, late uploads.

Whatever happens, every sum that is opened is the integer sum of its devices' updates, the keeper answers one request a round and
one a look, and every round ends.
"""

from __future__ import annotations

import dataclasses
import random
from unittest import mock

import numpy as np
import pytest

import aggregator.looks
import aggregator.sums
from aggregator.keeper.answer import answered
from aggregator.keeper.memory import KeeperMemory
from aggregator.sums import CellOpener, KeeperAwaitedError
from crypto.seal.envelope import read_head
from crypto.sums.codes import code, hidden_codes, matches
from crypto.sums.looks import hidden_sketch
from crypto.sums.ring import hidden, unit_of
from shoal.digests import sha256
from shoal.protocol.cells import OpenCells
from shoal.protocol.codec import decode, encode
from shoal.protocol.sums import Figures
from tests.helpers.cases import with_long
from tests.helpers.keepers import (
    LOOKS,
    MOST,
    NAMES,
    NONCE,
    deals_of,
    identity,
    look_plan,
    roster_of,
    seed_of,
    share,
)
from tests.helpers.plans import D, contribution

ROUNDS, CRASH, LOSS = 4, 0.15, 0.2
TRIALS_EACH, FORGETFUL = 20, 4
CODE_KEY = b"c" * 32


class CrashError(Exception):
    """A party was killed."""


class Opener(CellOpener):
    """Compares each sum that it opens with that of the trial."""

    trial = None

    def _opened(self, round_, updates, request, told, body):
        found = super()._opened(round_, updates, request, told, body)
        for cell, opened in zip(request.cells, found.sums, strict=True):
            names = [read_head(sealed)[0].sender for sealed in cell.shares]
            exact = sum((self.trial.whole[round_, name] for name in names), np.zeros(D, np.uint32))
            assert (opened.words == exact).all()
            assert opened.count == len(names) >= 3
            assert matches(exact.view(np.int32), CODE_KEY, {cell.model: len(names)}, opened.codes)
            self.trial.sums += 1
        return found


class Trial:
    def __init__(self, seed, directory):
        self.rng, self.directory = random.Random(seed), directory
        self.plan = look_plan()
        self.whole, self.sums, self.lost, self.opened, self.looked = {}, 0, 0, {}, {}
        KeeperMemory().save(directory)
        self.restart()

    def strikes(self, chance):
        return self.rng.random() < chance

    def crashing(self, write):
        def struck(*arguments):
            if self.strikes(CRASH / 2):
                raise CrashError
            write(*arguments)
            if self.strikes(CRASH / 2):
                raise CrashError

        return struck

    def restart(self):
        """Start the aggregator again, with what is on its disk."""
        self.asked = []
        self.opener = Opener(self.plan, b"plan", self.directory, roster_of, self.asked.append)
        self.opener.trial = self
        membership = mock.Mock(identity=identity("aggregator"), owner_key=identity("owner").member.sign_key)
        self.look = self.opener.look_with(deals_of(self.plan), membership)

    def update(self, name, round_):
        rng = np.random.default_rng([round_, NAMES.index(name)])
        values = rng.normal(size=D).astype(np.float32)
        unit = unit_of(self.plan.recipe.norm_limit, D, MOST)
        self.whole[round_, name] = hidden(values, unit, MOST, ())
        made = dataclasses.replace(contribution(name, values), round=round_, loss=0.0, samples=0)
        codes = code(self.whole[round_, name].view(np.int32), CODE_KEY, {made.model: 1})
        words = hidden(values, unit, MOST, [seed_of(name)])
        sealed = share(name, round_=round_, figures=Figures(norm=float(np.linalg.norm(values))))
        sketch = hidden_sketch(values, seed_of(name)).astype("<u4").tobytes()
        checks = hidden_codes(codes, seed_of(name))
        return dataclasses.replace(made, vector=words.view(np.float32), share=sealed, sketch=sketch, checks=checks)

    def keeper(self, data):
        """Answer a request as a keeper whose memory is on the disk; what it answers stays so."""
        request, memory = decode(data, OpenCells), KeeperMemory.load(self.directory)
        key = identity("owner").member.sign_key
        found = answered(
            request, self.plan, roster=roster_of(), identity=identity("keeper"), memory=memory, owner_key=key
        )
        if found.memory is not memory:
            self.crashing(lambda: found.memory.save(self.directory))()
        told, digest = found.message, sha256(encode(request))
        if told.cells:
            assert self.opened.setdefault(request.round, digest) == digest
        if told.partitions:
            assert self.looked.setdefault(request.look.index, digest) == digest
        return told, memoryview(b"".join(pads.astype("<u4").tobytes() for pads in found.pads()))

    def close(self, round_):
        """Close a round, whatever happens meanwhile."""
        names = self.rng.sample(NAMES, self.rng.randint(3, len(NAMES)))
        updates = [self.update(name, round_) for name in sorted(names)]
        for _ in range(400):
            try:
                opened = self.opener.open(round_, NONCE, updates)
                if len(opened.updates) >= 6:
                    self.look(opened.updates)
                self.lost += not opened.updates
                return
            except KeeperAwaitedError:
                self.deliver()
            except CrashError:
                self.restart()
                absent = [n for n in NAMES if n not in {u.device for u in updates}]
                if absent and self.strikes(0.5):
                    updates = sorted([*updates, self.update(absent[0], round_)], key=lambda u: u.device)
        raise AssertionError("the round does not end")

    def deliver(self):
        """Let the keeper answer, unless the request or the answer is lost; an older request may come again."""
        requests = [self.asked[-1]] if not self.strikes(LOSS) else []
        if self.strikes(LOSS):
            requests.append(self.rng.choice(self.asked))
        for data in requests:
            try:
                told, body = self.keeper(data)
            except CrashError:
                continue
            if not self.strikes(LOSS):
                self.opener.take(told, body)

    def run(self):
        writes = {module: self.crashing(module.write_private) for module in (aggregator.sums, aggregator.looks)}
        with (
            mock.patch.object(aggregator.sums, "write_private", writes[aggregator.sums]),
            mock.patch.object(aggregator.looks, "write_private", writes[aggregator.looks]),
        ):
            for round_ in range(1, ROUNDS + 1):
                self.close(round_)
        assert len(self.looked) <= LOOKS


def trials(folder, numbers):
    """Return the trials of some numbers, which have run."""
    found = []
    for number in numbers:
        place = folder / str(number)
        place.mkdir(parents=True)
        found.append(Trial(number, place))
        found[-1].run()
    return found


@pytest.mark.parametrize("block", with_long(range(50), 0, 1))
def test_every_sum_is_exact(tmp_path, block):
    done = trials(tmp_path, range(block * TRIALS_EACH, (block + 1) * TRIALS_EACH))
    assert sum(trial.sums for trial in done) > TRIALS_EACH
    assert sum(len(trial.looked) for trial in done) > TRIALS_EACH / 2


def test_trials_have_teeth(tmp_path):
    """An aggregator that forgets what it asked asks for another partition, and loses the round."""
    with mock.patch.object(Opener, "_kept", return_value=None):
        lost = sum(trial.lost for trial in trials(tmp_path / "forgetful", range(FORGETFUL)))
    assert lost > sum(trial.lost for trial in trials(tmp_path / "kept", range(FORGETFUL)))
