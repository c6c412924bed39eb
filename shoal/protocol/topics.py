"""MQTT topics of a fleet, built and parsed from one list of patterns.

All topics begin with ``shoal/v1/{fleet}``. The next level names the group: ``s`` is shared by the whole fleet, ``d`` belongs to
one device, ``w`` to one worker of the aggregator, ``e`` to one enrolment token, and ``o`` to the owner. `TopicKind` lists the
patterns, and `shoal.protocol.channels` the messages on each.

The chunks of a retained transfer that needs several packets are published to ``{base}/{index}``. The longest topic has six
slashes.

Example: ``Topics("reef").up("dev-01")`` is ``shoal/v1/reef/d/dev-01/up``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum
from functools import lru_cache
from typing import Final

from shoal.errors import ConfigError, WireError
from shoal.types import check_name

ROOT: Final = "shoal/v1"
MAX_TOPIC_CHARS: Final = 256
"""Longest topic accepted: the limit of AWS IoT, and longer than any topic of Shoal."""
PARSED_TOPICS: Final = 1024
"""Topics whose parts are remembered: a client receives on the same few again and again, and parsing takes as long as all else
that it does with a chunk."""

MAX_CHUNK_INDEX: Final = (1 << 20) - 1
_INDEX: Final = re.compile(r"0|[1-9][0-9]{0,6}")
_VARIABLE: Final = re.compile(r"\{(\w+)\}")
_NOUNS: Final = {"label": "model label", "token": "token id"}
"""Names of the variables for error messages, where they differ from those in the patterns."""


class TopicKind(Enum):
    """The pattern of a topic below ``shoal/v1/{fleet}``.

    A name in braces stands for one level; ``/#`` says that chunks may be published below the topic.

    Attributes:
        base: the pattern without ``/#``.
        variable: the name in braces; empty if absent.
        has_chunks: whether the pattern ends with ``/#``.
    """

    ROSTER = "s/roster/#"
    ROSTER_CHANGE = "s/roster-change/#"
    KEYS = "s/keys/{party}/#"
    PLAN = "s/plan/#"
    ROUND = "s/round/#"
    MODEL = "s/model/{label}/#"
    MEAN_PART = "s/part/{label}/#"
    NOTICE = "s/notice"
    SERVER_STATE = "s/state"
    UP = "d/{device}/up"
    PART = "d/{device}/part/#"
    CTL = "d/{device}/ctl"
    PART_CTL = "d/{device}/part-ctl"
    STATE = "d/{device}/state"
    RECEIVING = "d/{device}/receiving"
    ENROL = "e/{token}"
    GRANT = "e/{token}/grant/#"
    JOB = "w/{worker}/job"
    REPORT = "w/{worker}/report"
    WORKER_STATE = "w/{worker}/state"
    OWNER_ROSTER = "o/roster/#"
    OWNER_REQUEST = "o/request"
    OWNER_ANSWER = "o/answer"

    base: str
    variable: str
    has_chunks: bool

    def __init__(self, pattern: str) -> None:
        found = _VARIABLE.search(pattern)
        self.base = pattern.removesuffix("/#")
        self.variable = found[1] if found else ""
        self.has_chunks = pattern.endswith("/#")

    def check(self, name: str) -> str:
        """Return ``name`` if the variable may have that value.

        Raises:
            ConfigError: it can't stand in a topic.
        """
        return check_name(name, _NOUNS.get(self.variable, self.variable))

    def with_name(self, name: str) -> str:
        """Return the base with ``name``, which is not checked, in place of its variable."""
        return self.base.replace(f"{{{self.variable}}}", name) if self.variable else self.base


def _expression(kind: TopicKind) -> str:
    """Return a named group for ``kind`` that contains two more: the value of its variable, and the chunk's index."""
    name, index = "([^/]*)", "(?:/([^/]+))?"
    # Empty groups keep the numbering equal for all kinds, so that _read can count from the kind's group.
    base = kind.with_name(name) if kind.variable else f"{kind.base}()"
    return f"(?P<{kind.name}>{base}{index if kind.has_chunks else '()'})"


_TOPIC: Final = re.compile(f"{ROOT}/([^/]*)/(?:{'|'.join(map(_expression, TopicKind))})")


@dataclass(frozen=True, slots=True)
class ParsedTopic:
    """The parts of a topic.

    Attributes:
        kind: its pattern.
        fleet: the fleet it belongs to.
        device: the device of ``up``, ``ctl``, ``state`` and ``receiving``, or the party of ``keys``; empty otherwise.
        label: the label of a mean or checkpoint, the token id of an enrolment and its grant, or a worker; empty otherwise.
        index: the chunk's number for ``{base}/{index}``, or the worker's number for a part; None for the base itself.
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
        ConfigError: the name of the fleet, a device, a label or a token can't stand in a topic.
    """

    fleet: str

    def __post_init__(self) -> None:
        check_name(self.fleet, "fleet")

    @property
    def root(self) -> str:
        """The levels that all topics of the fleet begin with."""
        return f"{ROOT}/{self.fleet}"

    def at(self, kind: TopicKind, name: str = "") -> str:
        """Return the topic of one kind; ``name`` is the value of its variable, if it has one."""
        return f"{self.root}/{kind.with_name(kind.check(name)) if kind.variable else kind.base}"

    def filter(self, kind: TopicKind, name: str = "") -> str:
        """Return the subscription filter of one kind, chunks included; without a ``name`` for all values of its variable."""
        base = kind.with_name(kind.check(name) if name else "+")
        return f"{self.root}/{base}{'/#' if kind.has_chunks else ''}"

    @property
    def round(self) -> str:
        """Retained announcement of the round, signed by the aggregator."""
        return self.at(TopicKind.ROUND)

    @property
    def plan(self) -> str:
        """Retained run plan, signed by the owner."""
        return self.at(TopicKind.PLAN)

    @property
    def roster(self) -> str:
        """Retained roster, signed by the owner."""
        return self.at(TopicKind.ROSTER)

    @property
    def roster_change(self) -> str:
        """Retained change from the previous roster to the newest, with the owner's signature of the newest."""
        return self.at(TopicKind.ROSTER_CHANGE)

    @property
    def notice(self) -> str:
        """Retained notice of the owner's orders, from the aggregator."""
        return self.at(TopicKind.NOTICE)

    def model(self, label: str) -> str:
        """Retained mean or checkpoint with the topic label ``label``."""
        return self.at(TopicKind.MODEL, label)

    def keys(self, party: str) -> str:
        """Retained keys that the owner sealed to ``party``, a device or the aggregator."""
        return self.at(TopicKind.KEYS, party)

    def up(self, device: str) -> str:
        """Messages from ``device`` to the aggregator."""
        return self.at(TopicKind.UP, device)

    def ctl(self, device: str) -> str:
        """Messages from the aggregator to ``device``."""
        return self.at(TopicKind.CTL, device)

    def state(self, device: str) -> str:
        """Retained presence of ``device``; its will is the offline form."""
        return self.at(TopicKind.STATE, device)

    def receiving(self, device: str) -> str:
        """Retained receiving keys of ``device``, for the owner."""
        return self.at(TopicKind.RECEIVING, device)

    def enrol(self, token_id: str) -> str:
        """Retained request of a new device that was given the token ``token_id``."""
        return self.at(TopicKind.ENROL, token_id)

    def grant(self, token_id: str) -> str:
        """Retained grant that answers the request under the token ``token_id``."""
        return self.at(TopicKind.GRANT, token_id)

    def part(self, device: str, worker: int) -> str:
        """Parts of updates from ``device`` to the worker with this number."""
        return chunk_topic(self.at(TopicKind.PART, device), worker)

    def parts(self, worker: int) -> str:
        """Return the subscription filter for the parts of all devices to the worker with this number."""
        return f"{self.root}/{TopicKind.PART.with_name('+')}/{worker}"

    @property
    def owner_request(self) -> str:
        """Requests that the owner sealed to the aggregator."""
        return self.at(TopicKind.OWNER_REQUEST)

    @property
    def owner_answer(self) -> str:
        """Answers that the aggregator sealed to the owner."""
        return self.at(TopicKind.OWNER_ANSWER)

    def parse(self, topic: str) -> ParsedTopic:
        """Parse a topic of this fleet.

        Raises:
            WireError: it is no topic of ours, or another fleet's.
        """
        parsed = parse(topic)
        if parsed.fleet != self.fleet:
            raise WireError(f"topic {topic[:MAX_TOPIC_CHARS]!r} belongs to fleet {parsed.fleet!r}, not {self.fleet!r}")
        return parsed


def chunk_topic(base: str, index: int) -> str:
    """Return the topic of chunk ``index`` of the retained transfer at ``base``.

    Raises:
        WireError: the index is negative or above MAX_CHUNK_INDEX.
    """
    if not 0 <= index <= MAX_CHUNK_INDEX:
        raise WireError(f"chunk index {index} is not between 0 and {MAX_CHUNK_INDEX}")
    return f"{base}/{index}"


def parse(topic: str) -> ParsedTopic:
    """Parse a topic; any topic that this module can build is accepted, and no other.

    Raises:
        WireError: the topic has another form, a name that is not valid or an index out of range.
    """
    # Before the regular expression, whose time grows with the length; the error does not repeat the topic.
    if len(topic) > MAX_TOPIC_CHARS:
        raise WireError(f"a topic of {len(topic)} characters is too long")
    try:
        return _read(topic)
    except ConfigError as error:
        raise WireError(f"topic {topic!r} holds a name that is not valid: {error}") from error


@lru_cache(PARSED_TOPICS)
def _read(topic: str) -> ParsedTopic:
    found = _TOPIC.fullmatch(topic)
    if found is None or found.lastgroup is None or found.lastindex is None:
        raise WireError(f"topic {topic!r} is not one of Shoal's")
    kind, fleet = TopicKind[found.lastgroup], check_name(found[1], "fleet")
    name, index = found[found.lastindex + 1], _index(found[found.lastindex + 2])
    if not kind.variable:
        return ParsedTopic(kind, fleet, index=index)
    kind.check(name)
    if kind.variable in ("device", "party"):
        return ParsedTopic(kind, fleet, device=name, index=index)
    return ParsedTopic(kind, fleet, label=name, index=index)


def _index(digits: str | None) -> int | None:
    if not digits:
        return None
    if not _INDEX.fullmatch(digits) or int(digits) > MAX_CHUNK_INDEX:
        raise WireError(f"chunk index {digits!r} is not a number between 0 and {MAX_CHUNK_INDEX}")
    return int(digits)


def matches(topic_filter: str, topic: str) -> bool:
    """Return whether a subscription to ``topic_filter`` receives ``topic`` (MQTT 5.0, section 4.7)."""
    # Topics of the broker itself, such as $SYS, are hidden from leading wildcards.
    if topic.startswith("$") and topic_filter[:1] in ("+", "#"):
        return False
    if "+" not in topic_filter and "#" not in topic_filter:
        return topic_filter == topic
    levels = topic.split("/")
    wanted = topic_filter.split("/")
    for position, want in enumerate(wanted):
        if want == "#":
            return position == len(wanted) - 1
        if position >= len(levels) or want not in ("+", levels[position]):
            return False
    return len(wanted) == len(levels)
