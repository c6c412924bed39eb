"""Messages between the coordinator of a sharded aggregator and its workers; devices read none of them.

A worker reports the parts of updates that it has stored (`PartReport`) and answers jobs (`Job`, `JobDone`). Orders of the
coordinator name the open round and the parts of means that the worker publishes (`ShardOrder`). `shoal.protocol.shards` has the
messages between workers and devices.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from shoal.errors import WireError
from shoal.protocol.codec import U16, U32, U64, ArrayU32, Fixed16, Fixed32, message
from shoal.protocol.documents import require_name
from shoal.protocol.messages import Phase

MAX_ADDRESS_BYTES: Final = 4096
"""Longest address of a member of a process group; Gloo's have a few hundred bytes."""


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
        plan: the run package, without task and origins.
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
