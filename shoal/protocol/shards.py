"""Messages of a run whose aggregator has workers: each of them takes one part of every vector.

The plan lists S workers, S at least 2. `borders` cuts the d coordinates of every masked vector into S parts, at fixed places. A
device seals each part of its update to its worker; the upload to the coordinator has the parts' digests in place of the update.
Workers report the parts that they have made durable, and the coordinator acknowledges an upload once all S are reported. A
mean is made and published in parts too, and its digest is that of the parts' digests.

Example: 100 coordinates and three workers give the parts 0 to 32, 32 to 64 and 64 to 100.

    >>> borders(100, 3)
    ((0, 32), (32, 64), (64, 100))
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import TYPE_CHECKING, Final

from shoal import limits
from shoal.digests import sha256
from shoal.errors import WireError
from shoal.protocol.codec import U16, U32, U64, ArrayU32, Fixed16, Fixed32, message
from shoal.protocol.documents import require_name
from shoal.protocol.messages import Phase
from shoal.protocol.precision.lengths import encoded_bytes
from shoal.protocol.states import checkpoint_number

if TYPE_CHECKING:
    from shoal.protocol.documents import RunPlan

_PART_LABELS: Final = checkpoint_number(limits.MAX_MODELS + limits.MAX_SCALED) + 1
"""Number of the first topic label of a part of a mean, after those of whole means and of checkpoints."""


MAX_ADDRESS_BYTES: Final = 4096
"""Longest address of a member of a process group; Gloo's have a few hundred bytes."""
PART_LABEL: Final = "p-"
"""Begins the topic label of a part of a mean, as a device names it among those of models."""


def borders(length: int, workers: int) -> tuple[tuple[int, int], ...]:
    """Return the first coordinate of each worker's part, and the one after its last; nothing without workers.

    Args:
        length: coordinates d.
        workers: S; each part has at least one block of `limits.PART_BLOCK` coordinates if d is at least S blocks.
    """
    if not workers:
        return ()
    blocks = -(-length // limits.PART_BLOCK)
    cuts = [limits.PART_BLOCK * (worker * blocks // workers) for worker in range(workers)]
    return tuple(zip(cuts, (*cuts[1:], length), strict=True))


def part_of(span: slice, part: tuple[int, int]) -> tuple[int, int]:
    """Return the coordinates of a worker's part that lie in ``span``, counted within the span; an empty range if none do."""
    start, stop = max(span.start, part[0]), min(span.stop, part[1])
    return (start - span.start, stop - span.start) if start < stop else (0, 0)


def part_bytes(plan: RunPlan, worker: int) -> int:
    """Return the bytes of one worker's part of an update, in the plan's precision."""
    start, stop = borders(plan.length, len(plan.workers))[worker]
    return encoded_bytes(stop - start, plan.recipe.precision_up)


def sealed_part_bytes(plan: RunPlan, worker: int) -> int:
    """Return the largest sealed part of an update for one worker."""
    return limits.SEALED_HEAD_BYTES + part_bytes(plan, worker)


def sealed_mean_part_bytes(plan: RunPlan) -> int:
    """Return the largest sealed part of a mean."""
    longest = max(stop - start for start, stop in borders(plan.length, len(plan.workers)))
    return limits.SEALED_HEAD_BYTES + encoded_bytes(longest, plan.recipe.precision_down)


def digest_over(parts: Sequence[bytes]) -> bytes:
    """Return the digest of a vector that travels in parts: SHA-256 of the parts' digests, in the order of the workers."""
    return sha256(*parts)


def mean_part_number(mean: int, worker: int) -> int:
    """Return the number of the topic label of a worker's part; ``mean`` is that of the whole mean (`mean_number`)."""
    return _PART_LABELS + worker * _PART_LABELS + mean


def part_seed(seed: bytes, worker: int) -> bytes:
    """Return the seed, 32 bytes, of one part of a vector whose seed is ``seed``."""
    return sha256(b"shoal/v1/part\0" + worker.to_bytes(2, "little") + seed)


@message(140)
@dataclass(frozen=True, slots=True, kw_only=True)
class UploadPart:
    """Header of one part of a device's masked update; the part follows, in the plan's precision.

    Attributes:
        nonce: the announcement's.
        recipient: the worker's seal key.
        worker: the worker's number in the plan.
    """

    fleet: str
    run_id: Fixed16
    round: U32
    phase: Phase
    nonce: Fixed16
    device: str
    recipient: Fixed32
    worker: U16

    def __post_init__(self) -> None:
        require_name(self.device, "device name")


@message(141)
@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part that a worker has made durable.

    Attributes:
        digest: that its signature covers, SHA-256 of head and ciphertext.
        squared_norm: sum of the squares of its coordinates, float64.
    """

    device: str
    phase: Phase
    digest: Fixed32
    squared_norm: float

    def __post_init__(self) -> None:
        require_name(self.device, "device name")
        if self.squared_norm < 0:
            raise WireError(f"a squared norm of {self.squared_norm:g}")


@message(142)
@dataclass(frozen=True, slots=True)
class PartReport:
    """A worker's report: the parts of a round that it has made durable since its last report."""

    run_id: Fixed16
    worker: U16
    round: U32
    parts: tuple[StoredPart, ...]


@message(143)
@dataclass(frozen=True, slots=True, kw_only=True)
class MeanPartHeader:
    """Header of a worker's part of a mean, which follows in the plan's precision, masked under the round's key.

    Attributes:
        key_id, length, segment: of the whole mean, see `shoal.protocol.states.MeanHeader`.
        worker: the worker's number in the plan.
    """

    fleet: str
    run_id: Fixed16
    round: U32
    key_id: Fixed16
    model: U16
    length: U32
    segment: str
    worker: U16


class NodeKind(IntEnum):
    """One step of a calculation on vectors, each coordinate by itself; see `VectorNode`.

    UPDATE is a device's update. MEAN weighs updates and divides by the sum of the weights, as
    `aggregator.numerics.averaging.weighted_mean` does. SUM and DIFFERENCE take two vectors, TIMES and OVER one vector and one
    float32 number. SLICE takes the coordinates of range(first, last, step) of a whole vector. WIDE_MEAN weighs vectors in
    float64 and rounds once.
    """

    UPDATE = 1
    MEAN = 2
    SUM = 3
    DIFFERENCE = 4
    TIMES = 5
    OVER = 6
    SLICE = 7
    WIDE_MEAN = 8


@message(144)
@dataclass(frozen=True, slots=True)
class VectorNode:
    """One vector of a job.

    Attributes:
        items: places of earlier nodes; for UPDATE the place of the device in the job; for SLICE a node, first, last and step.
        weights: for MEAN and WIDE_MEAN one for each item, for TIMES and OVER the number.
    """

    kind: NodeKind
    items: ArrayU32
    weights: tuple[float, ...] = ()


class JobKind(IntEnum):
    """What the workers compute, each on its coordinates.

    GRAM: the products of the vectors with each other. PRODUCTS: those of the first ``count`` vectors with the others. NORMS:
    the squared norms. MEANS: make and store the vectors as parts of means. MEET: compute nothing, take the addresses of the
    process group's members.
    """

    GRAM = 1
    PRODUCTS = 2
    NORMS = 3
    MEANS = 4
    MEET = 5


@message(146)
@dataclass(frozen=True, slots=True)
class MeanPlace:
    """The mean that a vector of a job is: of ``model``, in ``segment`` of the plan, empty for all coordinates."""

    model: U16
    segment: str


@message(153)
@dataclass(frozen=True, slots=True)
class GroupAddress:
    """Where one member of a process group listens.

    Attributes:
        generation: of the group.
        key: under which torch.distributed looks for it.
        value: as torch.distributed writes it, at most MAX_ADDRESS_BYTES.
    """

    generation: str
    key: str
    value: bytes

    def __post_init__(self) -> None:
        if len(self.value) > MAX_ADDRESS_BYTES:
            raise WireError(f"an address of {len(self.value)} bytes")


@message(145)
@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """An order of the coordinator to its workers, at the close of a round.

    Attributes:
        number: grows with every job; the answer names it.
        generation: names the process group of torch.distributed over which the sums travel; empty without one.
        devices: of the updates in the job; digests: of the parts that the coordinator has acknowledged, by device.
        nodes: the calculation, each node after those it takes.
        vectors: places of the nodes that are asked for.
        count: see `JobKind`.
        precise: form products in float64.
        means: for MEANS, what each vector is.
        addresses: for MEET, of members of the group.
    """

    run_id: Fixed16
    number: U64
    kind: JobKind
    round: U32
    generation: str
    devices: tuple[str, ...]
    digests: tuple[Fixed32, ...]
    nodes: tuple[VectorNode, ...]
    vectors: ArrayU32
    count: U32 = 0
    precise: bool = False
    means: tuple[MeanPlace, ...] = ()
    addresses: tuple[GroupAddress, ...] = ()

    def __post_init__(self) -> None:
        if len(self.devices) != len(self.digests):
            raise WireError("a job with other digests than devices")
        for place, node in enumerate(self.nodes):
            self._check_node(place, node)
        if any(at >= len(self.nodes) for at in self.vectors) or self.count > len(self.vectors):
            raise WireError("a job that asks for vectors which it does not make")
        if self.kind is JobKind.MEANS and len(self.means) != len(self.vectors):
            raise WireError("a job of means that does not name them")

    def _check_node(self, place: int, node: VectorNode) -> None:
        weighted = node.kind in (NodeKind.MEAN, NodeKind.WIDE_MEAN)
        scaled = node.kind in (NodeKind.TIMES, NodeKind.OVER)
        counts = {NodeKind.UPDATE: 1, NodeKind.SUM: 2, NodeKind.DIFFERENCE: 2, NodeKind.SLICE: 4}
        items = max(1, len(node.items)) if weighted else counts.get(node.kind, 1)
        weights = len(node.items) if weighted else int(scaled)
        if (len(node.items), len(node.weights)) != (items, weights):
            raise WireError(f"a {node.kind.name.lower()} of {len(node.items)} vectors and {len(node.weights)} numbers")
        refers = node.items[:1] if node.kind is NodeKind.SLICE else node.items
        most = len(self.devices) if node.kind is NodeKind.UPDATE else place
        if any(item >= most for item in refers) or (node.kind is NodeKind.SLICE and not node.items[3]):
            raise WireError(f"a {node.kind.name.lower()} of vectors that are not there")
        if any(not math.isfinite(weight) for weight in node.weights):
            raise WireError("a weight that is not finite")


@message(147)
@dataclass(frozen=True, slots=True)
class JobDone:
    """A worker's answer to a job.

    Attributes:
        digests: of its parts of the means, in the order of the job's vectors.
        lacking: devices whose acknowledged part the worker does not have.
        error: why it could not do the job; empty if it did.
        addresses: where the worker listens as a member of a process group; the message then answers no job.
    """

    run_id: Fixed16
    worker: U16
    number: U64
    digests: tuple[Fixed32, ...] = ()
    lacking: tuple[str, ...] = ()
    error: str = ""
    addresses: tuple[GroupAddress, ...] = ()


@message(148)
@dataclass(frozen=True, slots=True)
class MeanOnBroker:
    """A mean whose parts the workers publish: that of ``model`` in ``round``; ``digest`` is of the receiver's part."""

    model: U16
    round: U32
    key_id: Fixed16
    length: U32
    segment: str
    digest: Fixed32


@message(149)
@dataclass(frozen=True, slots=True, kw_only=True)
class ShardOrder:
    """The state of the run for one worker: the open round, and the parts of means that the announcement names.

    Attributes:
        number: grows with every order of the coordinator's process, whose start is ``birth``; an older one has no effect.
        nonce: of the open round, in which ``devices`` upload; none of them if no round is open.
        key_version: of the round's broadcast key, under which parts of means are sealed.
        keep: the earliest round whose parts are needed.
        finished: the run is over: all parts may be erased.
        plan: the run plan as the owner signed it.
    """

    run_id: Fixed16
    birth: U64
    number: U64
    round: U32
    nonce: Fixed16
    key_version: U32
    keep: U32
    devices: tuple[str, ...]
    means: tuple[MeanOnBroker, ...]
    plan: bytes
    finished: bool = False


@message(150)
@dataclass(frozen=True, slots=True)
class WorkerPresence:
    """A worker's retained state, signed by it, with the same ``birth`` in its will; also a sign of life of the aggregator itself.

    ``rival`` is the birth of a later program that uses the same identity, and is to end; 0 for none.
    """

    fleet: str
    worker: str
    birth: U64
    online: bool
    version: str
    rival: U64 = 0
