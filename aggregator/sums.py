"""The aggregator's side of a run with a keeper: closes a round on the sums that the keeper opens.

`CellOpener.open` divides a round's updates into cells, one a model, and asks the keeper for the sum of the pads of each. The sum
of the updates follows, and each update is replaced by a *stand-in*: the mean of its cell, with the mean figures of its cell. A
strategy that makes means over whole cells gets the same means as from the updates, and needs no change; what else it makes of
stand-ins says nothing about one device.

The request is durable before it leaves. After a restart the same one is asked again, whatever uploads have come meanwhile: the
keeper opens one partition a round.

Example: in round 4 of IFCA seven devices chose model 0 and two chose model 1. The seven are opened, and the two are left out,
since a cell has at least three devices.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Final

import numpy as np

from aggregator.looks import Looks, opened_seed
from aggregator.numerics.rows import read_once
from aggregator.rounds.closing import OpenedCells
from aggregator.rounds.summed import OpenedSum
from aggregator.shards.calculation import ShardsUnavailableError
from aggregator.strategies.base import ClientUpdate, Event, LookAt, Parts
from crypto.seal.envelope import read_head
from crypto.sums.codes import added, opened_codes
from crypto.sums.ring import WORD_BYTES, Words, extended, mean_of, step_in
from shoal import limits
from shoal.digests import sha256
from shoal.errors import IntegrityError
from shoal.protocol.cells import REMEMBERED, Cell, CellFigures, CellSums, OpenCells, device_id, fitted
from shoal.protocol.codec import decode, encode
from shoal.protocol.sums import MOST_CELLS
from shoal.util.files import read_private, write_private

if TYPE_CHECKING:
    from aggregator.membership import AggregatorMembership
    from shoal.protocol.documents import Roster, RunPlan
    from shoal.types import Float32Vector

REQUEST_FILE: Final = "cells.bin"
NOT_OPENED: Final = "not-opened"
"""Kind of the event that names devices whose updates are in no sum of the round."""

FALSE_SHARE: Final = "its share for the keeper is false, or its update over ten times as long as others"
NORM_SLACK: Final = 1e-4
"""By how much norms that devices report are rounded."""
SUSPECTED: Final = "left out, since one of these or of others spoils sums"
HIDING: Final = "left out, so that neither a sum nor a difference of sums is of fewer than three devices"


class KeeperAwaitedError(ShardsUnavailableError):
    """The keeper was asked, and has not answered yet."""


class CellOpener:
    """Opens the sums of one run.

    Args:
        run: the owner's plan, which names the keeper; signed: its package, with the plan alone.
        directory: of the run.
        roster: returns the owner's newest.
        ask: sends an encoded request to the keeper; any thread may call it.

    Attributes:
        given_up: whether rounds close without the keeper, and so without an update: the owner has stopped the run at once.
    """

    def __init__(
        self, run: RunPlan, signed: bytes, directory: Path, roster: Callable[[], Roster], ask: Callable[[bytes], None]
    ) -> None:
        self._run, self._signed = run, signed
        self._path = directory / REQUEST_FILE
        self._roster = roster
        self._ask = ask
        self.given_up = False
        self._asked = b""
        self._round = 0
        self._answers: dict[bytes, tuple[CellSums, memoryview]] = {}
        self.looks: Looks | None = None
        self._recent: list[list[frozenset[bytes]]] = []
        self._unit = 0.0

    @property
    def answered(self) -> bool:
        """Whether the keeper has answered the last request."""
        return self._asked in self._answers

    def take(self, told: CellSums, body: memoryview) -> None:
        """Take an answer of the keeper; an answer to an earlier request is ignored."""
        if told.request == self._asked:
            self._answers[told.request] = told, body

    def look_with(self, deals: Sequence[bytes], membership: AggregatorMembership) -> LookAt:
        """Return what looks at updates of the run, with the owner's ``deals`` (`shoal.protocol.documents.RunPackage`).

        Raises:
            UntrustedError: the owner has not dealt them for this aggregator.
        """
        self.looks = Looks(
            self._run,
            signed=self._signed,
            seed=opened_seed(self._run, deals, membership),
            deals=deals[1:],
            directory=self._path.parent,
            ask=lambda request: self._answer_to(request)[0],
        )
        return self.looks.at

    def open(
        self,
        round_: int,
        nonce: bytes,
        updates: Sequence[ClientUpdate],
        cells: Parts = lambda _given: {},
        left_out: Collection[str] = (),
        unit: float = 0.0,
    ) -> OpenedCells:
        """Return the stand-ins for a round's updates.

        Args:
            round_: the round.
            nonce: the round's.
            updates: of the round, in order of their devices.
            cells: returns the parts in which updates of one model are opened, by device; none opens each model as one.
            left_out: devices of which one spoils sums, see `aggregator.rounds.suspects`.
            unit: announced for the round.

        Raises:
            KeeperAwaitedError: the keeper has to answer first; it has been asked, and the same call continues.
        """
        if self.given_up:
            return OpenedCells((), (not_opened(round_, updates, "the owner has stopped the run without the keeper"),))
        if round_ != self._round:
            self._round, self._answers = round_, {}
        if self.looks is not None:
            self.looks.begin(round_, nonce)
        false = {name for told, _ in self._answers.values() if not told.partitions for name in told.false}
        aside = [
            not_opened(round_, [u for u in updates if u.device in names], reason)
            for names, reason in ((false, FALSE_SHARE), (set(left_out) - false, SUSPECTED))
        ]
        updates = [update for update in updates if update.device not in {*left_out, *false}]
        self._unit = unit
        found = self._closed(round_, nonce, updates, cells(updates))
        told_of = [event for event in (*found.events, *aside) if event.detail["devices"]]
        return dataclasses.replace(found, events=tuple(told_of))

    def _closed(
        self, round_: int, nonce: bytes, updates: Sequence[ClientUpdate], parts: Mapping[str, int]
    ) -> OpenedCells:
        """Return the stand-ins of updates, once the keeper has answered."""
        request = self._kept(round_)
        if request is None:
            request = self._request(round_, nonce, updates, parts)
        asked = [request]
        while request is not None:
            told, body = self._answer_to(request)
            if told.cells:
                return self._opened(round_, updates, request, told, body)
            self._recent = [[frozenset(cell) for cell in cells] for cells in told.recent] or self._recent
            request = self._request(round_, nonce, updates, parts)
            if request in asked:
                reason = f"the keeper refuses: {told.refused or 'it names no device'}"
                return OpenedCells((), (not_opened(round_, updates, reason),))
            asked.append(request)
        return OpenedCells((), (not_opened(round_, updates, HIDING),))

    def _kept(self, round_: int) -> OpenCells | None:
        """Return the durable request of a round, None without one."""
        if not self._path.exists():
            return None
        request = decode(read_private(self._path), OpenCells)
        return request if (request.run_id, request.round) == (self._run.run_id, round_) else None

    def _request(
        self, round_: int, nonce: bytes, updates: Sequence[ClientUpdate], parts: Mapping[str, int]
    ) -> OpenCells | None:
        """Make a request and store it; None if no cell can be opened."""
        members = {u.device: self._roster().device(u.device) for u in updates}
        ids = {device: device_id(member) for device, member in members.items() if member is not None}
        known = [u for u in updates if u.device in ids]
        cells = tuple(
            Cell(given[0].phase, given[0].model, given[0].vector is not None, tuple(u.share for u in given))
            for given in chosen_cells(known, ids, self._recent, self._run, nonce, parts)
        )
        if not cells:
            return None
        request = OpenCells(run_id=self._run.run_id, round=round_, nonce=nonce, plan=self._signed, cells=cells)
        write_private(self._path, encode(request))
        return request

    def _answer_to(self, request: OpenCells) -> tuple[CellSums, memoryview]:
        encoded = encode(request)
        digest = sha256(encoded)
        if digest not in self._answers:
            self._asked = digest
            self._ask(encoded)
            raise KeeperAwaitedError(f"the keeper {self._keeper} has not answered")
        return self._answers[digest]

    @property
    def _keeper(self) -> str:
        return "" if self._run.keeper is None else self._run.keeper.name

    def _opened(
        self, round_: int, updates: Sequence[ClientUpdate], request: OpenCells, told: CellSums, body: memoryview
    ) -> OpenedCells:
        by_name = {update.device: update for update in updates}
        stand_ins: dict[str, ClientUpdate] = {}
        events = []
        cells, sums, start = [], list[OpenedSum](), 0
        opened, spoilt = (defaultdict[int, tuple[str, ...]](tuple) for _ in range(2))
        for cell, figures in zip(request.cells, told.cells, strict=True):
            names = [read_head(share)[0].sender for share in cell.shares]
            given = [by_name[name] for name in names]
            roster = self._roster()
            cells.append(frozenset(device_id(m) for m in map(roster.device, names) if m is not None))
            mean: Float32Vector | None = None
            if cell.trains:
                pads = np.frombuffer(body, "<u4", self._run.length, start)
                start += WORD_BYTES * self._run.length
                try:
                    total, mean = self._sum(given, pads, figures)
                except IntegrityError as error:
                    events.append(not_opened(round_, given, str(error)))
                    spoilt[cell.model] += tuple(names)
                    continue
                opened[cell.model] += tuple(names)
                codes = opened_codes(added(update.checks for update in given), figures.pads)
                sums.append(OpenedSum(cell.model, len(given), total, mean, codes, unit=self._unit))
            stand_ins |= {update.device: stand_in(update, mean, figures, at) for at, update in enumerate(given)}
        self._recent = [*self._recent, cells][-REMEMBERED:]
        left = [update for update in updates if update.device not in stand_ins]
        told_of = {name for event in events for name in event.detail["devices"]}
        silent = [update for update in left if update.device not in told_of]
        if silent:
            events.append(not_opened(round_, silent, HIDING))
        used = tuple(stand_ins[u.device] for u in updates if u.device in stand_ins)
        return OpenedCells(used, tuple(events), tuple(sums), dict(opened), dict(spoilt))

    def _sum(self, given: Sequence[ClientUpdate], pads: Words, figures: CellFigures) -> tuple[Words, Float32Vector]:
        """Return the sum of a cell's updates as fixed-point numbers, and their mean.

        Raises:
            IntegrityError: it is longer than those that the devices report allow.
        """
        total = np.zeros(self._run.length, np.uint32)
        for row in read_once([update.row for update in given]):
            total += row.view(np.uint32)
        total -= pads
        if self._unit:
            total = extended(total)
        unit = step_in(self._run, self._unit)
        return total, mean_of(total, len(given), unit, mean_limit(self._run, figures.norm, unit))


def chosen_cells(
    updates: Iterable[ClientUpdate],
    ids: Mapping[str, bytes],
    recent: Sequence[Sequence[frozenset[bytes]]],
    run: RunPlan,
    nonce: bytes,
    parts: Mapping[str, int],
) -> list[list[ClientUpdate]]:
    """Return the updates of each cell of a round that may be opened, in order of their devices.

    Args:
        updates: of the round.
        ids: device -> what stands for it in ``recent``.
        recent: the cells of each of the last openings, the newest last.
        run: the owner's plan.
        nonce: the round's, by which devices are drawn that are left out.
        parts: see `CellOpener.open`.
    """
    groups = defaultdict[tuple[int, int, bool, int], dict[bytes, ClientUpdate]](dict)
    for update in sorted(updates, key=lambda u: sha256(nonce + ids[u.device]))[: run.most_summed]:
        key = update.phase, update.model, update.vector is not None, parts.get(update.device, -1)
        groups[key][ids[update.device]] = update
    least = max(limits.LEAST_CELL, run.recipe.min_contributors)
    keys = sorted((k for k, cell in groups.items() if len(cell) >= least), key=lambda k: (-len(groups[k]), k))
    wanted = [frozenset(groups[k]) for k in keys[:MOST_CELLS]]
    cells = fitted(wanted, recent, least, order=lambda device: sha256(nonce + device))
    found = ([groups[k][device] for device in cell] for k, cell in zip(keys, cells, strict=False) if cell)
    return [sorted(given, key=lambda u: u.device) for given in found]


def mean_limit(run: RunPlan, norm: float, unit: float) -> float:
    """Return the largest norm of a cell's mean in steps of ``unit``, ``norm`` being the mean of those that its devices report."""
    return min(run.recipe.norm_limit, norm + NORM_SLACK + unit * math.sqrt(run.length))


def stand_in(update: ClientUpdate, mean: Float32Vector | None, figures: CellFigures, place: int) -> ClientUpdate:
    """Return an update with the mean and the figures of its cell in place of its own.

    The counts and the margins of a cell are divided among its devices by their ``place``.
    """

    def part(total: int) -> int:
        return total * (place + 1) // figures.count - total * place // figures.count

    return dataclasses.replace(
        update,
        vector=mean,
        norm=0.0 if mean is None else figures.longest,
        loss=figures.loss,
        samples=1,
        tested=part(figures.tested),
        correct=part(figures.correct),
        margins=tuple(margins[place] for margins in figures.margins),
        summed=True,
    )


def not_opened(round_: int, updates: Iterable[ClientUpdate], reason: str) -> Event:
    """Return the event about updates that are in no sum of a round."""
    return Event(round_, NOT_OPENED, {"devices": sorted(u.device for u in updates), "reason": reason})
