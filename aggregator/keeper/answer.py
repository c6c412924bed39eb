"""The keeper's answer to one request: see `shoal.protocol.sums` for the rules.

Everything but the pads is a function of the arguments. A request that was answered is answered again with the same bytes, since
it has the shares in it.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median, mode
from typing import TYPE_CHECKING, Final

import numpy as np

from aggregator.numerics.robust import winsorised
from crypto.seal.envelope import open_from_member, read_head
from crypto.sums.codes import CHECKS, added, check_pads
from crypto.sums.ring import Words, add_pad
from shoal import limits
from shoal.digests import sha256
from shoal.errors import ShoalError, UntrustedError
from shoal.protocol.cells import REMEMBERED, Cell, CellFigures, CellSums, OpenCells, allowed, device_id
from shoal.protocol.codec import decode, encode
from shoal.protocol.messages import FULL_PERCENT
from shoal.protocol.sums import Figures, KeeperShare, share_head

if TYPE_CHECKING:
    from aggregator.keeper.memory import KeeperMemory
    from crypto.seal.identity import Identity
    from shoal.protocol.documents import Member, Roster, RunPlan


NAMED_TWICE: Final = "a device is named twice"


@dataclass(frozen=True, slots=True)
class Answer:
    """What a request gets.

    Attributes:
        message: the answer.
        memory: to be durable before the answer leaves.
        seeds: of the pads of each cell whose devices have updates; length: their coordinates.
    """

    message: CellSums
    memory: KeeperMemory
    seeds: tuple[tuple[bytes, ...], ...] = dataclasses.field(default=(), repr=False)
    length: int = 0

    def pads(self) -> Iterator[Words]:
        """Yield the sum of the pads of each cell, (d,) uint32."""
        for cell in self.seeds:
            total = np.zeros(self.length, np.uint32)
            for seed in cell:
                add_pad(total, seed)
            yield total


def answered(
    request: OpenCells,
    plan: RunPlan,
    *,
    roster: Roster,
    identity: Identity,
    memory: KeeperMemory,
    owner_key: bytes = b"",
) -> Answer:
    """Return the answer to a request of the aggregator.

    Args:
        request: whose signature has been checked.
        plan: the one in the request, whose signature has been checked.
        roster: the owner's newest.
        identity: the keeper's.
        memory: what it has opened.
        owner_key: has signed the numbers for looks.

    Raises:
        UntrustedError: the request is of another run than its plan, or the plan names another keeper: it gets no answer.
    """
    if plan.keeper != identity.member or request.run_id != plan.run_id:
        raise UntrustedError(f"a request for run {plan.run}, which has another keeper")
    digest = sha256(encode(request))
    told = CellSums(run_id=plan.run_id, round=request.round, request=digest)
    opened, false = _open_shares(request, plan, roster, identity)
    if false:
        return Answer(dataclasses.replace(told, false=tuple(false)), memory)
    cells = [frozenset(device_id(member) for member, _ in cell) for cell in opened]
    if request.look is not None:
        if len(cells) > 1 or len(cells[0]) < len(opened[0]):
            reason = "a look at several cells" if len(cells) > 1 else NAMED_TWICE
            return Answer(dataclasses.replace(told, refused=reason), memory)
        from aggregator.keeper.looks import looked  # only looks pay for the strategies and what they load

        return Answer(
            *looked(request, plan, opened[0], told=told, memory=memory, identity=identity, owner_key=owner_key)
        )
    reason = _refusal(request, plan, cells, digest, memory)
    if reason:
        recent = tuple(tuple(tuple(sorted(c)) for c in before) for before in memory.recent)
        return Answer(dataclasses.replace(told, refused=reason, recent=recent), memory)
    figures = [figures_of([share.figures for _, share in cell]) for cell in opened]
    checks = CHECKS * len(plan.segments)
    told = dataclasses.replace(
        told,
        cells=tuple(
            dataclasses.replace(each, pads=added(check_pads(share.pad, checks) for _, share in cell))
            if asked.trains
            else each
            for each, cell, asked in zip(figures, opened, request.cells, strict=True)
        ),
    )
    trained = [cell for cell, asked in zip(opened, request.cells, strict=True) if asked.trains]
    seeds = tuple(tuple(share.pad for _, share in cell) for cell in trained)
    return Answer(told, memory.opening(plan, request.round, digest, cells), seeds, plan.length)


def _refusal(
    request: OpenCells, plan: RunPlan, cells: Sequence[frozenset[bytes]], digest: bytes, memory: KeeperMemory
) -> str:
    """Return which rule a request breaks; empty if none."""
    before = memory.of_run(plan.run)
    if before is not None and before.request == digest:
        return ""
    if before is not None and request.round <= before.round:
        return f"round {before.round} was opened before, with other cells"
    if memory.opened and plan.run < memory.opened[-1].run:
        return f"run {memory.opened[-1].run} has begun since"
    least = max(limits.LEAST_CELL, plan.recipe.min_contributors)
    if any(len(cell) < least for cell in cells):
        return f"a cell of {min(map(len, cells))} devices, and {least} are needed"
    if len(frozenset().union(*cells)) < sum(len(cell.shares) for cell in request.cells):
        return NAMED_TWICE
    if not allowed(cells, memory.recent):
        return f"the cells differ too little from those of the last {REMEMBERED} openings"
    return ""


def _open_shares(
    request: OpenCells, plan: RunPlan, roster: Roster, identity: Identity
) -> tuple[list[list[tuple[Member, KeeperShare]]], list[str]]:
    """Return the shares of each cell with their devices, and the devices whose share is false."""
    found: list[list[tuple[Member, KeeperShare]]] = []
    false: list[str] = []
    for cell in request.cells:
        shares = []
        for sealed in cell.shares:
            try:
                shares.append(_share(sealed, cell, request, plan, roster, identity))
            except ShoalError:
                false.append(_sender(sealed))
        # All of a cell were asked for as many margins, in the same unit.
        told = [(len(share.figures.margins), share.unit) for _, share in shares]
        usual, longest = mode(told) if told else None, longest_norm([share.figures.norm for _, share in shares])
        for (member, share), own in zip(shares, told, strict=True):
            if own != usual or share.figures.norm > longest:
                false.append(member.name)
        found.append(shares)
    return found, false


def _sender(sealed: bytes) -> str:
    """Return the name in the head of a share; empty if it has none."""
    try:
        return read_head(sealed)[0].sender
    except ShoalError:
        return ""


def _share(
    sealed: bytes, cell: Cell, request: OpenCells, plan: RunPlan, roster: Roster, identity: Identity
) -> tuple[Member, KeeperShare]:
    head, at = read_head(sealed)
    member = roster.device(head.sender)
    if member is None or head != share_head(plan.fleet, head.sender, identity.name):
        raise UntrustedError(f"a share of {head.sender[:64]!r}")
    message, body = open_from_member(identity, sealed, head, at, member.sign_key)
    share = decode(message, KeeperShare)
    told = (share.fleet, share.run_id, share.round, share.nonce, share.phase, share.model, share.device)
    asked = (plan.fleet, plan.run_id, request.round, request.nonce, cell.phase, cell.model, member.name)
    if told != asked or share.recipient != identity.member.seal_key or len(body):
        raise UntrustedError(f"a share of {member.name} for another round or keeper")
    figures = share.figures
    if share.length not in (0, plan.length) or share.length != (plan.length if cell.trains else 0):
        raise UntrustedError(f"a share of {member.name} for {share.length} coordinates")
    margins = all(abs(margin) <= limits.MAX_MARGIN for margin in figures.margins)
    counts = figures.correct <= figures.tested <= FULL_PERCENT
    if not (abs(figures.loss) <= limits.MAX_FIGURE and 0 <= figures.norm <= limits.MAX_FIGURE and margins and counts):
        raise UntrustedError(f"figures of {member.name} that can't be")
    return member, share


def longest_norm(norms: Sequence[float]) -> float:
    """Return the largest norm of an update in a cell whose devices report these: ten times the median, unless that is 0."""
    return limits.NORM_LIMIT_RATIO * median(norms or [0.0]) or math.inf


def figures_of(figures: Sequence[Figures]) -> CellFigures:
    """Return the figures of a cell from those of its devices."""
    norms = np.array([f.norm for f in figures])
    return CellFigures(
        count=len(figures),
        loss=float(winsorised(np.array([f.loss for f in figures])).mean()),
        correct=sum(f.correct for f in figures),
        tested=sum(f.tested for f in figures),
        norm=float(norms.mean()),
        longest=float(winsorised(norms).max()),
        margins=tuple(tuple(sorted(place)) for place in zip(*(f.margins for f in figures), strict=True)),
    )
