"""What the owner signs and hands out: roster, cards and grants, run plans and run packages."""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass, field
from functools import cached_property

from shoal import limits
from shoal.errors import ConfigError, WireError
from shoal.protocol.codec import U16, U32, U64, ArrayU32, Fixed16, Fixed32, Fixed64, message
from shoal.types import Segment, check_name


def require_name(name: str, what: str) -> None:
    """Refuse a received name that can't stand in a topic and a file name.

    Raises:
        WireError: it can't.
    """
    try:
        check_name(name, what)
    except ConfigError as error:
        raise WireError(str(error)) from error


@message(1)
@dataclass(frozen=True, slots=True)
class Member:
    """One party's public identity: Ed25519 to verify, X25519 to seal to, 32 raw bytes each."""

    name: str
    sign_key: Fixed32
    seal_key: Fixed32

    def __post_init__(self) -> None:
        require_name(self.name, "member name")


@message(2)
@dataclass(frozen=True, kw_only=True)
class Roster:
    """Who belongs to the fleet, signed by the owner. A device's index is its place in ``devices``, which only grows.

    Attributes:
        sequence: grows with every change; a lower one than seen is refused.
        issued_at_s, expires_at_s: unix seconds by the owner's clock.
        keys_since: the sequence at which the owner last drew the fleet's secrets anew; plans of this roster and later
            ones are made with those.
    """

    fleet: str
    sequence: U32
    issued_at_s: U64
    expires_at_s: U64
    aggregator: Member | None
    devices: tuple[Member, ...]
    revoked: tuple[str, ...]
    keys_since: U32 = 0

    def __post_init__(self) -> None:
        require_name(self.fleet, "fleet name")
        names = [d.name for d in self.devices]
        if len(set(names)) != len(names):
            raise WireError("a roster lists a device twice")
        if len(names) > limits.MAX_DEVICES:
            raise WireError(f"a roster of {len(names)} devices is over {limits.MAX_DEVICES}")
        if self.keys_since > self.sequence:
            raise WireError(f"a roster of sequence {self.sequence} with keys of {self.keys_since}")

    @cached_property
    def _active(self) -> dict[str, Member]:
        gone = set(self.revoked)
        return {d.name: d for d in self.devices if d.name not in gone}

    def device(self, name: str) -> Member | None:
        """Return the member called ``name`` unless it is unknown or revoked."""
        return self._active.get(name)

    @property
    def active_count(self) -> int:
        """How many devices are not revoked."""
        return len(self._active)

    def active(self) -> tuple[str, ...]:
        """Return the names of all devices that are not revoked, in roster order."""
        return tuple(self._active)


@message(23)
@dataclass(frozen=True, slots=True, kw_only=True)
class RosterChange:
    """What turns one roster into the newest, and the owner's signature over that.

    Attributes:
        after: sequence of the roster that this follows; that of the newest itself where it only says which is newest.
        signature: over the newest Roster.
        fleet, sequence, issued_at_s, expires_at_s, aggregator, keys_since: as in Roster.
        devices: how many the newest lists.
        places, members: what stands in it elsewhere than before: ``members[i]`` at ``places[i]``.
        revoked_stay: so many of the names that were revoked before stand first;
        revoked: these after them.
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
    revoked_stay: U32
    revoked: tuple[str, ...]
    keys_since: U32

    def __post_init__(self) -> None:
        require_name(self.fleet, "fleet name")
        if self.after > self.sequence:
            raise WireError(f"a change from roster {self.after} to {self.sequence}")
        if self.devices > limits.MAX_DEVICES:
            raise WireError(f"a roster of {self.devices} devices is over {limits.MAX_DEVICES}")


@message(3)
@dataclass(frozen=True, slots=True)
class Card:
    """A new party's request to join: its public identity and what it wants to be; self-signed, carried as a file."""

    role: str
    member: Member


@message(4)
@dataclass(frozen=True, slots=True, kw_only=True)
class DeviceGrant:
    """What the owner gives a device: the mask secret and the content key besides what the aggregator gets.

    Attributes:
        roster: the newest, signed; empty where the grant renews the keys of somebody who belongs to the fleet, so that new
            keys for n parties are n short messages, not n rosters of n.
        keys_since: roster sequence at which these secrets were drawn.
        mask_epoch: the mask epoch that ``mask_secret`` stands at; later ones follow from it (`MaskSecret.at`).
    """

    fleet: str
    owner_key: Fixed32
    broker: str = field(repr=False)
    roster: bytes
    keys_since: U32
    broadcast_key: Fixed32 = field(repr=False)
    mask_secret: Fixed32 = field(repr=False)
    content_key: Fixed32 = field(repr=False)
    mask_epoch: U32 = 0


@message(18)
@dataclass(frozen=True, slots=True, kw_only=True)
class AggregatorGrant:
    """What the owner gives the aggregator: nothing that opens a mask, a model or a task; fields as in `DeviceGrant`."""

    fleet: str
    owner_key: Fixed32
    broker: str = field(repr=False)
    roster: bytes
    keys_since: U32
    broadcast_key: Fixed32 = field(repr=False)


@message(19)
@dataclass(frozen=True, slots=True)
class GrantFile:
    """A grant on its way: who gives it, and the sealed grant."""

    owner: Member
    sealed: bytes


@message(5)
@dataclass(frozen=True, slots=True)
class Setting:
    """One hyper-parameter of an algorithm by its name; the strategy parses and checks the value."""

    name: str
    value: str


@message(6)
@dataclass(frozen=True, slots=True, kw_only=True)
class LocalSettings:
    """Local training in a run plan: ``epochs`` of mini-batches, or ``steps`` full-batch steps if ``batch_size`` is 0.

    The order of these fields is the wire format, and the aggregator reads them, which may not import tasks. Devices train by
    `shoal.task.manifest.LocalTraining`, which has the same fields and checks their values.
    """

    epochs: U32
    steps: U32
    batch_size: U32
    lr: float
    lr_decay: float
    momentum: float
    clip: float
    prox_mu: float


@message(7)
@dataclass(frozen=True, slots=True)
class SegmentSpec:
    """A mask segment as it travels: ``cluster`` or ``shared`` and its coordinates."""

    name: str
    length: U32


@message(26)
@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a run's algorithm needs of devices beyond training, scoring and evaluating; devices refuse the rest.

    Attributes:
        pretrain: train by the plan's ``pretrain`` recipe.
        margins: report the loss of each candidate less the first one's.
        scale: use models that are multiples of their origin, and report the l2 norm of the model that was trained.
        carry: at a rollover, mask vectors again that are no models.
        keep_updates: keep own updates in clear until the run ends, and mask them again at a rollover.
        keep_path: keep several models at the end of the run.
    """

    pretrain: bool = False
    margins: bool = False
    scale: bool = False
    carry: bool = False
    keep_updates: bool = False
    keep_path: bool = False


def _require_positive(name: str, value: float) -> None:
    if not 0 < value < math.inf:
        raise WireError(f"the {name} is a number above 0, not {value:g}")


@message(8)
@dataclass(frozen=True, slots=True)
class RunPlan:
    """What the owner allows in a run: devices refuse every announcement and order that goes beyond it.

    Attributes:
        run: grows with every run of the fleet; run_id is random.
        origins: sealed origins shipped with the run, k for each restart of IFCA, else 1.
        max_models: most models an announcement may name.
        epoch: mask epoch in which the run begins; epoch_rounds: rounds after which the mask must be renewed.
        key_id: names the mask key of this epoch. `in_epoch` gives the plan as it stands after a rollover.
        norm_limit: largest l2 norm of one masked update.
        quorum: share of the ordered devices that closes a round once its deadline has passed.
        participation: share of the available devices drawn for a round.
        evaluate_every: devices report accuracy on their test share every so many rounds; 0 means at the end only.
        local: how devices train in a round; pretrain: in a round of phase PRETRAIN (cold starts, local convergence).
        seed: seeds participation and batch order; the aggregator reads it, so nothing secret comes from it, origins least.
        weighting: ``samples`` or ``uniform``; under ``uniform`` devices keep their sample counts to themselves.
        norm_noise: relative standard deviation of the factor by which devices blur an update's norm; 0 is off.
        max_samples: largest sample count that a device may report; one with more reports this many.
        weight_cap: a device weighs at most this many times the median weight of the devices in the same mean; 0 is off.
        capabilities: what the algorithm may ask of devices. They go by this, never by ``algorithm`` or ``settings``.
    """

    fleet: str
    run: U32
    run_id: Fixed16
    roster_sequence: U32
    task_digest: Fixed32
    algorithm: str
    settings: tuple[Setting, ...]
    origins: U16
    max_models: U16
    rounds: U32
    mode: str
    epoch: U32
    epoch_rounds: U32
    key_id: Fixed16
    segments: tuple[SegmentSpec, ...]
    norm_limit: float
    min_contributors: U16
    quorum: float
    participation: float
    deadline_s: float
    weighting: str
    evaluate_every: U32
    seed: U64
    local: LocalSettings
    pretrain: LocalSettings
    norm_noise: float = 0.0
    max_samples: U32 = limits.DEFAULT_MAX_SAMPLES
    weight_cap: float = limits.DEFAULT_WEIGHT_CAP
    capabilities: Capabilities = Capabilities()

    def __post_init__(self) -> None:
        require_name(self.fleet, "fleet name")
        for segment in self.segments:
            if segment.name not in ("cluster", "shared") or segment.length < 1:
                raise WireError(f"segment {segment.name!r} of {segment.length} coordinates")
        if not 1 <= len(self.segments) <= 2 or not 1 <= self.length <= limits.MAX_COORDINATES:
            raise WireError("a run plan has one or two segments of at least one coordinate")
        if not 1 <= self.origins <= self.max_models <= limits.MAX_MODELS:
            raise WireError(f"a run plan with {self.origins} origins and {self.max_models} models")
        if not (0 < self.quorum <= 1 and 0 < self.participation <= 1):
            raise WireError(
                f"quorum {self.quorum:g} and participation {self.participation:g}: both are above 0 and at most 1"
            )
        _require_positive("deadline", self.deadline_s)
        _require_positive("norm limit", self.norm_limit)
        if self.rounds < 1 or self.min_contributors < 1:
            raise WireError("rounds and min_contributors are at least 1")
        if not self.epoch_rounds >= 1:
            raise WireError("a mask epoch has at least one round")
        if self.weighting not in ("samples", "uniform"):
            raise WireError(f"weighting {self.weighting!r} is neither samples nor uniform")
        if not 0 <= self.norm_noise <= limits.MAX_NORM_NOISE:
            raise WireError(f"a norm noise of {self.norm_noise:g} is not between 0 and {limits.MAX_NORM_NOISE}")
        if not 1 <= self.max_samples < 1 << 32:
            raise WireError(f"max_samples is from 1 to {(1 << 32) - 1}, not {self.max_samples}")
        if not (self.weight_cap == 0 or 1 <= self.weight_cap < math.inf):
            raise WireError(f"weight_cap is 0 (off) or at least 1, not {self.weight_cap:g}")

    @property
    def epochs(self) -> int:
        """Mask epochs that the run takes, if nobody is revoked meanwhile."""
        return -(-self.rounds // self.epoch_rounds)

    def in_epoch(self, epoch: int, key_id: bytes, origins: int | None = None) -> RunPlan:
        """Return the plan in a later mask epoch; what the owner signed is the one of the first.

        Args:
            epoch: its number.
            key_id: 16 bytes, names its key.
            origins: how many models were folded; None leaves the number as it is.
        """
        count = self.origins if origins is None else origins
        return dataclasses.replace(
            self, epoch=epoch, key_id=key_id, origins=count, max_models=max(self.max_models, count)
        )

    @property
    def length(self) -> int:
        """Coordinates d of every masked vector of the run."""
        return sum(s.length for s in self.segments)

    def span(self, segment: str) -> slice:
        """Return where ``segment`` lies in the run's vectors; all of them for the empty name.

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
        """The segments as the mask takes them."""
        return tuple(Segment(s.name, s.length) for s in self.segments)


@message(9)
@dataclass(frozen=True, slots=True)
class RunPackage:
    """A run as the owner hands it out.

    The aggregator can open only ``plan``; task and origins are sealed under the devices' content key.
    """

    plan: bytes
    task: bytes
    origins: bytes
