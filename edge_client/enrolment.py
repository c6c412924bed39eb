"""Enrolment over the broker: a new device sends a request with its one-time token, and waits for the owner's grant.

`Enrolling` runs over any transport and reads no clock; `enrol` drives it over MQTT.
"""

from __future__ import annotations

import queue
import sys
import time
from collections.abc import Callable
from getpass import getpass
from pathlib import Path
from typing import Final

from crypto.seal.identity import Identity
from edge_client.membership import DeviceMembership
from shoal.address import BrokerAddress
from shoal.errors import (
    ConfigError,
    LaterKindError,
    NotEnrolledError,
    ShoalError,
    TakenOverError,
    UntrustedError,
    printable,
)
from shoal.membership.directory import GRANT_FILE, KEY_FILE, load_receiving, make_identity, store_grant
from shoal.membership.enrol_requests import make_request, open_refusal, token_id
from shoal.membership.grants import DEVICE_ROLE, open_grant
from shoal.membership.roster import aggregator_of, open_roster
from shoal.protocol import channels
from shoal.protocol.chunking import split
from shoal.protocol.documents import DeviceGrant
from shoal.protocol.enrolment import LINE_PREFIX, MAX_LINE_CHARS, Token
from shoal.protocol.reassembly import Reassembler
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport.base import Connected, Message, TakenOver, Transport, TransportEvent
from shoal.transport.mqtt import MqttTransport
from shoal.util.console import second

POLL_S: Final = 0.5
LATE_S: Final = 30.0
"""Extra wait after a token has expired: the owner gives no answer then, but an earlier one may still be at the broker."""


def read_line(source: str) -> Token:
    """Return the token of an enrolment line.

    Args:
        source: the line itself, a file that holds it, or ``-`` or nothing for stdin; a terminal does not show the input.

    Raises:
        ConfigError: there is no such line.
    """
    if source.startswith(LINE_PREFIX):
        return Token.from_line(source)
    if source in ("", "-"):
        at_terminal = sys.stdin.isatty()
        return Token.from_line(getpass("Enrolment line: ") if at_terminal else sys.stdin.readline(MAX_LINE_CHARS + 2))
    try:
        return Token.from_line(Path(source).read_text()[: MAX_LINE_CHARS + 2])
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not text"
        raise ConfigError(
            f"can't read an enrolment line from that file: {reason}",
            hint="give the line, a file that holds it, or - for stdin",
        ) from error


def require_fresh(directory: Path, token: Token, now_s: int) -> None:
    """Refuse a token that expired before ``now_s`` (unix seconds), unless an earlier request from ``directory`` may be answered.

    Raises:
        NotEnrolledError: the token has expired, and no request was made with it.
    """
    if now_s > token.expires_at_s and not (directory / KEY_FILE).exists():
        raise expired(token)


def prepare(directory: Path, name: str) -> Identity:
    """Return the device's keys; create them unless an earlier attempt has.

    Raises:
        ConfigError: the directory belongs to a fleet, or holds keys of another name.
        NotEnrolledError: it holds keys, but no receiving keys.
    """
    if (directory / GRANT_FILE).exists():
        raise ConfigError(f"{directory} belongs to a fleet already", hint="enrol into another directory")
    if not (directory / KEY_FILE).exists():
        make_identity(directory, name, DEVICE_ROLE)
    identity = Identity.load(directory / KEY_FILE)
    if identity.name != name:
        raise ConfigError(f"{directory} holds the keys of {identity.name!r}, not of {name!r}", hint="see --name")
    load_receiving(directory)
    return identity


def expired(token: Token) -> NotEnrolledError:
    """Return the error for an expired token."""
    return NotEnrolledError(
        f"this enrolment line expired on {second(token.expires_at_s)}",
        hint="ask the owner for a new one: `shoal-fleet invite`; or is this machine's clock wrong?",
    )


class Enrolling:
    """One device's request to join, until it is answered.

    Attributes:
        granted: whether the owner's grant is stored.
        refused: the owner's refusal; None without one.
    """

    def __init__(self, directory: Path, token: Token, transport: Transport, complain: Callable[[str], None]) -> None:
        """Load the keys in ``directory``; ``complain`` is called with a message for each answer that is refused."""
        self._directory = directory
        self._token = token
        self._transport = transport
        self._complain = complain
        self._identity = Identity.load(directory / KEY_FILE)
        self._receiving = load_receiving(directory)
        self._id = token_id(token.secret)
        self._topics = Topics(token.fleet)
        self._chunks = Reassembler(channels.GRANT.largest, whole_transfers=1)
        self._request = b""
        self.granted = False
        self.refused: NotEnrolledError | None = None

    def start(self, now_s: int) -> None:
        """Make the request and subscribe to the grant; ``now_s`` is unix seconds."""
        self._request = make_request(self._identity, self._token, now_s, self._receiving.public)
        self._transport.subscribe(self._topics.filter(TopicKind.GRANT, self._id))

    def on_event(self, event: TransportEvent, now_s: int) -> None:
        """Handle one event of the transport: publish the request, or check and store a grant."""
        match event:
            case Connected():
                (chunk,) = split(self._request, kind=channels.ENROLMENT.kind, round=0)
                self._transport.publish(self._topics.enrol(self._id), chunk, retain=True)
            case Message(topic, payload) if payload and not self.granted and self.refused is None:
                try:
                    self._on_message(topic, payload, now_s)
                except ConfigError:
                    raise  # the answer is fine, but it can't be stored
                except LaterKindError:
                    return
                except ShoalError as error:
                    self._complain(f"refused an answer: {error}")
            case _:
                pass

    def _on_message(self, topic: str, payload: bytes, now_s: int) -> None:
        parsed = self._topics.parse(topic)
        if parsed.kind is not TopicKind.GRANT or parsed.label != self._id:
            return
        allowed = {**channels.GRANT.limit(), **channels.REFUSAL.limit()}
        transfer = self._chunks.add("grant", payload, float(now_s), allowed)
        if transfer is None:
            return
        if transfer.kind is channels.REFUSAL.kind:
            refusal = open_refusal(transfer.payload, self._token, self._identity.member)
            reason, hint = printable(refusal.reason), printable(refusal.hint)
            self.refused = NotEnrolledError(f"the owner has refused this device: {reason}", hint=hint)
            # Or the request would wait for the owner once more.
            self._transport.publish(self._topics.enrol(self._id), b"", retain=True)
            return
        store_grant(self._directory, self._checked(bytes(transfer.payload), now_s))
        self.granted = True

    def _checked(self, data: bytes, now_s: int) -> DeviceGrant:
        """Return the grant if it is from the owner that the token pins.

        The owner may have replaced the aggregator since it printed the line: its signed roster says who that is.
        """
        grant = open_grant(self._identity, data, DeviceGrant, self._token.owner, self._receiving)
        if grant.fleet != self._token.fleet:
            raise UntrustedError(f"a grant for fleet {grant.fleet!r}, not {self._token.fleet!r}")
        roster = open_roster(grant.roster, owner_key=grant.owner_key, fleet=grant.fleet, least_sequence=0, now_s=now_s)
        aggregator_of(roster)
        if roster.device(self._identity.name) != self._identity.member:
            raise UntrustedError("a grant whose roster does not list this device")
        return grant


def enrol(
    directory: Path,
    token: Token,
    *,
    ca: Path | None,
    cert: Path | None,
    key: Path | None,
    proxy: str = "",
    complain: Callable[[str], None],
) -> DeviceMembership:
    """Send the request, and return when the owner has approved it.

    Raises:
        ConfigError: the grant can't be stored: the disk is full, or another program uses ``directory``.
        BrokerUnreachableError: no broker answers at the token's address.
        NotEnrolledError: the token has expired, or the owner has refused the request.
    """
    inbox: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
    address = BrokerAddress.parse(
        token.broker, ca_file=ca, cert_file=cert, key_file=key, proxy=proxy, ca=token.broker_ca
    )
    transport = MqttTransport(address, token_id(token.secret), inbox.put)
    enrolling = Enrolling(directory, token, transport, complain)
    enrolling.start(int(time.time()))
    transport.start(require=True)
    begun_s, left_s = time.monotonic(), max(0.0, token.expires_at_s - time.time()) + LATE_S
    try:
        while not enrolling.granted:
            if time.monotonic() - begun_s > left_s:
                raise expired(token)
            try:
                event = inbox.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if isinstance(event, TakenOver):
                raise TakenOverError("another device asks with the same line", hint="each device needs its own line")
            enrolling.on_event(event, int(time.time()))
            if enrolling.refused is not None:
                raise enrolling.refused
    finally:
        transport.close()
    return DeviceMembership(directory)
