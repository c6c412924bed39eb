"""One MQTT connection, stepped by hand against a broker whose every byte the test writes; no thread, no time."""

import logging
import os
import socket

import pytest
from paho.mqtt.enums import MQTTProtocolVersion

from shoal import limits
from shoal.address import BrokerAddress
from shoal.transport.mqtt_connection import WINDOW, Link, LinkOptions, Publish
from tests.helpers.scripted_broker import ACCEPT_V3, ACCEPT_V5, NOT_AUTHORIZED_V5

DISCONNECT = bytes([0xE0])
LEVEL, FLAGS = 8, 9
"""Positions in CONNECT of the protocol's level and of the flags."""
CLEAN, WILL, WILL_QOS_1, WILL_RETAIN = 0x02, 0x04, 0x08, 0x20
STEPS = 50


class Events:
    """Records the callbacks of a link."""

    def __init__(self):
        self.online = []
        self.messages = []
        self.settled = []

    def on_online(self, *, session_present):
        self.online.append(session_present)

    def on_message(self, message):
        self.messages.append((message.mid, message.payload))

    def on_settled(self, size):
        self.settled.append(size)


class Peers:
    """A link, and the broker's side of its connections."""

    def __init__(self, **options):
        self.server = socket.create_server(("127.0.0.1", 0))
        self.events = Events()
        self.wake_fd = os.eventfd(0)
        self.broker = None
        fields = {
            "address": BrokerAddress.parse(f"mqtt://127.0.0.1:{self.server.getsockname()[1]}"),
            "tls": None,
            "client_id": "client-1",
            "will": None,
            "session_expiry_s": 60,
            "protocol": MQTTProtocolVersion.MQTTv5,
            **options,
        }
        self.link = Link(LinkOptions(**fields), self.events)

    def connect(self, answer=ACCEPT_V5):
        """Open the link, answer its CONNECT, and return that."""
        assert self.link.open()
        if self.broker is not None:
            self.broker.close()
        self.broker, _ = self.server.accept()
        self.link.step(self.wake_fd, 0.0)
        greeting = self.broker.recv(65536)
        if answer:
            self.broker.sendall(answer)
            self.until(lambda: self.link.online or self.link.reason)
        return greeting

    def until(self, reached, **options):
        for _ in range(STEPS):
            if reached():
                return
            if self.link.alive:
                self.link.step(self.wake_fd, 0.1, **options)
        pytest.fail("not reached")

    def received(self):
        """Return the bytes that the broker has received and not read yet."""
        self.broker.setblocking(False)
        try:
            return self.broker.recv(1 << 20)
        except BlockingIOError:
            return b""
        finally:
            self.broker.setblocking(True)

    def publish(self, payload, qos=1):
        assert self.link.publish(Publish("t", payload, False, qos))

    def close(self):
        self.link.abort("the test ends")
        for one in (self.broker, self.server):
            if one is not None:
                one.close()
        os.close(self.wake_fd)


@pytest.fixture
def peers():
    made = []

    def make(**options):
        made.append(Peers(**options))
        return made[-1]

    yield make
    for one in made:
        one.close()


@pytest.fixture
def one(peers):
    return peers()


def accept(*, receive_maximum=65535, packet_bytes=1 << 20, session_present=False):
    """Return a CONNACK with the broker's limits."""
    properties = b"\x21" + receive_maximum.to_bytes(2, "big") + b"\x27" + packet_bytes.to_bytes(4, "big")
    return bytes([0x20, 3 + len(properties), session_present, 0, len(properties)]) + properties


def message(payload, packet_id):
    """Return a PUBLISH to topic ``t`` at QoS 1."""
    body = b"\0\1t" + packet_id.to_bytes(2, "big") + b"\0" + payload
    return bytes([0x32, len(body)]) + body


def puback(packet_id, *code):
    return bytes([0x40, 2 + len(code)]) + packet_id.to_bytes(2, "big") + bytes(code)


def test_no_broker_at_a_port_is_a_reason(one):
    """A port without a broker is a reason and no exception; an abort without a connection is harmless."""
    one.server.close()
    assert not one.link.open()
    assert "Connection refused" in one.link.reason
    one.link.abort("x")
    assert (one.link.greeted, one.link.alive, one.link.was_online) == (False, False, False)


@pytest.mark.parametrize("present", [False, True])
def test_accepted_connection_is_online(one, present):
    """With or without a session. Nagle's algorithm would add tens of milliseconds to every round trip."""
    one.connect(accept(session_present=present))
    assert (one.link.online, one.link.was_online, one.link.greeted) == (True, True, True)
    assert (one.events.online, one.link.reason) == ([present], "")
    assert one.link._client.socket().getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)


def test_a_refusal_is_named_with_its_code(one):
    one.connect(NOT_AUTHORIZED_V5)
    assert (one.link.online, one.link.was_online, one.events.online) == (False, False, [])
    assert (one.link.reason, one.link.reason_code) == ("the broker refused: Not authorized", 0x87)


def test_greeting_has_will_and_our_limits(peers):
    """The greeting has the session the will and our own limits."""
    one = peers(will=("d/x/state", b"offline"), session_expiry_s=77)
    greeting = one.connect()
    assert (greeting[LEVEL], greeting[FLAGS]) == (5, WILL | WILL_QOS_1 | WILL_RETAIN)
    assert b"\x11" + (77).to_bytes(4, "big") in greeting
    assert b"\x21" + limits.RECEIVE_MAXIMUM.to_bytes(2, "big") in greeting
    assert b"\x27" + limits.MAX_PACKET_BYTES.to_bytes(4, "big") in greeting
    assert b"offline" in greeting


@pytest.mark.parametrize(("expiry_s", "clean"), [(0, CLEAN), (60, 0)])
def test_over_3_1_1_session_is_clean_or_not(peers, expiry_s, clean):
    greeting = peers(protocol=MQTTProtocolVersion.MQTTv311, session_expiry_s=expiry_s).connect(ACCEPT_V3)
    assert (greeting[LEVEL], greeting[FLAGS]) == (4, clean)


def test_smaller_limits_count(peers):
    """The window and the largest packet are the smaller of the broker's and ours."""
    one, other = peers(), peers()
    one.connect(accept(receive_maximum=2, packet_bytes=100))
    other.connect(accept(packet_bytes=1 << 27))
    assert not peers().link.has_room, "offline"
    for link, room in ((one, 2), (other, WINDOW)):
        for _ in range(room):
            assert link.link.has_room
            link.publish(b"x")
        assert not link.link.has_room
        assert link.link.inflight == room
    assert one.link.takes(Publish("t", bytes(83), False, 1))
    assert not one.link.takes(Publish("t", bytes(84), False, 1))
    assert other.link.max_packet_bytes == limits.MAX_PACKET_BYTES


def test_acknowledgement_makes_room(one):
    """An acknowledgement settles one publish and makes room."""
    one.connect(accept(receive_maximum=2))
    one.publish(b"first")
    one.publish(b"the second")
    one.broker.sendall(puback(2))
    one.until(lambda: one.events.settled)
    assert one.events.settled == [len(b"the second")]
    assert one.link.has_room
    one.broker.sendall(puback(2) + puback(9))
    one.link.step(one.wake_fd, 0.1)
    assert one.events.settled == [len(b"the second")], "an unknown or repeated acknowledgement settles nothing"
    assert one.link.alive


def test_refused_publish_is_settled(one, caplog):
    """The broker answers for good: a resend would be refused again. A refused subscription is logged as well."""
    one.connect()
    one.publish(b"x")
    one.broker.sendall(puback(1, 0x87, 0))
    with caplog.at_level(logging.ERROR, "shoal.transport.mqtt_connection"):
        one.until(lambda: one.events.settled)
        assert one.link.inflight == 0
        one.link.subscribe(["a"])
        one.link.step(one.wake_fd, 0.0)
        one.broker.sendall(bytes([0x90, 4, 0, 2, 0, 0x87]))
        one.until(lambda: len(caplog.records) == 2)
    assert [r.getMessage() for r in caplog.records] == [
        f"the broker refused a {what}: Not authorized" for what in ("publish", "subscription")
    ]


def test_next_step_writes_all_publishes(one):
    """One TCP segment for a round's small messages, in place of one each. At QoS 0 a publish is settled once sent."""
    one.connect()
    for number in range(5):
        one.publish(b"payload-%d" % number)
    assert one.received() == b""
    one.link.step(one.wake_fd, 0.0)
    assert one.received().count(b"payload-") == 5
    one.publish(b"once", qos=0)
    assert one.link.inflight == 6
    one.until(lambda: one.events.settled)
    assert one.events.settled == [4]
    assert b"once" in one.received()
    one.until(lambda: one.link.inflight == 5)


def test_acknowledgements_leave_in_one_call(peers, monkeypatch):
    """Those at the head of the queue are joined, also where a part of the first was sent before."""
    one = peers(manual_ack=True)
    one.connect()
    sent = []
    send = one.link._client._sock_send
    monkeypatch.setattr(one.link._client, "_sock_send", lambda data: sent.append(data) or send(data))
    for packet_id in (1, 2, 3):
        one.link.acknowledge(packet_id)
    one.publish(b"ours", qos=0)
    one.link._client._out_packet[0].update(pos=1, to_process=3)
    one.link.step(one.wake_fd, 0.0)
    acknowledgements = b"@\2\0\1@\2\0\2@\2\0\3"[1:]
    assert bytes(sent[0]) == acknowledgements
    assert len(sent) == 2
    assert one.received()[: len(acknowledgements)] == acknowledgements
    assert one.events.settled == [4]


def test_only_qos_1_is_sent_again(one):
    """After a lost connection qos 1 is sent again and qos 0 is given up."""
    one.connect()
    one.publish(b"assured")
    one.link.step(one.wake_fd, 0.0)
    one.broker.close()
    one.until(lambda: not one.link.alive)
    assert (one.link.online, one.link.was_online, one.link.cut) == (False, True, False)
    assert one.link.reason
    one.publish(b"once", qos=0)
    one.connect(answer=b"")
    assert one.events.settled == [len(b"once")]
    assert (one.link.was_online, one.link.reason) == (False, "")
    one.broker.sendall(ACCEPT_V5)
    one.until(lambda: one.link.online)
    one.link.step(one.wake_fd, 0.0)
    assert one.received() == bytes([0x3A, 13, 0, 1]) + b"t" + bytes([0, 1, 0]) + b"assured", (
        "with the mark of a duplicate"
    )
    assert one.link.inflight == 1


def test_acknowledged_by_hand_if_asked(peers):
    """Otherwise the broker would forget a message that the program has not handled yet."""
    one = peers(manual_ack=True)
    one.connect()
    one.broker.sendall(message(b"x", 7))
    one.until(lambda: one.events.messages)
    one.link.step(one.wake_fd, 0.0)
    assert one.received() == b""
    one.link.acknowledge(7)
    one.link.step(one.wake_fd, 0.0)
    sent = one.received()
    assert (sent[0], sent[2:4]) == (0x40, bytes([0, 7]))


@pytest.mark.parametrize("properties", [b"", b"\x01\x01", b"\x26\0\1a\0\1b"], ids=["none", "format", "user's"])
@pytest.mark.parametrize(("flags", "qos"), [(0x30, 0), (0x31, 0), (0x32, 1), (0x3B, 1)])
def test_message_with_and_without_properties(one, flags, qos, properties):
    """Those without are decoded by a way of our own, the others by paho's."""
    one.connect()
    seen = []
    one.events.on_message = lambda m: seen.append((m.topic, m.mid, m.payload, m.qos, m.retain, m.dup))
    packet_id = b"\0\7" if qos else b""
    body = b"\0\3t/x" + packet_id + bytes([len(properties)]) + properties + b"payload"
    one.broker.sendall(bytes([flags, len(body)]) + body)
    one.until(lambda: seen)
    assert seen == [("t/x", 7 if qos else 0, b"payload", qos, bool(flags & 1), bool(flags & 8))]
    one.link.step(one.wake_fd, 0.0)
    assert one.received()[:1] == (b"\x40" if qos else b"")


@pytest.mark.parametrize("body", [b"", b"\0", b"\0\x09t", b"\0\1t\0", b"\0\1t\0\7"])
def test_cut_publish_ends_the_connection(one, body, caplog):
    """A publish that is cut short ends the connection."""
    one.connect()
    one.broker.sendall(bytes([0x32, len(body)]) + body)
    with caplog.at_level(logging.CRITICAL):
        one.until(lambda: not one.link.alive)
    assert one.events.messages == []


def test_without_reading_a_step_still_writes(one):
    """Back pressure: the program takes no more messages, but its own publishes go on."""
    one.connect()
    one.broker.sendall(message(b"x", 7))
    one.publish(b"ours")
    for _ in range(3):
        one.link.step(one.wake_fd, 0.0, read=False)
    assert one.events.messages == []
    assert b"ours" in one.received()
    one.until(lambda: one.events.messages == [(7, b"x")])


def test_wake_up_ends_wait_and_is_used_up(one):
    one.connect()
    os.eventfd_write(one.wake_fd, 3)
    one.link.step(one.wake_fd, 60.0)
    os.set_blocking(one.wake_fd, False)
    with pytest.raises(BlockingIOError):
        os.eventfd_read(one.wake_fd)


def test_too_long_packet_is_not_read(one, caplog):
    """Paho itself would buffer up to 256 MB of it."""
    one.connect()
    one.broker.sendall(bytes([0x30, 0xFF, 0xFF, 0xFF, 0x7F]) + bytes(1000))
    with caplog.at_level(logging.CRITICAL):
        one.until(lambda: not one.link.alive)
    assert one.link.cut
    assert one.link.reason == "the broker sent a packet above the limit"
    assert one.events.messages == []
    one.connect()
    assert (one.link.online, one.link.cut) == (True, False), "the next connection is not cut"


def test_packets_are_read_one_a_step(one):
    """The beginning of the next one is read with the end of the one before; then the socket has nothing left to wait for."""
    one.connect()
    small, large = [message(bytes([n]) * n, n) for n in range(1, 101)], b"l" * 10_000
    body = b"\0\1t" + (200).to_bytes(2, "big") + b"\0" + large
    one.broker.sendall(
        b"".join(small) + bytes([0x32, 0x80 | len(body) % 128, len(body) // 128]) + body + message(b"last", 201)
    )
    seen = 0
    while seen < 102:
        one.link.step(one.wake_fd, 5.0)
        assert len(one.events.messages) <= seen + 1
        seen = len(one.events.messages)
    assert one.events.messages == [*((n, bytes([n]) * n) for n in range(1, 101)), (200, large), (201, b"last")]


def test_bytes_of_a_lost_connection_are_gone(one):
    """Bytes that a lost connection has left are no part of the next."""
    one.connect()
    one.broker.sendall(message(b"whole", 1) + message(b"cut short", 2)[:-3])
    one.until(lambda: one.events.messages)
    one.broker.close()
    one.until(lambda: not one.link.alive)
    one.connect()
    one.broker.sendall(message(b"again", 2))
    one.until(lambda: len(one.events.messages) == 2)
    assert one.events.messages == [(1, b"whole"), (2, b"again")]


def test_unreadable_message_ends_connection(one, caplog, monkeypatch):
    """The client library passes on a topic that is not UTF-8, and fails when it is read."""
    one.connect()
    monkeypatch.setattr(one.events, "on_message", lambda message: message.topic)
    one.broker.sendall(bytes([0x30, 5, 0, 1, 0xFF, 0, 0]))
    with caplog.at_level(logging.CRITICAL):
        one.until(lambda: not one.link.alive)
    assert one.link.cut
    assert one.link.reason == "the broker sent what is no MQTT"


def test_brokers_own_reason_for_end_is_given(one):
    one.connect()
    one.broker.sendall(bytes([0xE0, 2, 0x8B, 0]))
    one.until(lambda: not one.link.alive)
    assert (one.link.reason, one.link.reason_code) == ("the broker said: Server shutting down", 0x8B)
    assert not one.link.cut


def test_goodbye_discards_the_will(peers):
    """The broker publishes the will unless it received DISCONNECT."""
    one, other = (peers(will=("s", b"offline")) for _ in range(2))
    one.connect()
    other.connect()
    one.link.goodbye()
    one.until(lambda: not one.link.alive)
    other.link.abort("no word for long")
    assert one.received()[:1] == DISCONNECT
    assert other.received() == b""
    assert (one.link.cut, other.link.cut) == (False, True)
    assert (other.link.reason, other.link.alive) == ("no word for long", False)


@pytest.mark.parametrize(("only_new", "option"), [(False, 0x01), (True, 0x11)])
def test_retained_always_or_only_if_new(one, only_new, option):
    """A subscription asks for retained messages always or only if it is new."""
    one.connect()
    one.link.subscribe(["a/+", "b"], only_new=only_new)
    one.link.step(one.wake_fd, 0.0)
    sent = one.received()
    assert b"\0\3a/+" + bytes([option]) in sent
    assert b"\0\1b" + bytes([option]) in sent
