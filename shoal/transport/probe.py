"""Try a broker without disturbing a running program: reach it, log in, see what it keeps, read the expiry of its certificate."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from shoal import limits
from shoal.errors import BrokerUnreachableError, ConfigError, text_of
from shoal.protocol.topics import matches
from shoal.transport.base import Connected, Message, TransportEvent
from shoal.transport.mqtt import MqttTransport
from shoal.transport.reasons import why
from shoal.transport.websocket import connected, expiry_of

if TYPE_CHECKING:
    from shoal.address import BrokerAddress


ANSWER_S: Final = 2.0
"""Longest wait for what the broker sends after a SUBSCRIBE or a connection."""
SESSION_S: Final = 30
"""Time for which the broker is asked to keep the probe's session; it is ended at once."""
IN_ORDER: Final = 20
"""Messages by which the order is tried."""
LARGE_BYTES: Final = limits.CHUNK_BYTES + 1024
"""Payload of the largest message that is tried: that of a chunk."""


@dataclass(frozen=True, slots=True)
class Survey:
    """What a broker did; None for what could not be seen, since nothing was retained there or the client may not write.

    Attributes:
        session: whether it kept the session of a client that was away.
        retained: whether it sent a retained message to a topic that is spelled out.
        wildcards: whether it sent one to a filter with a wildcard.
        large: whether it passed a message of LARGE_BYTES on, and ordered: whether IN_ORDER messages came in their order.
    """

    session: bool
    retained: bool | None = None
    wildcards: bool | None = None
    large: bool | None = None
    ordered: bool | None = None


class _Probe:
    """A client with a list of what it received."""

    def __init__(self, address: BrokerAddress, client_id: str, session_expiry_s: int) -> None:
        self.events: list[TransportEvent] = []
        self._arrived = threading.Event()
        self.transport = MqttTransport(address, client_id, self._on_event, session_expiry_s=session_expiry_s)

    def _on_event(self, event: TransportEvent) -> None:
        self.events.append(event)
        self._arrived.set()

    def messages(self, topic_filter: str, enough: int) -> list[Message]:
        """Subscribe, and return the messages of the filter, once they are ``enough`` or after ANSWER_S."""
        self.events.clear()
        self.transport.subscribe(topic_filter)
        return self.more(topic_filter, enough)

    def more(self, topic_filter: str, enough: int) -> list[Message]:
        """Return the messages of a filter that have come, once they are ``enough`` or after ANSWER_S."""
        end_s = time.monotonic() + ANSWER_S
        while True:
            self._arrived.clear()
            found = [e for e in tuple(self.events) if isinstance(e, Message) and matches(topic_filter, e.topic)]
            left_s = end_s - time.monotonic()
            if len(found) >= enough or left_s <= 0.0:
                return found
            self._arrived.wait(left_s)


def survey(
    address: BrokerAddress, client_id: str, places: Sequence[tuple[str, str]], own: tuple[str, str] | None = None
) -> Survey:
    """Return what a broker keeps and passes on; takes at most some 15 seconds.

    Args:
        address: of the broker.
        client_id: gets a random suffix.
        places: filters with a wildcard, each with a topic that it matches, at which messages may be retained.
        own: a filter and a topic that the client may read and write, and where nobody takes harm from a strange message; None if
            there is none. What is retained there is removed.

    Raises:
        BrokerUnreachableError, ConfigError: as `log_in`.
    """
    name = f"{client_id}-{secrets.token_hex(4)}"
    kept = []
    # The last connection asks for no session, which ends the one before.
    for expiry_s in (SESSION_S, SESSION_S, 0):
        probe = _Probe(address, name, expiry_s)
        try:
            probe.transport.start(require=True)
            kept += [event.session_present for event in tuple(probe.events) if isinstance(event, Connected)][:1]
            if expiry_s:
                # Some brokers keep no session without a subscription.
                probe.messages(own[1] if own else places[0][1] if places else "shoal", 1)
                continue
            found = Survey(session=kept[1])
            if own is not None:
                return _written(probe, *own, found)
            return _read(probe, places, found)
        finally:
            probe.transport.close()
    raise AssertionError("the last connection returns")


def _read(probe: _Probe, places: Sequence[tuple[str, str]], found: Survey) -> Survey:
    for topic_filter, topic in places:
        by_filter = bool(probe.messages(topic_filter, 1))
        if by_filter:
            return Survey(found.session, retained=True, wildcards=True)
        if probe.messages(topic, 1):
            return Survey(found.session, retained=True, wildcards=False)
    return found


def _written(probe: _Probe, topic_filter: str, topic: str, found: Survey) -> Survey:
    transport = probe.transport
    try:
        transport.publish(topic, b"0", retain=True)
        end_s = time.monotonic() + ANSWER_S
        while transport.pending() and time.monotonic() < end_s:
            time.sleep(0.01)
        retained = any(m.retained for m in probe.messages(topic, 1))
        # The filter matches the topic, so its answer is one more retained message there.
        wildcards = any(m.retained for m in probe.messages(topic_filter, 1) if m.topic == topic)
        transport.unsubscribe(topic_filter)
        probe.events.clear()
        for number in range(IN_ORDER):
            transport.publish(topic, b"%d" % number)
        numbers = [int(m.payload) for m in probe.more(topic, IN_ORDER)]
        probe.events.clear()
        transport.publish(topic, bytes(min(LARGE_BYTES, transport.chunk_bytes)))
        return Survey(found.session, retained, wildcards, bool(probe.more(topic, 1)), numbers == list(range(IN_ORDER)))
    finally:
        transport.publish(topic, b"", retain=True)


def log_in(address: BrokerAddress, client_id: str) -> str:
    """Connect to a broker with its credentials, and disconnect; return the MQTT version in use: ``5`` or ``3.1.1``.

    A random suffix is added to ``client_id``, since a second client of the same id would take over the session of the first.

    Raises:
        BrokerUnreachableError: no broker answers within CONNECT_TIMEOUT_S, or it refuses the credentials or certificate.
        ConfigError: a certificate or key file can't be read.
    """
    transport = MqttTransport(address, f"{client_id}-{secrets.token_hex(4)}", lambda _event: None, session_expiry_s=0)
    try:
        transport.start(require=True)
        return transport.protocol_version
    finally:
        transport.close()


def certificate_expiry(address: BrokerAddress) -> int:
    """Return the unix time in seconds at which the certificate of a broker with TLS expires.

    Raises:
        BrokerUnreachableError: no connection, or a certificate that is not trusted.
        ConfigError: a certificate or key file can't be read.
    """
    context = address.tls_context()
    assert context is not None, "the address has no TLS"
    try:
        with (
            connected((address.host, address.port), address.routed().proxy, limits.CONNECT_TIMEOUT_S) as plain,
            context.wrap_socket(plain, server_hostname=address.host) as connection,
        ):
            return expiry_of(connection)
    except OSError as error:
        reason, hint = why(error, address)
        raise BrokerUnreachableError(f"no TLS connection to {address}: {reason}", hint=hint) from error


def own_expiries(address: BrokerAddress) -> dict[str, int]:
    """Return when this client's certificates expire, in unix seconds: ``ca``, unless it is a bundle of several, and ``client``.

    Raises:
        ConfigError: a file can't be read, or holds no certificate.
    """
    from cryptography.x509 import load_der_x509_certificate, load_pem_x509_certificates

    found = {"ca": [load_der_x509_certificate(address.ca)]} if address.ca and not address.ca_file else {}
    for name, file in {"ca": address.ca_file, "client": address.cert_file}.items():
        if file is not None:
            try:
                found[name] = load_pem_x509_certificates(file.read_bytes())
            except (OSError, ValueError) as error:
                raise ConfigError(
                    f"{file} is not a readable certificate: {text_of(error)}", hint="give a PEM file"
                ) from error
    shown = {name: chain[0] for name, chain in found.items() if name == "client" or len(chain) == 1}
    return {name: int(certificate.not_valid_after_utc.timestamp()) for name, certificate in shown.items()}
