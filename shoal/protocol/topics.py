"""Every MQTT topic of a fleet, built and read in one place.

A topic names the fleet, who writes there and what it is about:

    shoal/v1/{fleet}/s/...         shared and retained: round, plan, roster, roster-change, checkpoint, model/{label},
                                   keys/{device}
    shoal/v1/{fleet}/d/{device}/.. up (device to aggregator), ctl (aggregator to device), state (retained presence)
    shoal/v1/{fleet}/e/{token}     enrolment: a request, and under /grant the owner's answer
    shoal/v1/{fleet}/o/roster      the newest roster, from the owner to the aggregator

A retained transfer that needs several packets has its chunks at ``{base}/{index}``. The longest topic has six slashes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from typing import Final

from shoal.errors import ConfigError, WireError
from shoal.types import check_name

ROOT: Final = "shoal/v1"
MAX_TOPIC_CHARS: Final = 256
"""Longest topic we read; AWS IoT's limit, and more than any topic of ours."""

MAX_CHUNK_INDEX: Final = (1 << 20) - 1
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,6}")


class TopicKind(Enum):
    """What a topic carries; the value is its last fixed level."""

    ROUND = "round"
    PLAN = "plan"
    ROSTER = "roster"
    ROSTER_CHANGE = "roster-change"
    CHECKPOINT = "checkpoint"
    MODEL = "model"
    KEYS = "keys"
    UP = "up"
    CTL = "ctl"
    STATE = "state"
    ENROL = "e"
    GRANT = "grant"
    OWNER_ROSTER = "o"


_SHARED: Final = {
    kind.value: kind
    for kind in (TopicKind.ROUND, TopicKind.PLAN, TopicKind.ROSTER, TopicKind.ROSTER_CHANGE, TopicKind.CHECKPOINT)
}
_DEVICE: Final = {kind.value: kind for kind in (TopicKind.UP, TopicKind.CTL, TopicKind.STATE)}


@dataclass(frozen=True, slots=True)
class ParsedTopic:
    """What a topic says.

    Attributes:
        kind: what the topic carries.
        fleet: the fleet it belongs to.
        device: the device of ``up``, ``ctl``, ``state`` and ``keys``; empty otherwise.
        label: the model's label, or the token id of an enrolment and its grant; empty otherwise.
        index: the chunk's number for ``{base}/{index}``; None for the base itself.
    """

    kind: TopicKind
    fleet: str
    device: str = ""
    label: str = ""
    index: int | None = None


@dataclass(frozen=True, slots=True)
class Topics:
    """The topics and subscription filters of one fleet.

    Raises:
        ConfigError: the fleet's, a device's or a label's name can't stand in a topic.
    """

    fleet: str

    def __post_init__(self) -> None:
        check_name(self.fleet, "fleet")

    @property
    def root(self) -> str:
        """What every topic of the fleet begins with."""
        return f"{ROOT}/{self.fleet}"

    @property
    def round(self) -> str:
        """Retained announcement of the round, signed by the aggregator."""
        return f"{self.root}/s/round"

    @property
    def plan(self) -> str:
        """Retained run plan, signed by the owner."""
        return f"{self.root}/s/plan"

    @property
    def roster(self) -> str:
        """Retained roster, signed by the owner."""
        return f"{self.root}/s/roster"

    @property
    def roster_change(self) -> str:
        """Retained change that gives the newest roster, which the owner signed."""
        return f"{self.root}/s/roster-change"

    @property
    def checkpoint(self) -> str:
        """Retained fold of an epoch, sealed by a device for the others."""
        return f"{self.root}/s/checkpoint"

    def model(self, label: str) -> str:
        """Retained masked offset of the model that ``label`` stands for."""
        return f"{self.root}/s/model/{check_name(label, 'model label')}"

    def keys(self, device: str) -> str:
        """Retained keys that the owner sealed to ``device``."""
        return f"{self.root}/s/keys/{check_name(device, 'device')}"

    def round_chunk(self, index: int) -> str:
        """Chunk ``index`` of the announcement."""
        return chunk_topic(self.round, index)

    def plan_chunk(self, index: int) -> str:
        """Chunk ``index`` of the run plan."""
        return chunk_topic(self.plan, index)

    def roster_chunk(self, index: int) -> str:
        """Chunk ``index`` of the roster."""
        return chunk_topic(self.roster, index)

    def checkpoint_chunk(self, index: int) -> str:
        """Chunk ``index`` of the checkpoint."""
        return chunk_topic(self.checkpoint, index)

    def model_chunk(self, label: str, index: int) -> str:
        """Chunk ``index`` of the model ``label``."""
        return chunk_topic(self.model(label), index)

    def up(self, device: str) -> str:
        """Where ``device`` writes to the aggregator."""
        return self._device(device, "up")

    def ctl(self, device: str) -> str:
        """Where the aggregator writes to ``device``."""
        return self._device(device, "ctl")

    def state(self, device: str) -> str:
        """Retained presence of ``device``; its will is the offline form."""
        return self._device(device, "state")

    def enrol(self, token_id: str) -> str:
        """Where an unknown device asks to be enrolled with the token ``token_id``."""
        return f"{self.root}/e/{check_name(token_id, 'token id')}"

    def grant(self, token_id: str) -> str:
        """Retained grant that the owner sealed to whoever asked with the token ``token_id``."""
        return f"{self.enrol(token_id)}/grant"

    @property
    def owner_roster(self) -> str:
        """Retained roster that the owner sealed to the aggregator."""
        return f"{self.root}/o/roster"

    @property
    def all_up(self) -> str:
        """Filter: every device's uploads."""
        return f"{self.root}/d/+/up"

    @property
    def all_ctl(self) -> str:
        """Filter: everything the aggregator tells single devices."""
        return f"{self.root}/d/+/ctl"

    @property
    def all_state(self) -> str:
        """Filter: every device's presence."""
        return f"{self.root}/d/+/state"

    @property
    def all_models(self) -> str:
        """Filter: every model and its chunks."""
        return f"{self.root}/s/model/#"

    @property
    def all_shared(self) -> str:
        """Filter: everything that is retained for the whole fleet."""
        return f"{self.root}/s/#"

    @property
    def all_enrol(self) -> str:
        """Filter: every enrolment."""
        return f"{self.root}/e/+"

    def all_chunks(self, base: str) -> str:
        """Filter: every chunk of the retained transfer at ``base``, but not ``base`` itself."""
        return f"{base}/+"

    def parse(self, topic: str) -> ParsedTopic:
        """Read a topic of this fleet.

        Raises:
            WireError: it is no topic of ours, or another fleet's.
        """
        parsed = parse(topic)
        if parsed.fleet != self.fleet:
            raise WireError(f"topic {topic[:MAX_TOPIC_CHARS]!r} belongs to fleet {parsed.fleet!r}, not {self.fleet!r}")
        return parsed

    def _device(self, device: str, leaf: str) -> str:
        return f"{self.root}/d/{check_name(device, 'device')}/{leaf}"


def chunk_topic(base: str, index: int) -> str:
    """Return where chunk ``index`` of the retained transfer at ``base`` lies.

    Raises:
        WireError: the index is negative or above MAX_CHUNK_INDEX.
    """
    if not 0 <= index <= MAX_CHUNK_INDEX:
        raise WireError(f"chunk index {index} is not between 0 and {MAX_CHUNK_INDEX}")
    return f"{base}/{index}"


def parse(topic: str) -> ParsedTopic:
    """Read any topic that this module can build, and nothing else.

    Raises:
        WireError: the topic has another form, a name that is not valid or an index out of range.
    """
    if len(topic) > MAX_TOPIC_CHARS:
        raise WireError(f"a topic of {len(topic)} characters is too long")
    try:
        return _read(topic)
    except ConfigError as error:
        raise WireError(f"topic {topic!r} holds a name that is not valid: {error}") from error


def _read(topic: str) -> ParsedTopic:
    match topic.split("/"):
        case ["shoal", "v1", fleet, "s", leaf, *rest] if leaf in _SHARED and len(rest) <= 1:
            return ParsedTopic(_SHARED[leaf], check_name(fleet, "fleet"), index=_index(rest))
        case ["shoal", "v1", fleet, "s", "model", label, *rest] if len(rest) <= 1:
            label = check_name(label, "model label")
            return ParsedTopic(TopicKind.MODEL, check_name(fleet, "fleet"), label=label, index=_index(rest))
        case ["shoal", "v1", fleet, "s", "keys", device, *rest] if len(rest) <= 1:
            device = check_name(device, "device")
            return ParsedTopic(TopicKind.KEYS, check_name(fleet, "fleet"), device=device, index=_index(rest))
        case ["shoal", "v1", fleet, "d", device, leaf] if leaf in _DEVICE:
            return ParsedTopic(_DEVICE[leaf], check_name(fleet, "fleet"), device=check_name(device, "device"))
        case ["shoal", "v1", fleet, "e", token]:
            return ParsedTopic(TopicKind.ENROL, check_name(fleet, "fleet"), label=check_name(token, "token id"))
        case ["shoal", "v1", fleet, "e", token, "grant", *rest] if len(rest) <= 1:
            token = check_name(token, "token id")
            return ParsedTopic(TopicKind.GRANT, check_name(fleet, "fleet"), label=token, index=_index(rest))
        case ["shoal", "v1", fleet, "o", "roster", *rest] if len(rest) <= 1:
            return ParsedTopic(TopicKind.OWNER_ROSTER, check_name(fleet, "fleet"), index=_index(rest))
        case _:
            raise WireError(f"topic {topic!r} is not one of Shoal's")


def _index(rest: list[str]) -> int | None:
    if not rest:
        return None
    if not _INDEX.fullmatch(rest[0]) or int(rest[0]) > MAX_CHUNK_INDEX:
        raise WireError(f"chunk index {rest[0]!r} is not a number between 0 and {MAX_CHUNK_INDEX}")
    return int(rest[0])


def matches(topic_filter: str, topic: str) -> bool:
    """Tell whether a subscription to ``topic_filter`` receives ``topic`` (MQTT 5.0, section 4.7)."""
    if topic.startswith("$") and topic_filter[:1] in ("+", "#"):
        return False
    levels = topic.split("/")
    wanted = topic_filter.split("/")
    for position, want in enumerate(wanted):
        if want == "#":
            return position == len(wanted) - 1
        if position >= len(levels) or want not in ("+", levels[position]):
            return False
    return len(wanted) == len(levels)
