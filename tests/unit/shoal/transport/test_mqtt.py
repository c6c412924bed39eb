"""The MQTT transport against brokers that behave badly: each test scripts one on a socket."""

import contextlib
import logging
import os
import queue
import socket
import struct
import threading
import time

import pytest

from shoal import limits
from shoal.errors import BrokerUnreachableError, WireError
from shoal.limits import CHUNK_BYTES
from shoal.transport import mqtt
from shoal.transport.base import Connected, Disconnected, Message, TakenOver, TransportEvent, Unreached
from shoal.transport.inbox import Inbox
from shoal.transport.mqtt import MANY_ENDS, MqttTransport, backoff_s
from shoal.transport.mqtt_connection import LEAST_PACKET_BYTES, Publish
from shoal.transport.pacing import Pace
from tests.helpers.bad_links import read_packet
from tests.helpers.refusals import refused
from tests.helpers.scripted_broker import (
    ACCEPT_V3,
    ACCEPT_V5,
    NOT_AUTHORIZED_V5,
    REFUSE_VERSION_V3,
    V3,
    V5,
    Script,
    ScriptedBroker,
    hold,
)
from tests.helpers.waiting import until


@pytest.mark.parametrize(
    ("answer", "holds"), [(b"", False), (REFUSE_VERSION_V3, False), (b"", True)], ids=["hang up", "refuse", "silent"]
)
def test_old_broker_is_met_with_3_1_1(answer: bytes, holds: bool, broker, connect) -> None:
    """Whether it hangs up, says so or says nothing: the second greeting is 3.1.1 and comes within two seconds."""

    def script(connection: socket.socket, version: int) -> None:
        connection.sendall(ACCEPT_V3 if version == V3 else answer)
        if version == V3 or holds:
            hold(connection)

    one = broker(script)
    transport, events = connect(one.url)
    began = time.monotonic()
    transport.start(require=True)
    assert time.monotonic() - began < 2.0
    assert one.versions == [V5, V3]
    assert transport.protocol_version == "3.1.1"
    assert events.get(timeout=1) == Connected(session_present=False)


def test_refusal_is_not_tried_otherwise(broker, connect) -> None:
    """Wrong credentials are no matter of the version; the error says what the broker said, not the password."""
    one = broker(lambda connection, _version: connection.sendall(NOT_AUTHORIZED_V5))
    transport, _ = connect(one.url.replace("//", "//me:secret-word@"))
    with pytest.raises(BrokerUnreachableError, match="Not authorized") as failed:
        transport.start(require=True)
    assert one.versions[0] == V5
    assert V3 not in one.versions
    assert "secret-word" not in f"{failed.value} {failed.value.hint} {transport!r}"


def test_instant_ends_are_no_takeover(broker, connect) -> None:
    """A bad link ends them too: the transport goes on, and says what it sent last."""

    def script(connection: socket.socket, _version: int) -> None:
        connection.sendall(ACCEPT_V5)
        connection.recv(65536)

    one = broker(script)
    transport, events = connect(one.url)
    transport.start()
    reasons = []
    while len(reasons) < 3 * MANY_ENDS:
        event = events.get(timeout=10)
        if event == Connected(session_present=False):
            transport.publish("t", b"hello", qos=0)
        else:
            assert isinstance(event, Disconnected)
            reasons.append(event.reason)
    assert "the broker ends our connections" not in "".join(reasons[: MANY_ENDS - 1])
    assert all(
        "the broker ends our connections; the last packet sent: 22 bytes" in each for each in reasons[MANY_ENDS:]
    )


def test_takeover_code_is_believed_at_once(broker, connect) -> None:
    """The reason code of a takeover is believed at once."""
    one = broker(lambda connection, _version: connection.sendall(ACCEPT_V5 + bytes([0xE0, 2, 0x8E, 0])))
    transport, events = connect(one.url)
    transport.start()
    assert [events.get(timeout=5) for _ in range(2)] == [Connected(session_present=False), TakenOver()]
    assert len(one.versions) == 1
    transport.publish("t", b"the program has not heard of it yet")
    assert not transport.pending()


def test_other_reason_is_no_takeover(online) -> None:
    """A broker that says it shuts down may say so often; the reason reaches the owner."""
    _, events = online(lambda connection, _version: connection.sendall(ACCEPT_V5 + bytes([0xE0, 2, 0x8B, 0])))
    for _ in range(MANY_ENDS + 2):
        ended = events.get(timeout=5)
        assert isinstance(ended, Disconnected)
        assert "shutting down" in ended.reason
        assert events.get(timeout=5) == Connected(session_present=False)


@pytest.mark.parametrize(
    "noise",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes([0x30, 1, 0]), bytes([0x90, 0]), bytes(100)],
    ids=["http", "short publish", "short suback", "zeros"],
)
def test_noise_ends_the_connection_only(noise: bytes, broker, connect) -> None:
    """After three connections full of noise the fourth works."""

    def script(connection: socket.socket, version: int) -> None:
        if len(one.versions) >= 3:
            connection.sendall(ACCEPT_V5 if version == V5 else ACCEPT_V3)
            hold(connection)
        else:
            connection.sendall(noise)

    one = broker(script)
    transport, events = connect(one.url)
    transport.start()
    while isinstance(event := events.get(timeout=10), Unreached):
        pass
    assert event == Connected(session_present=False)


def test_unasked_retained_are_dropped(broker, connect) -> None:
    """The broker amqtt sends returning clients what others subscribed to, at QoS 0 and retained."""

    def script(connection: socket.socket, version: int) -> None:
        connection.sendall(ACCEPT_V5)
        for topic in (b"theirs", b"ours"):
            body = bytes([0, len(topic)]) + topic + bytes([0]) + b"payload"
            connection.sendall(bytes([0x31, len(body)]) + body)
        hold(connection)

    transport, events = connect(broker(script).url)
    transport.subscribe("ours")
    transport.start()
    expected = [Connected(session_present=False), Message("ours", b"payload", retained=True)]
    assert [events.get(timeout=5) for _ in range(2)] == expected


def test_the_brokers_own_limits_are_kept(broker, connect) -> None:
    """Receive maximum 2 and packets of at most 100 bytes: no third publish before an acknowledgement, no larger packet."""
    accept = bytes([0x20, 11, 0, 0, 8, 0x21, 0, 2, 0x27, 0, 0, 0, 100])
    received = bytearray()
    acknowledge = threading.Event()

    def script(connection: socket.socket, version: int) -> None:
        connection.sendall(accept)
        connection.settimeout(0.3)
        try:
            while True:
                received.extend(connection.recv(65536))
        except TimeoutError:
            acknowledge.set()
        connection.settimeout(None)
        hold(connection)

    transport, events = connect(broker(script).url)
    transport.publish("t", bytes(200))
    for number in range(5):
        transport.publish("t", b"%d" % number)
    transport.start()
    assert isinstance(events.get(timeout=5), Connected)
    assert acknowledge.wait(5)
    publish = bytes([0x32, 7, 0, 1]) + b"t"
    assert received.count(publish) == 2
    assert bytes(200) not in received
    assert transport.pending() == 5
    with pytest.raises(WireError, match="limit of 100"):
        transport.publish("t", bytes(100))


def test_only_new_requests_are_sent_anew(broker, connect, caplog: pytest.LogCaptureFixture) -> None:
    """A kept subscription asks for retained messages only if the session lost it; one made offline always does."""
    ready, done = threading.Event(), threading.Event()
    received = bytearray()

    def script(connection: socket.socket, version: int) -> None:
        if len(one.versions) == 1:
            connection.sendall(ACCEPT_V5 + bytes([0xE0, 2, 0x8B, 0]))
            return
        assert ready.wait(5)
        connection.sendall(ACCEPT_V5)
        while b"gone" not in received or b"anew" not in received or b"kept" not in received:
            received.extend(connection.recv(65536))
        done.set()
        hold(connection)

    caplog.set_level(logging.INFO, "shoal.transport.mqtt")
    one = broker(script)
    transport, events = connect(one.url)
    for topic_filter in ("kept", "anew", "gone"):
        transport.subscribe(topic_filter)
    transport.start()
    while not isinstance(events.get(timeout=5), Disconnected):
        pass
    transport.unsubscribe("gone")
    transport.unsubscribe("anew")
    transport.subscribe("anew")
    ready.set()
    assert done.wait(5)
    assert b"\0\4kept" + bytes([0x11]) in received
    assert b"\0\4anew" + bytes([0x01]) in received
    assert received[received.index(b"gone") - 7] == 0xA2
    told = [r.getMessage() for r in caplog.records]
    assert [("not connected" in line, line.endswith("again")) for line in told] == [(True, False), (False, True)]


def test_a_sink_may_publish_and_close() -> None:
    """Both work on the network thread itself, which close() must not wait for."""
    done = threading.Event()

    def script(connection: socket.socket, version: int) -> None:
        connection.sendall(ACCEPT_V5)
        hold(connection)
        done.set()

    def sink(event: TransportEvent) -> None:
        if isinstance(event, Connected):
            transport.publish("t", b"x")
            transport.close()

    one = ScriptedBroker(script)
    transport = MqttTransport(one.url, "client-1", sink)
    transport.start()
    assert done.wait(5)
    one.close()


def test_clean_end_is_no_failed_one(caplog: pytest.LogCaptureFixture) -> None:
    """A clean end looks like none that failed."""
    one = ScriptedBroker(lambda connection, _: (connection.sendall(ACCEPT_V5), hold(connection))[1])
    transport = MqttTransport(one.url, "client-1", lambda _: None)
    with caplog.at_level("INFO"):
        transport.start(require=True)
        transport.close()
    assert [r.getMessage() for r in caplog.records if r.name == "shoal.transport.mqtt"] == []
    one.close()


def test_backoff_doubles_with_jitter() -> None:
    """The backoff doubles to its bound with full jitter."""

    def highest(low: float, high: float) -> float:
        assert low == 0.0
        return high

    assert [backoff_s(attempt, 1.0, 60.0, highest) for attempt in (0, 1, 2, 5, 6, 7, 10_000)] == [
        1,
        2,
        4,
        32,
        60,
        60,
        60,
    ]


class PacedLink:
    """A link without a network, which takes everything."""

    has_room = True
    online = True
    max_packet_bytes = 1 << 20

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def takes(self, _message: Publish) -> bool:
        return True

    def publish(self, message: Publish) -> bool:
        self.sent.append(message.payload)
        return True


class Turns(Pace):
    """A pace that lets one message leave at a time."""

    def __init__(self) -> None:
        super().__init__(5000)
        self.taken: list[int] = []
        self.free = True

    def wait_s(self, _now_s: float) -> float:
        return 0.0 if self.free else 1.0

    def sent(self, size: int, _now_s: float) -> None:
        self.taken.append(size)
        self.free = False


def test_paced_transport_waits() -> None:
    """A paced transport hands over one message and waits; it still subscribes."""
    pace, link = Turns(), PacedLink()
    transport = MqttTransport("mqtt://localhost", "paced", print, pace=pace)
    for size in (10, 20, 30):
        transport.publish("t", bytes(size))
    for free, expected in ((True, 1), (False, 1), (True, 2)):
        pace.free = free
        transport._feed(link)  # type: ignore[arg-type]
        assert len(link.sent) == expected
    assert pace.taken == [10, 20]
    assert transport.chunk_bytes == 5000
    asked: list[tuple[str, ...]] = []
    link.subscribe = asked.append  # type: ignore[attr-defined]
    transport.subscribe("u")
    transport._feed(link)  # type: ignore[arg-type]
    assert (asked, len(link.sent)) == ([("u",)], 2)


def test_no_wake_up_is_lost(broker, monkeypatch):
    """Several threads publish while the network thread goes to sleep: no publish may wait for a later event."""
    monkeypatch.setattr(mqtt, "_TICK_S", 60.0)
    arrived, turns, threads = threading.Semaphore(0), 300, 4

    def script(connection, _version):
        connection.sendall(ACCEPT_V5)
        while data := connection.recv(65536):
            for _ in range(data.count(b"!")):
                arrived.release()

    events = queue.Queue()
    transport = MqttTransport(broker(script).url, "client-1", events.put)
    transport.start(require=True)
    start = threading.Barrier(threads + 1)

    def publish():
        for _ in range(turns):
            start.wait()
            transport.publish("t", b"!", qos=0)

    writers = [threading.Thread(target=publish) for _ in range(threads)]
    for writer in writers:
        writer.start()
    late = 0
    for _ in range(turns):
        start.wait()
        late += sum(not arrived.acquire(timeout=5.0) for _ in range(threads))
    for writer in writers:
        writer.join()
    transport.close()
    assert late == 0


def test_many_publishes_need_one_wake_up(broker, monkeypatch):
    """While the network thread is awake nobody wakes it."""
    written, events = [], queue.Queue()
    real = os.eventfd_write
    monkeypatch.setattr(os, "eventfd_write", lambda *args: written.append(args) or real(*args))

    def sink(event):
        events.put(event)
        if isinstance(event, Connected):
            for number in range(50):
                transport.publish("t", b"%d" % number, qos=0)

    received = bytearray()

    def script(connection, _version):
        connection.sendall(ACCEPT_V5)
        while data := connection.recv(65536):
            received.extend(data)

    transport = MqttTransport(broker(script).url, "client-1", sink)
    transport.start(require=True)
    until(lambda: b"49" in received)
    assert len(written) <= 1
    transport.close()


# -- Acknowledgement of received messages after they were handled, and the bounds on those that wait and that are on their way --


PUBACK = 0x40
CHUNK = bytes(100_000)


def publish_packet(payload: bytes, *, packet_id: int = 0) -> bytes:
    """Return an MQTT 5 PUBLISH on topic ``t``, at QoS 1 where there is a packet id."""
    body = b"\0\1t" + (struct.pack(">H", packet_id) if packet_id else b"") + b"\0" + payload
    size, length = bytearray(), len(body)
    while True:
        size.append(length % 128 | (128 if length >= 128 else 0))
        length //= 128
        if not length:
            return bytes([0x32 if packet_id else 0x30]) + bytes(size) + body


class Peer:
    """The broker's side of a connection: sends publishes, writes down the packet ids that were acknowledged."""

    def __init__(self, *publishes: bytes) -> None:
        self.publishes = publishes
        self.sent = 0
        self.acknowledged: list[int] = []
        self.connections = 0

    def __call__(self, connection: socket.socket, _version: int) -> None:
        self.connections += 1
        connection.sendall(ACCEPT_V5)
        threading.Thread(target=self._read, args=(connection,), daemon=True).start()
        with contextlib.suppress(OSError):
            for packet in self.publishes:
                connection.sendall(packet)
                self.sent += 1
            time.sleep(30)

    def _read(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := connection.recv(65536):
                while len(data) >= 4 and data[0] == PUBACK:
                    self.acknowledged.append(int.from_bytes(data[2:4], "big"))
                    data = data[2 + data[1] :]


def handle(inbox: Inbox, count: int) -> list[bytes]:
    """Handle messages until ``count`` were, and return their payloads."""
    done: list[bytes] = []
    end_s = time.monotonic() + 10
    while len(done) < count and time.monotonic() < end_s:
        for item in inbox.batch(0.05, most=count - len(done)):
            if isinstance(item, Message):
                done.append(item.payload)
    return done


@pytest.fixture
def handling(broker):
    """Start a transport whose messages are acknowledged once they were handled; return it and its inbox."""
    made: list[MqttTransport] = []

    def start(script: Script) -> tuple[MqttTransport, Inbox]:
        inbox = Inbox()
        options = {"manual_ack": True, "reconnect_min_s": 0.01, "reconnect_max_s": 0.05}
        made.append(MqttTransport(broker(script).url, "client-1", inbox.put, **options))
        made[-1].start()
        return made[-1], inbox

    yield start
    for transport in made:
        transport.close()


def test_acknowledged_once_handled(handling) -> None:
    """A message is acknowledged once it was handled."""
    peer = Peer(*(publish_packet(b"%d" % i, packet_id=i) for i in (1, 2, 3)))
    transport, inbox = handling(peer)
    until(lambda: transport.bytes_received == 3)
    time.sleep(0.1)
    assert peer.acknowledged == []
    assert handle(inbox, 2) == [b"1", b"2"]
    until(lambda: len(peer.acknowledged) == 2)
    assert handle(inbox, 1) == [b"3"]
    until(lambda: peer.acknowledged == [1, 2, 3])


def test_default_acknowledges_on_arrival(online) -> None:
    """By default a message is acknowledged on arrival."""
    peer = Peer(publish_packet(b"x", packet_id=7))
    _, events = online(peer)
    until(lambda: peer.acknowledged == [7])
    events.get(timeout=5).acknowledge()


@pytest.mark.parametrize("qos", [0, 1])
def test_reading_stops_while_too_much_waits(handling, qos: int) -> None:
    """A flood stays in the sockets' buffers and with its sender, whatever the window that it respects."""
    total = 4 * limits.MAX_UNHANDLED_BYTES // len(CHUNK)
    peer = Peer(*(publish_packet(CHUNK, packet_id=qos * (i + 1)) for i in range(total)))
    transport, inbox = handling(peer)
    until(lambda: transport.bytes_received >= 0.9 * limits.MAX_UNHANDLED_BYTES)
    time.sleep(0.3)
    assert transport.bytes_received <= limits.MAX_UNHANDLED_BYTES + limits.MAX_PACKET_BYTES
    assert peer.sent < total
    assert len(handle(inbox, total)) == total
    until(lambda: len(peer.acknowledged) == qos * total)


@pytest.mark.slow
def test_small_messages_have_an_overhead(handling) -> None:
    """Small messages count with their overhead."""
    total = 3 * limits.MAX_UNHANDLED_BYTES // limits.MESSAGE_OVERHEAD_BYTES
    transport, inbox = handling(Peer(publish_packet(b"x") * total))
    until(lambda: transport.bytes_received > 0.5 * limits.MAX_UNHANDLED_BYTES / limits.MESSAGE_OVERHEAD_BYTES)
    time.sleep(0.3)
    assert transport.bytes_received < 1.5 * limits.MAX_UNHANDLED_BYTES / limits.MESSAGE_OVERHEAD_BYTES
    assert len(handle(inbox, total)) == total


def test_earlier_connections_message(handling) -> None:
    """Its packet id may stand for another message by then, and the broker sends it again."""
    connections: list[list[int]] = []

    def script(connection: socket.socket, version: int) -> None:
        peer = Peer(publish_packet(b"%d" % len(connections), packet_id=1))
        connections.append(peer.acknowledged)
        if len(connections) == 1:
            connection.sendall(ACCEPT_V5 + peer.publishes[0])
            time.sleep(0.2)
            connection.shutdown(socket.SHUT_RDWR)
        else:
            peer(connection, version)
            hold(connection)

    transport, inbox = handling(script)
    until(lambda: transport.bytes_received == 2)
    assert handle(inbox, 1) == [b"0"]
    time.sleep(0.2)
    assert connections[1] == []
    assert handle(inbox, 1) == [b"1"]
    until(lambda: connections[1] == [1])


def test_close_leaves_unhandled_messages(handling) -> None:
    """The broker's acknowledgements of what we publish are read while the inbox is full."""
    total = 2 * limits.MAX_UNHANDLED_BYTES // len(CHUNK)
    transport, _ = handling(Peer(*(publish_packet(CHUNK) for _ in range(total))))
    until(lambda: transport.bytes_received >= 0.9 * limits.MAX_UNHANDLED_BYTES)
    began_s = time.monotonic()
    transport.close()
    assert time.monotonic() - began_s < 5


def test_packet_above_limit_ends_connection(online, caplog: pytest.LogCaptureFixture) -> None:
    """Only its beginning is read: a broker could otherwise make a device hold 256 MB.

    It is no takeover: a stranger on a broker without MQTT 5 could otherwise end the whole fleet with one retained message.
    """
    peer = Peer(publish_packet(bytes(64 * limits.MAX_PACKET_BYTES)))
    transport, events = online(peer)
    until(lambda: peer.connections > MANY_ENDS + 1)
    assert (peer.sent, transport.bytes_received) == (0, 0)
    assert "over the limit of 1048576" in caplog.text
    seen = [events.get() for _ in range(events.qsize())]
    assert TakenOver() not in seen
    assert Disconnected("the broker sent a packet above the limit") in seen


# -- What is published at QoS 0 over MQTT: sent once, and counted as long as it is on its way --


def test_at_qos_0_nothing_is_waited_for(online) -> None:
    """Neither the window nor the queue counts what the broker's machine has received."""
    received = bytearray()
    everything = threading.Event()

    def script(connection: socket.socket, version: int) -> None:
        connection.sendall(ACCEPT_V5)
        while received.count(publish) < 100:
            received.extend(connection.recv(65536))
        everything.set()
        hold(connection)

    publish = bytes([0x30, 8, 0, 1]) + b"t" + bytes([0]) + b"once"
    transport, _ = online(script, max_queued_bytes=400)
    for _ in range(100):
        transport.publish("t", b"once", qos=0)
    assert everything.wait(5)
    until(lambda: transport.pending() == 0)
    transport.publish("t", bytes(400))


def test_qos_0_counts_until_it_is_taken(online) -> None:
    """What has left the program may lie in the system's buffer for long: a slow link is not idle."""
    read = threading.Event()

    def script(connection: socket.socket, version: int) -> None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.sendall(ACCEPT_V5)
        assert read.wait(5)
        hold(connection)

    transport, _ = online(script)
    transport.publish("t", bytes(150_000), qos=0)
    until(lambda: not transport._link._unwritten)
    time.sleep(0.1)
    assert transport.pending() == 1
    read.set()
    until(lambda: transport.pending() == 0)


def test_qos_0_not_taken_is_given_up(broker, connect) -> None:
    """It is not sent again, its bytes are free for others, and what was to be acknowledged still comes."""
    full, received = threading.Event(), bytearray()

    def script(connection: socket.socket, version: int) -> None:
        if len(one.versions) == 1:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(ACCEPT_V5)
            assert full.wait(5)
            return
        connection.sendall(ACCEPT_V5)
        while b"assured" not in received:
            received.extend(connection.recv(65536))
        received.extend(b"end")
        hold(connection)

    one = broker(script)
    transport, events = connect(one.url, max_queued_bytes=16 << 20)
    transport.start()
    assert isinstance(events.get(timeout=5), Connected)
    for _ in range(31):
        transport.publish("t", b"once" * (1 << 17), qos=0)
    transport.publish("t", b"assured")
    time.sleep(0.2)
    assert transport.pending() > 1
    full.set()
    until(lambda: received.endswith(b"end"))
    assert b"once" not in received
    assert transport.pending() == 1
    for _ in range(31):  # 15.5 MB of the 16 that may wait
        transport.publish("t", bytes(1 << 19))


# -- Brokers that take small packets only and do not say so, and brokers without retained messages --


WAIT_S = 20.0
TOO_LARGE, HANG_UP, SAY_SO = "packet too large", "hang up", "disconnect with a code"


class SmallBroker:
    """Acknowledges publishes at QoS 1 of at most so many bytes, and refuses others in one of three ways."""

    def __init__(self, most: int, how: str) -> None:
        self.most, self.how = most, how
        self.taken: list[int] = []
        self.refused: list[int] = []
        self.fits = threading.Event()

    def __call__(self, connection: socket.socket, _version: int) -> None:
        connection.sendall(ACCEPT_V5)
        with contextlib.suppress(OSError, EOFError):
            while True:
                head, packet = read_packet(connection)
                if head[0] >> 4 != 3:
                    continue
                packet_id = packet[3:5]  # the topic is one letter
                if len(packet) <= self.most:
                    self.taken.append(len(packet))
                    if head[0] & 2:
                        connection.sendall(bytes([0x40, 2]) + packet_id)
                    continue
                self.refused.append(len(packet))
                if self.how == TOO_LARGE:
                    connection.sendall(bytes([0x40, 3]) + packet_id + b"\x95")
                    continue
                if self.how == SAY_SO:
                    connection.sendall(bytes([0xE0, 1, 0x95]))
                return


@pytest.mark.parametrize("how", [TOO_LARGE, HANG_UP, SAY_SO])
@pytest.mark.parametrize("most", [100_000, 65_536, 9_000])
def test_chunks_shrink_until_they_are_taken(how: str, most: int, broker, connect) -> None:
    """Each time the connection comes back, the program divides again; small messages are not lost."""
    script = SmallBroker(most, how)
    transport, events = connect(broker(script).url)
    transport.start()
    for _ in range(30):
        if isinstance(events.get(timeout=WAIT_S), Connected):
            size = transport.chunk_bytes
            transport.publish("t", bytes(size))
            transport.publish("t", b"small")
            if size < most - 100:
                break
    refused = len(script.refused)
    while transport.pending():
        with contextlib.suppress(queue.Empty):
            events.get(timeout=0.05)
    # Not by Disconnected: those of the sizes before may be read late.
    assert script.refused[refused:] == [], "the broker takes the last size"
    assert most / 2 - 2048 <= size < most
    assert len(b"\0\1t\0\1\0small") in script.taken
    assert max(script.taken) >= size


def test_single_drop_shrinks_nothing(broker, connect) -> None:
    """Nor one that drops for ever, once the broker has taken such a packet."""
    script = SmallBroker(CHUNK_BYTES // 2, HANG_UP)
    one = broker(script)
    transport, events = connect(one.url)
    transport.start()
    assert isinstance(events.get(timeout=WAIT_S), Connected)
    transport.publish("t", bytes(CHUNK_BYTES))
    assert isinstance(events.get(timeout=WAIT_S), Disconnected)
    script.most = 2 * CHUNK_BYTES
    assert isinstance(events.get(timeout=WAIT_S), Connected)
    while transport.pending():
        threading.Event().wait(0.01)
    script.most = CHUNK_BYTES // 2
    for _ in range(4):
        transport.publish("t", bytes(CHUNK_BYTES))
        assert isinstance(events.get(timeout=WAIT_S), Disconnected)
        assert isinstance(events.get(timeout=WAIT_S), Connected)
    assert transport.chunk_bytes == CHUNK_BYTES


def test_at_qos_0_refused_size_is_found_too(broker, connect) -> None:
    """Nobody acknowledges such a publish: after a lost connection the next is sent at QoS 1."""
    script = SmallBroker(65_536, HANG_UP)
    transport, events = connect(broker(script).url)
    transport.start()
    for _ in range(30):
        if isinstance(events.get(timeout=WAIT_S), Connected):
            if transport.chunk_bytes < script.most:
                break
            transport.publish("t", bytes(transport.chunk_bytes), qos=0)
    assert LEAST_PACKET_BYTES < transport.chunk_bytes < script.most


@pytest.mark.parametrize(
    "answer", [bytes([0x20, 5, 0, 0, 2, 0x25, 0]), bytes([0x20, 3, 0, 0x9A, 0])], ids=["property", "refused"]
)
def test_missing_retained_messages_are_named(broker, connect, answer: bytes) -> None:
    """A broker without retained messages is named."""
    transport, _ = connect(broker(lambda connection, _version: connection.sendall(answer)).url)
    with refused(BrokerUnreachableError, "keeps no retained messages", hint="retain_available true"):
        transport.start(require=True)


def test_late_word_of_retained_is_named(online) -> None:
    """A broker may say so once it is connected."""
    _, events = online(lambda connection, _version: connection.sendall(ACCEPT_V5 + bytes([0xE0, 1, 0x9A])))
    ended = events.get(timeout=WAIT_S)
    assert isinstance(ended, Disconnected)
    assert "keeps no retained messages" in ended.reason
