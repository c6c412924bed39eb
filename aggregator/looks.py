"""The aggregator's side of looks, in a run with a keeper: has the updates of a cell compared, and learns groups.

`Looks.at` asks the keeper twice (`crypto.sums.looks`): for its masked pads, and with the products for the groups that the plan's
algorithm makes. Which devices are compared, under which number, is durable before the first request leaves, so that a restarted
aggregator asks the same. A look at the same cell in the same round is one look, however often the strategy asks.

Example: CFL finds that the mean of a cluster of 100 devices has become small. It looks at 64 of them, drawn by the round's
nonce; the others are placed in a half later, as devices that were away.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from aggregator.strategies.base import ClientUpdate, Groups
from crypto.seal.envelope import open_from_member, read_expected
from crypto.sums.deals import aggregator_deal
from shoal.digests import sha256
from shoal.errors import UntrustedError
from shoal.limits import MOST_LOOKED
from shoal.membership.grants import OWNER_NAME
from shoal.protocol.cells import Cell, CellSums, Look, LookDeal, OpenCells, deal_head
from shoal.protocol.codec import U16, U32, decode, encode, message
from shoal.protocol.messages import Phase
from shoal.util.files import read_private, write_private

if TYPE_CHECKING:
    from pathlib import Path

    from aggregator.membership import AggregatorMembership
    from crypto.seal.identity import Identity
    from shoal.protocol.documents import RunPlan

LOOKS_FILE: Final = "looks.bin"


@message(172)
@dataclass(frozen=True, slots=True)
class LookAsked:
    """A look of the round: at the updates of which devices, and its number."""

    phase: Phase
    model: U16
    index: U16
    devices: tuple[str, ...]


@message(173)
@dataclass(frozen=True, slots=True)
class LooksAsked:
    """The looks of a round, and the number of the next one."""

    round: U32 = 0
    next: U16 = 0
    asked: tuple[LookAsked, ...] = ()


def open_deal(sealed: bytes, plan: RunPlan, identity: Identity, owner_key: bytes) -> LookDeal:
    """Return the numbers that the owner has dealt to one party for the looks of a run, or of its standing order.

    Raises:
        UntrustedError: the owner has not dealt them to this party, or for another run.
    """
    wanted = deal_head(plan.fleet, OWNER_NAME, identity.name)
    head, at = read_expected(sealed, wanted, f"the owner's numbers for looks of {identity.name}")
    dealt = decode(open_from_member(identity, sealed, head, at, owner_key)[0], LookDeal)
    if dealt.run_id != plan.task_run[1]:
        raise UntrustedError("the owner's numbers for looks are of another run")
    return dealt


def opened_seed(run: RunPlan, deals: Sequence[bytes], membership: AggregatorMembership) -> bytes:
    """Return the seed of the aggregator's numbers, from the first of the owner's deals.

    Raises:
        UntrustedError: the owner has not dealt them for this run and this aggregator.
    """
    if len(deals) != run.looks + 1:
        raise UntrustedError(f"a run of {run.looks} looks with the owner's numbers for {len(deals) - 1}")
    return open_deal(deals[0], run, membership.identity, membership.owner_key).seed


class Looks:
    """The looks of one run.

    Args:
        run: the owner's plan.
        signed: its package, with the plan alone.
        seed: of the aggregator's numbers; deals: sealed, the keeper's for each look.
        directory: of the run.
        ask: returns the keeper's answer to a request, or raises `aggregator.sums.KeeperAwaitedError`.
    """

    def __init__(
        self,
        run: RunPlan,
        *,
        signed: bytes,
        seed: bytes,
        deals: Sequence[bytes],
        directory: Path,
        ask: Callable[[OpenCells], CellSums],
    ) -> None:
        self._run, self._signed, self._seed, self._deals = run, signed, seed, deals
        self._path = directory / LOOKS_FILE
        self._ask = ask
        self._known = decode(read_private(self._path), LooksAsked) if self._path.exists() else LooksAsked()
        self._nonce = b""
        self._found: dict[tuple[Phase, int], Groups] = {}

    def begin(self, round_: int, nonce: bytes) -> None:
        """Begin to close a round, or go on with it."""
        self._nonce = nonce
        if round_ != self._known.round:
            self._known = LooksAsked(round_, self._known.next)
            self._found = {}

    def at(self, given: Sequence[ClientUpdate]) -> Groups:
        """Return the groups of the updates of one cell.

        Raises:
            KeeperAwaitedError: the keeper has to answer first; the same call continues.
        """
        key = given[0].phase, given[0].model
        if key not in self._found:
            self._found[key] = self._looked(key, {u.device: u for u in given})
        return self._found[key]

    def _looked(self, key: tuple[Phase, int], given: dict[str, ClientUpdate]) -> Groups:
        asked = next((one for one in self._known.asked if (one.phase, one.model) == key), None)
        if asked is None:
            drawn = sorted(given, key=lambda device: sha256(self._nonce + device.encode()))[:MOST_LOOKED]
            asked = self._noted(LookAsked(*key, self._known.next, tuple(sorted(drawn))))
        while asked.index < self._run.looks:
            told, groups = self._answers(asked, [given[d] for d in asked.devices if d in given])
            if groups is not None:
                return groups
            left = tuple(d for d in asked.devices if d in given and d not in told.false)
            index = max(told.used, self._known.next)
            if told.refused and index == asked.index:
                break
            asked = self._noted(dataclasses.replace(asked, index=index, devices=left))
        return Groups((), used=self._known.next)

    def _answers(self, asked: LookAsked, given: Sequence[ClientUpdate]) -> tuple[CellSums, Groups | None]:
        """Return the last answer to the requests of a look, and the groups; None if it has no answer."""
        words = np.stack([np.frombuffer(u.sketch, "<u4") for u in given])
        deal = aggregator_deal(self._seed, asked.index)
        masked = deal.masked(words).astype("<u4", copy=False).tobytes()
        look = Look(asked.index, self._deals[asked.index], masked)
        request = OpenCells(
            run_id=self._run.run_id,
            round=self._known.round,
            nonce=self._nonce,
            plan=self._signed,
            cells=(Cell(asked.phase, asked.model, True, tuple(u.share for u in given)),),
            look=look,
        )
        told = self._ask(request)
        if told.refused or told.false:
            return told, None
        if asked.index >= self._known.next:
            self._noted(asked, after=asked.index + 1)
        pads = np.frombuffer(told.masked, "<u4").reshape(words.shape)
        product = deal.product(words, pads).astype("<u4", copy=False).tobytes()
        told = self._ask(dataclasses.replace(request, look=dataclasses.replace(look, product=product)))
        if told.refused:
            return told, None
        return told, Groups(tuple(u.device for u in given), told.partitions, told.used, told.false)

    def _noted(self, asked: LookAsked, after: int | None = None) -> LookAsked:
        """Make a look durable, in place of an earlier attempt at the same cell."""
        others = (one for one in self._known.asked if (one.phase, one.model) != (asked.phase, asked.model))
        following = self._known.next if after is None else after
        self._known = LooksAsked(self._known.round, following, (*others, asked))
        write_private(self._path, encode(self._known))
        return asked
