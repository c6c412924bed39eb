"""Documents of membership and of runs: roster, cards, grants, run plans and run packages.

The owner signs or seals all of them but cards, which a party signs itself. `RosterChange` transmits the difference of two
rosters, so that a change of one device does not resend the whole roster.

The owner signs devices' labels in the roster as one text: ``line=3,site=berlin``. The label ``name`` is the name under which
people see the device. Values are ASCII words, so that no two that look alike differ.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Final, cast

from shoal import limits
from shoal.digests import sha256
from shoal.errors import ConfigError, WireError
from shoal.protocol.codec import (
    MAGIC,
    U16,
    U32,
    U64,
    ArrayU32,
    Fixed16,
    Fixed32,
    Fixed64,
    LaterFields,
    message,
)
from shoal.protocol.recipe import LocalTraining, Recipe
from shoal.types import Segment, check_name


def require_name(name: str, what: str) -> None:
    """Check a received name.

    Raises:
        WireError: it can't stand in a topic and a file name.
    """
    try:
        check_name(name, what)
    except ConfigError as error:
        raise WireError(str(error)) from error


@message(1)
@dataclass(frozen=True, slots=True)
class Member:
    """One party's name and public keys: Ed25519 for signatures, X25519 for sealing, 32 raw bytes each."""

    name: str
    sign_key: Fixed32
    seal_key: Fixed32

    def __post_init__(self) -> None:
        require_name(self.name, "member name")


# Without slots, which cached_property can't do with: it stores its value in __dict__.
@message(2)
@dataclass(frozen=True, kw_only=True)
class Roster:
    """The members of the fleet, signed by the owner. A device's index is its position in ``devices``, which only grows.

    A replaced device has other keys at the same index and under the same name.

    Attributes:
        sequence: grows with every change; receivers refuse a lower one than they have accepted.
        issued_at_s, expires_at_s: unix seconds by the owner's clock.
        labels: texts of `shoal.protocol.documents` by index; the last devices may have none, and the last text is not empty.
        keys_since: the key version in force: the sequence at which the owner last drew new secrets. Plans of this roster
            and later ones use them.
    """

    fleet: str
    sequence: U32
    issued_at_s: U64
    expires_at_s: U64
    aggregator: Member | None
    devices: tuple[Member, ...]
    revoked: tuple[str, ...]
    keys_since: U32 = 0
    labels: tuple[str, ...] = ()
    later: LaterFields = ()

    def __post_init__(self) -> None:
        require_name(self.fleet, "fleet name")
        names = [d.name for d in self.devices]
        if len(set(names)) != len(names):
            raise WireError("a roster lists a device twice")
        if len(names) > limits.MAX_DEVICES:
            raise WireError(f"a roster of {len(names)} devices is over {limits.MAX_DEVICES}")
        # Secrets of a later roster than this one can't exist when the owner signs it.
        if self.keys_since > self.sequence:
            raise WireError(f"a roster of sequence {self.sequence} with keys of {self.keys_since}")
        if len(self.labels) > len(names) or (self.labels and not self.labels[-1]):
            raise WireError(f"labels of {len(self.labels)} devices in a roster of {len(names)}")
        for text in self.labels:
            read_labels(text)

    @cached_property
    def labelled(self) -> dict[str, str]:
        """The text of each device's labels, by name."""
        return {d.name: text for d, text in zip(self.devices, self.labels, strict=False)}

    def labels_of(self, name: str) -> str:
        """Return the text of a device's labels; empty without any."""
        return self.labelled.get(name, "")

    def only(self, label: str) -> Roster:
        """Return the roster as a run sees it that is for the devices with this label: the others count as revoked.

        Args:
            label: KEY=VALUE; empty for all devices.
        """
        if not label:
            return self
        others = (name for name in self._active if label not in self.labels_of(name).split(","))
        return replace(self, revoked=(*self.revoked, *others))

    @cached_property
    def _active(self) -> dict[str, Member]:
        gone = set(self.revoked)
        return {d.name: d for d in self.devices if d.name not in gone}

    def device(self, name: str) -> Member | None:
        """Return the member called ``name`` unless it is unknown or revoked."""
        return self._active.get(name)

    @property
    def active_count(self) -> int:
        """Number of devices that are not revoked."""
        return len(self._active)

    def active(self) -> tuple[str, ...]:
        """Return the names of all devices that are not revoked, in roster order."""
        return tuple(self._active)


@message(23)
@dataclass(frozen=True, slots=True, kw_only=True)
class RosterChange:
    """The changes from one roster to the newest, with the owner's signature of the newest.

    Attributes:
        after: sequence of the roster that the change applies to; equal to ``sequence`` if it only names the newest roster.
        signature: of the newest Roster.
        fleet, sequence, issued_at_s, expires_at_s, aggregator, keys_since, later: as in Roster.
        devices: number of devices in the newest.
        places, members, labels: new and changed entries of its ``devices``: ``members[i]`` with ``labels[i]`` at index
            ``places[i]``.
        revoked_stay: number of names taken from the start of the old ``revoked``.
        revoked: the names that follow them.
    """

    after: U32
    signature: Fixed64
    fleet: str
    sequence: U32
    issued_at_s: U64
    expires_at_s: U64
    aggregator: Member | None
    devices: U32
    places: ArrayU32
    members: tuple[Member, ...]
    labels: tuple[str, ...]
    revoked_stay: U32
    revoked: tuple[str, ...]
    keys_since: U32
    later: LaterFields = ()

    def __post_init__(self) -> None:
        require_name(self.fleet, "fleet name")
        if self.after > self.sequence:
            raise WireError(f"a change from roster {self.after} to {self.sequence}")
        if self.devices > limits.MAX_DEVICES:
            raise WireError(f"a roster of {self.devices} devices is over {limits.MAX_DEVICES}")


@message(27)
@dataclass(frozen=True, slots=True)
class ReceivingKeys:
    """The public halves of a device's next receiving keys. The owner seals a delivery to one, and the device then erases it.

    Attributes:
        first: number of the first key, counted from 1 over the device's life; the others follow.
        keys: X25519, 32 raw bytes each.
    """

    first: U32
    keys: tuple[Fixed32, ...]

    def __post_init__(self) -> None:
        if not 1 <= len(self.keys) <= limits.RECEIVING_KEYS or not 1 <= self.first <= (1 << 32) - len(self.keys):
            raise WireError(f"{len(self.keys)} receiving keys from number {self.first}")

    @property
    def last(self) -> int:
        """Number of the last key."""
        return self.first + len(self.keys) - 1

    def key(self, number: int) -> bytes:
        """Return the key with this number.

        Raises:
            WireError: it is not among them.
        """
        if not self.first <= number <= self.last:
            raise WireError(f"receiving key {number} is not among {self.first} to {self.last}")
        return self.keys[number - self.first]


@message(28)
@dataclass(frozen=True, slots=True)
class ReceivingNotice:
    """A device's newest receiving keys, which it signs and publishes for the owner."""

    fleet: str
    device: str
    receiving: ReceivingKeys
    later: LaterFields = ()


@message(63)
@dataclass(frozen=True, slots=True, kw_only=True)
class ModelChoice:
    """The owner's choice of the run whose finished models the devices answer with.

    Attributes:
        sequence: grows with each choice; a device ignores a lower one than it has taken.
        run, run_id: the run; 0 and zeros let each device follow its own rule again.
        latest: number of the newest signed run. On a device that has finished a later one the choice is over.
    """

    fleet: str
    sequence: U64
    run: U32
    run_id: Fixed16
    latest: U32
    later: LaterFields = ()

    def __post_init__(self) -> None:
        require_name(self.fleet, "fleet name")
        if self.run > self.latest or bool(self.run) is not any(self.run_id):
            raise WireError(f"a choice of run {self.run} of {self.latest}")


@message(3)
@dataclass(frozen=True, slots=True)
class Card:
    """A new party's request to join, self-signed and carried as a file: its public identity and the role it asks for.

    Attributes:
        receiving: the receiving keys of a device; None for an aggregator.
    """

    role: str
    member: Member
    receiving: ReceivingKeys | None = None
    later: LaterFields = ()


@message(29)
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGrant:
    """A device's credentials from the owner: those of `AggregatorGrant`, and the secret of a key version.

    Attributes:
        broker_ca: the certificate, DER, of the CA that the broker's is to have; empty for those of the system.
        roster: the newest, signed; empty if the grant renews a member's keys, so that new keys for n parties take n short
            messages instead of n rosters with n members.
        keys_since: the key version: the roster sequence at which these secrets were drawn.
        receiving: number of the device's receiving key that the grant is sealed to.
        version_secret: the key version's secret (`crypto.mask.schedule.VersionKey`) for run number ``next_run``; those of
            later runs are derived from it.
    """

    fleet: str
    owner_key: Fixed32
    broker: str = field(repr=False)
    broker_ca: bytes = field(default=b"", repr=False)
    roster: bytes
    keys_since: U32
    receiving: U32
    broadcast_key: Fixed32 = field(repr=False)
    version_secret: Fixed32 = field(repr=False)
    next_run: U32 = 1


@message(18)
@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorGrant:
    """The aggregator's credentials from the owner, without a secret of a mask, model or task.

    Attributes:
        order: the run package of the standing order in force, for an aggregator that replaces another; the others are as in
            `DeviceGrant`.
    """

    fleet: str
    owner_key: Fixed32
    broker: str = field(repr=False)
    broker_ca: bytes = field(default=b"", repr=False)
    roster: bytes
    keys_since: U32
    broadcast_key: Fixed32 = field(repr=False)
    order: bytes = field(default=b"", repr=False)


@message(19)
@dataclass(frozen=True, slots=True)
class GrantFile:
    """A sealed grant, and the owner who sealed it."""

    owner: Member
    sealed: bytes


@message(7)
@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """A mask segment in a run plan: ``cluster`` or ``shared``, and its number of coordinates."""

    name: str
    length: U32


@message(26)
@dataclass(frozen=True, slots=True)
class Capabilities:
    """Work that a run may ask of devices besides training, scoring and evaluating; devices refuse any other.

    Attributes:
        pretrain: train by the plan's ``pretrain`` recipe.
        margins: report the loss of each candidate less the first one's.
        scale: use models that are multiples of their origin, and report the l2 norm of the model that was trained.
        keep_path: store several models at the end of the run.
        compare: report which of several models is nearest to the model that was trained.
    """

    pretrain: bool = False
    margins: bool = False
    scale: bool = False
    keep_path: bool = False
    compare: bool = False


def _require_range(name: str, value: int, least: int, most: int) -> None:
    if not least <= value <= most:
        raise WireError(f"{name} is from {least} to {most}, not {value}")


RING_PRECISIONS: Final = ("float32", "float16")
"""Names for the 32 and the 16 bits of a number, in a run with a keeper."""
MOST_SHORT: Final = 520
"""Most updates that numbers of 16 bits can add up: a usual coordinate of the longest still has four steps."""


def check_choices(recipe: Recipe) -> None:
    """Check that a run with a keeper can have these choices.

    Raises:
        WireError: it can't.
    """
    _require_range("min_contributors in a run with a keeper", recipe.min_contributors, limits.LEAST_CELL, 65535)
    needed = {
        "mode": "rotation",
        "weighting": "uniform",
        "robust": "off",
        "precision_down": "float32",
    }
    for name, value in needed.items():
        if getattr(recipe, name) != value:
            raise WireError(f"a run with a keeper needs {name}={value}, not {getattr(recipe, name)}")
    if recipe.precision_up not in RING_PRECISIONS:
        raise WireError(f"a run with a keeper has updates in {' or '.join(RING_PRECISIONS)}, not {recipe.precision_up}")
    if recipe.norm_noise:
        raise WireError("norm_noise hides nothing in a run with a keeper, where no single norm is seen")


_WIRE: Final = struct.Struct("<H")


def wire_of(plan: bytes | memoryview) -> int:
    """Return the wire version of an encoded run plan of any version.

    Raises:
        WireError: the bytes are too short for one.
    """
    try:
        (version,) = _WIRE.unpack_from(plan, len(MAGIC) + 1)
    except struct.error as error:
        raise WireError(f"a run plan of {len(plan)} bytes") from error
    return int(version)


@message(156)
@dataclass(frozen=True, slots=True, kw_only=True)
class Schedule:
    """A standing order: the owner signs one plan, and the aggregator starts runs by it while the owner is away.

    Attributes:
        order: 16 random bytes from which the ids of its runs follow.
        count: number of runs at most. They have the numbers from the signed plan's on; the number after them seals their task.
        interval_s: shortest time from the end of a run until the next begins.
        until_s: unix seconds; no run begins later.
        growth: per cent by which the data of ``min_contributors`` devices must have grown; 0 for runs by time alone.
        turn: 0 in the plan that the owner signs; `RunPlan.at_turn` counts it up.
    """

    order: Fixed16
    count: U32
    interval_s: U32
    until_s: U64
    growth: U16 = 0
    turn: U32 = 0

    def __post_init__(self) -> None:
        _require_range("the number of scheduled runs", self.count, 1, limits.MAX_SCHEDULED_RUNS)
        _require_range("the seconds between two scheduled runs", self.interval_s, 1, limits.MAX_INTERVAL_S)
        _require_range("the turn of a scheduled run", self.turn, 0, self.count - 1)

    def run_id(self, turn: int) -> bytes:
        """Return the id of the run at a turn, 16 bytes."""
        return sha256(b"shoal/v1/turn", self.order, turn.to_bytes(4, "little"))[:16]


STATISTICS_SETTING: Final = "statistics"
"""Name of the setting that a run with a round of statistics has besides its algorithm's; the value is `on`."""


@message(129)
@dataclass(frozen=True, slots=True)
class RunPlan:
    """The owner-signed limits of a run; devices refuse every announcement and assignment beyond them.

    Attributes:
        wire: wire version of the run's messages. It stays the first field, at a place where every version finds it (`wire_of`).
        run: number of the run, which grows with every run of the fleet; run_id: 16 random bytes.
        recipe: the owner's choices, with local training and a seed.
        origins: sealed origins in the run package: one for each model of an earlier run, or k for each restart of IFCA, else 1.
        max_models: most models an announcement may name.
        capabilities: work that the run may ask of devices. They check this, never the algorithm or its settings.
        key_version: the version whose keys seal the run package; see `crypto.mask.schedule`.
        workers: the aggregator's workers, each of which takes one part of every update (`shoal.protocol.shards`); none if the
            aggregator is one process.
        schedule: of a standing order; None for one run.
        keeper: opens sums of updates, and no single one (`shoal.protocol.sums`); None without one.
        most_summed: most updates in such a sum, from which the step of their fixed-point numbers follows; 0 without a keeper.
        looks: most looks at cosines that the keeper answers, of all runs of an order together; 0 if the algorithm needs none.
    """

    wire: U16
    fleet: str
    run: U32
    run_id: Fixed16
    roster_sequence: U32
    task_digest: Fixed32
    recipe: Recipe
    origins: U16
    max_models: U16
    segments: tuple[SegmentSpec, ...]
    capabilities: Capabilities = Capabilities()
    key_version: U32 = 0
    workers: tuple[Member, ...] = ()
    schedule: Schedule | None = None
    keeper: Member | None = None
    most_summed: U32 = 0
    looks: U16 = 0
    later: LaterFields = ()

    def __post_init__(self) -> None:
        require_name(self.fleet, "fleet name")
        if self.schedule is not None and self.run_id != self.schedule.run_id(self.schedule.turn):
            raise WireError("a scheduled run whose id is not its order's")
        for segment in self.segments:
            if segment.name not in ("cluster", "shared") or segment.length < 1:
                raise WireError(f"segment {segment.name!r} of {segment.length} coordinates")
        if not 1 <= len(self.segments) <= 2 or not 1 <= self.length <= limits.MAX_COORDINATES:
            raise WireError("a run plan has one or two segments of at least one coordinate")
        if not 1 <= self.origins <= self.max_models <= limits.MAX_MODELS:
            raise WireError(f"a run plan with {self.origins} origins and {self.max_models} models")
        if self.recipe.local is None or self.recipe.seed is None:
            raise WireError("a run plan names local training and a seed")
        self._check_workers()
        self._check_keeper()

    def _check_keeper(self) -> None:
        _require_range("the number of looks", self.looks, 0, limits.MAX_LOOKS if self.keeper is not None else 0)
        if self.keeper is None:
            return
        _require_range("the number of updates in a sum", self.most_summed, limits.LEAST_CELL, limits.MAX_DEVICES)
        check_choices(self.recipe)
        if self.recipe.precision_up != "float32" and self.most_summed > MOST_SHORT:
            raise WireError(
                f"sums of {self.most_summed} updates don't fit numbers of 16 bits", hint="leave --precision-up away"
            )
        if self.workers:
            raise WireError("a run has workers or a keeper, not both")

    def _check_workers(self) -> None:
        if not self.workers:
            return
        _require_range("the number of workers", len(self.workers), 2, limits.MAX_WORKERS)
        if len({worker.name for worker in self.workers}) != len(self.workers):
            raise WireError("a run plan lists a worker twice")
        if self.length < len(self.workers) * limits.PART_BLOCK:
            raise WireError(
                f"{self.length} coordinates are too few for {len(self.workers)} workers: at least {limits.PART_BLOCK} for each"
            )

    def at_turn(self, turn: int, models: int) -> RunPlan:
        """Return the plan of a later run of this plan's standing order, which begins with ``models`` models of the run before.

        Raises:
            WireError: the order has no such turn, or its plan allows fewer models.
        """
        schedule = self.schedule
        if schedule is None or schedule.turn:
            raise WireError("a turn of a plan that is no standing order")
        if not turn:
            return self
        return replace(
            self,
            run=self.run + turn,
            run_id=schedule.run_id(turn),
            origins=models + self.statistics,
            schedule=replace(schedule, turn=turn),
        )

    @property
    def turn(self) -> int:
        """Number of runs of the standing order before this one; 0 for any other run."""
        return 0 if self.schedule is None else self.schedule.turn

    @property
    def follows(self) -> bool:
        """Whether the run begins with models that devices hold, and not with those of its package."""
        return self.turn > 0

    @property
    def task_run(self) -> tuple[int, bytes]:
        """Number and id of the run under whose first keys the task is sealed: for all runs of an order the number after them."""
        if self.schedule is None:
            return self.run, self.run_id
        return self.run - self.turn + self.schedule.count, self.schedule.order

    @property
    def local(self) -> LocalTraining:
        """How devices train in a round."""
        return cast(LocalTraining, self.recipe.local)

    @property
    def pretrain(self) -> LocalTraining:
        """How devices train in a round of phase PRETRAIN."""
        return self.recipe.pretrain or self.local

    @property
    def seed(self) -> int:
        """Seed of participation and batch order."""
        return cast(int, self.recipe.seed)

    @property
    def statistics(self) -> bool:
        """Whether the run begins with a round of statistics, by which devices standardise their samples."""
        return STATISTICS_SETTING in self.recipe.values

    @property
    def without_statistics(self) -> RunPlan:
        """The plan of the algorithm alone: without the setting, the last origin and the model of the statistics."""
        if not self.statistics:
            return self
        settings = tuple(s for s in self.recipe.settings if s.name != STATISTICS_SETTING)
        return replace(
            self,
            recipe=replace(self.recipe, settings=settings),
            origins=self.origins - 1,
            max_models=self.max_models - 1,
        )

    @property
    def length(self) -> int:
        """Number of coordinates d of every masked vector of the run."""
        return sum(s.length for s in self.segments)

    def span(self, segment: str) -> slice:
        """Return the coordinates of ``segment`` in the run's vectors; all coordinates for the empty name.

        Raises:
            WireError: the run has no such segment.
        """
        if not segment:
            return slice(0, self.length)
        start = 0
        for spec in self.segments:
            if spec.name == segment:
                return slice(start, start + spec.length)
            start += spec.length
        raise WireError(f"the run has no segment {segment!r}")

    @property
    def mask_segments(self) -> tuple[Segment, ...]:
        """The segments, in the type that the mask functions take."""
        return tuple(Segment(s.name, s.length) for s in self.segments)


@message(9)
@dataclass(frozen=True, slots=True)
class RunPackage:
    """A run as the owner distributes it.

    The aggregator can open only ``plan``; task and origins are sealed under the devices' content key.

    Attributes:
        plan, task: signed and sealed by the owner.
        origins: sealed; empty at a later turn of a standing order.
        turn: of a standing order, see `Schedule`; 0 for any other run.
        models: number of models with which a later turn begins.
        before, transcript: number of the run that ended with these models, and its transcript then.
        deals: in a run with looks, sealed `shoal.protocol.cells.LookDeal`: the aggregator's, then the keeper's of each look. They
            are not for devices.
    """

    plan: bytes
    task: bytes
    origins: bytes
    turn: U32 = 0
    models: U16 = 0
    before: U32 = 0
    transcript: Fixed32 = bytes(32)
    deals: tuple[bytes, ...] = ()


SHOWN: Final = "name"
"""The label with a device's shown name."""
_LABEL: Final = re.compile(r"([a-z][a-z0-9_]*)=([A-Za-z0-9]+(?:[ ._-][A-Za-z0-9]+)*)", re.ASCII)


def read_labels(text: str) -> dict[str, str]:
    """Return the labels in a text, by key.

    Raises:
        WireError: it is too long or malformed, or has a key twice or out of order.
    """
    if len(text) > limits.MAX_LABELS_CHARS:
        raise WireError(f"labels of {len(text)} characters are over {limits.MAX_LABELS_CHARS}")
    found = [_LABEL.fullmatch(item) for item in text.split(",")] if text else []
    labels = {match[1]: match[2] for match in found if match is not None}
    if write_labels(labels) != text:
        raise WireError(f"{text!r} is no text of labels")
    return labels


def write_labels(labels: Mapping[str, str]) -> str:
    """Return the text of labels; `read_labels` checks it."""
    return ",".join(f"{key}={value}" for key, value in sorted(labels.items()))
