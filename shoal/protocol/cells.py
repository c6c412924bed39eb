"""Messages between aggregator and keeper, and the keeper's rules about what may be opened; see `shoal.protocol.sums`.

Rules (`allowed`, and `aggregator.keeper.answer`), against an aggregator that chooses cells as it likes:

- One partition a round: the first request decides, and only the same request is answered again.
- A cell has at least three devices and at least the plan's ``min_contributors``. Cells have no device in common.
- A *look* (`Look`) compares the updates of one cell and opens nothing: the keeper learns their cosines (`crypto.sums.looks`), and
  the aggregator the groups that the plan's algorithm makes of them. The plan says how many looks a run, or all runs of a standing
  order together, may have; each has numbers that the owner has dealt for it alone.
- What one request opens can be added up, so each *union* of its cells counts. It differs from each union of every one of the
  last `REMEMBERED` requests, of this run or an earlier one, by no device or by at least `LEAST_CHANGE`. Otherwise the difference
  of two sums would be nearly the update of the one device that left or came.

Example: a device is missing in the second round, so two more are left out.

    >>> first = [frozenset("abcdef")]
    >>> allowed([frozenset("abcde")], [first]), allowed([frozenset("abc")], [first])
    (False, True)
    >>> [sorted(cell) for cell in fitted([frozenset("abcde")], [first], 3, order=ord)]
    [['c', 'd', 'e']]
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any, Final, TypeVar

from shoal.digests import sha256
from shoal.errors import WireError
from shoal.protocol.codec import U16, U32, ArrayU32, Fixed16, Fixed32, message
from shoal.protocol.documents import Member
from shoal.protocol.messages import Phase, Sealed
from shoal.protocol.sums import MOST_CELLS

LEAST_CHANGE: Final = 3
"""Fewest devices by which two opened sets may differ, if they differ at all."""


ID_BYTES: Final = 16


REMEMBERED: Final = 10
"""Requests with which a new one is compared."""


D = TypeVar("D", bound=Hashable)


@message(162)
@dataclass(frozen=True, slots=True)
class Cell:
    """The devices whose updates are added up, by their sealed shares.

    Attributes:
        phase, model: of their uploads.
        trains: whether these have updates; without, only figures are added up.
    """

    phase: Phase
    model: U16
    trains: bool
    shares: tuple[bytes, ...]


@message(166)
@dataclass(frozen=True, slots=True)
class Look:
    """What the aggregator hands over to have the updates of a cell compared, see `crypto.sums.looks`.

    Attributes:
        index: of the run's looks, from 0.
        deal: the owner's `LookDeal` for the keeper, sealed.
        masked: A - U, n rows of `limits.SKETCH_WORDS` numbers of 4 bytes.
        product: M, n rows of 4 n bytes; empty in the first of two requests, which asks for P - T.
    """

    index: U16
    deal: bytes
    masked: bytes
    product: bytes = b""


@message(167)
@dataclass(frozen=True, slots=True, kw_only=True)
class LookDeal:
    """The owner's random numbers for one look, or the aggregator's for all looks of a run.

    Attributes:
        run_id: of the run, or of the first run of a standing order.
        index: of the look.
        seed: of one side's numbers.
        share: Z', `MOST_LOOKED` rows of as many words; empty for the aggregator.
    """

    run_id: Fixed16
    index: U16
    seed: Fixed32
    share: bytes = b""

    def __repr__(self) -> str:
        return f"LookDeal({self.index}, <redacted>)"


@message(170)
@dataclass(frozen=True, slots=True)
class Partition:
    """Groups of the devices of a look.

    Attributes:
        labels: a byte a device, in the order of the cell.
        gap: whether each cosine within a group is above each across.
    """

    labels: bytes
    gap: bool = False


@message(163)
@dataclass(frozen=True, slots=True, kw_only=True)
class OpenCells:
    """The aggregator's request at the close of a round.

    Attributes:
        nonce: the announcement's, which each share repeats.
        plan: an encoded `RunPackage` with the signed plan alone.
        look: what it takes to compare the updates of the only cell; None opens the cells.
    """

    run_id: Fixed16
    round: U32
    nonce: Fixed16
    plan: bytes
    cells: tuple[Cell, ...]
    look: Look | None = None

    def __post_init__(self) -> None:
        if not 1 <= len(self.cells) <= MOST_CELLS:
            raise WireError(f"a request with {len(self.cells)} cells")


@message(164)
@dataclass(frozen=True, slots=True, kw_only=True)
class CellFigures:
    """The figures of a cell's devices: means, sums and quantiles.

    Attributes:
        count: devices.
        margins: of each place of `Upload.margins`, those of all devices in ascending order, so that none has a name; empty if any
            device reports none.
        loss: mean of the losses; of five or more, the smallest and the largest count as their neighbours.
        correct, tested: sums.
        norm: mean; longest: the largest, or of five or more the second largest.
        pads: the sum of the pads on the devices' codes (`crypto.sums.codes`); empty in a cell without updates.
    """

    count: U32
    loss: float
    correct: U32
    tested: U32
    norm: float
    longest: float
    margins: tuple[tuple[float, ...], ...] = ()
    pads: ArrayU32 = ()


@message(165)
@dataclass(frozen=True, slots=True, kw_only=True)
class CellSums:
    """The keeper's answer; the sum of the pads of each cell with updates follows, 4 d bytes each, in the cells' order.

    Attributes:
        request: SHA-256 of the encoded request.
        cells: figures of each cell; empty if nothing is opened.
        false: devices whose share is false, whose figures can't be, or whose norm is above ten times the median of their cell.
            Nothing is opened: the aggregator asks again without them.
        refused: the rule that the request breaks; empty if none.
        recent: with a refusal, the cells of the last requests that were answered, the newest last: devices by a digest of their
            keys (`device_id`).
        masked: P - T, to the first request of a look.
        partitions: to the second one, the groups that the algorithm makes of the cosines, the preferred ones first; ``false``
            then names devices whose sketch is none; they count as unlike all others.
        used: looks that the run has used, with every answer to one.
    """

    run_id: Fixed16
    round: U32
    request: Fixed32
    cells: tuple[CellFigures, ...] = ()
    false: tuple[str, ...] = ()
    refused: str = ""
    recent: tuple[tuple[tuple[Fixed16, ...], ...], ...] = ()
    masked: bytes = b""
    partitions: tuple[Partition, ...] = ()
    used: U16 = 0


def deal_head(fleet: str, owner: str, recipient: str) -> Sealed:
    """Return the head of the envelope of the owner's numbers for looks."""
    return Sealed(fleet, "look", owner, recipient)


def device_id(member: Member) -> bytes:
    """Return what stands for a device in a keeper's memory: a digest of its key, so that new keys are another device."""
    return sha256(member.sign_key)[:ID_BYTES]


def allowed(cells: Sequence[frozenset[D]], recent: Sequence[Sequence[frozenset[D]]]) -> bool:
    """Return whether the unions of ``cells`` differ enough from those of each recent request.

    Args:
        cells: devices of each cell of one request.
        recent: the cells of each of the last requests.
    """
    return not any(_close(cells, before) for before in recent)


def _close(new: Sequence[frozenset[D]], old: Sequence[frozenset[D]]) -> bool:
    """Return whether a union of ``new`` differs from one of ``old`` by one or two devices.

    |A ^ B| of unions A and B is the sum of their cells' sizes less twice the number of devices that each pair of cells shares.
    """
    shared = [[len(a & b) for b in old] for a in new]
    for chosen in range(1, 1 << len(new)):
        rows = [i for i in range(len(new)) if chosen >> i & 1]
        gains = [len(b) - 2 * sum(shared[i][j] for i in rows) for j, b in enumerate(old)]
        reached = {sum(len(new[i]) for i in rows)}
        for gain in gains:
            reached |= {size + gain for size in reached}
        if any(0 < size < LEAST_CHANGE for size in reached):
            return True
    return False


def fitted(
    wanted: Sequence[frozenset[D]], recent: Sequence[Sequence[frozenset[D]]], least: int, order: Callable[[D], Any]
) -> list[frozenset[D]]:
    """Return a cell within each of ``wanted`` that may be opened; an empty one where none may.

    The cell of the most *value* is taken that a bounded search finds: a device counts one, and one more for each of the last
    requests since it was in a cell, so that no device is left out for long. The search leaves out devices that no cell of the
    last request had, or up to `LEAST_CHANGE` of those that were in one.

    Args:
        wanted: devices of each cell.
        recent: the cells of each of the last requests, the newest last.
        least: fewest devices in a cell.
        order: a key of devices by which those that are left out are drawn.
    """
    unions = [frozenset().union(*cells) for cells in reversed(recent)]

    def value(device: D) -> int:
        return 1 + next((age for age, union in enumerate(unions) if device in union), len(unions))

    done: list[frozenset[D]] = []
    for cell in wanted:
        others = [c for c in done if c]
        values = {device: value(device) for device in cell}
        fresh = sorted(cell, key=lambda device: (values[device], order(device)))[: 2 * LEAST_CHANGE]
        candidates = {
            base - set(out)
            for base in (cell, frozenset(device for device in cell if values[device] == 1))
            for count in range(LEAST_CHANGE + 1)
            for out in combinations(fresh, count)
        }
        ranked = sorted(candidates, key=lambda c: (-sum(values[d] for d in c), -len(c), sorted(map(order, cell - c))))
        fits = (c for c in ranked if len(c) >= least and allowed([*others, c], recent))
        done.append(next(fits, frozenset()))
    return done
