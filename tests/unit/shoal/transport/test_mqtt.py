"""The MQTT transport against brokers that behave badly: each test scripts one on a socket."""

import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable

import pytest

from shoal.errors import BrokerUnreachableError, WireError
from shoal.transport import mqtt
from shoal.transport.base import Connected, Disconnected, Message, TakenOver, TransportEvent, Unreached
from shoal.transport.mqtt import MANY_ENDS, MqttTransport, backoff_s
from shoal.transport.mqtt_connection import Publish
from shoal.transport.pacing import Pace
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


def hang_up(connection: socket.socket, version: int) -> None:
    if version == V3:
        connection.sendall(ACCEPT_V3)
        hold(connection)


def refuse_version(connection: socket.socket, version: int) -> None:
    connection.sendall(ACCEPT_V3 if version == V3 else REFUSE_VERSION_V3)
    if version == V3:
        hold(connection)


def stay_silent(connection: socket.socket, version: int) -> None:
    if version == V3:
        connection.sendall(ACCEPT_V3)
    hold(connection)


@pytest.mark.parametrize("script", [hang_up, refuse_version, stay_silent])
def test_old_broker_is_met_with_3_1_1(
    script: Script, broker: Callable[..., ScriptedBroker], connect: Callable[..., tuple[MqttTransport, queue.Queue]]
) -> None:
    """Whether it hangs up, says so or says nothing: the second greeting is 3.1.1 and comes within two seconds."""
    one = broker(script)
    transport, events = connect(one.url)
    began = time.monotonic()
    transport.start(require=True)
    assert time.monotonic() - began < 2.0
    assert one.versions == [V5, V3]
    assert transport.protocol_version == "3.1.1"
    assert events.get(timeout=1) == Connected(session_present=False)


@pytest.mark.parametrize("expiry_s", [0, 60])
def test_over_3_1_1_a_session_is_kept_or_not(
    expiry_s: int, broker: Callable[..., ScriptedBroker], connect: Callable[..., tuple[MqttTransport, queue.Queue]]
) -> None:
    """Whoever comes once, under a name that never comes again, leaves nothing behind."""
    one = broker(refuse_version)
    transport, _ = connect(one.url, session_expiry_s=expiry_s)
    transport.start(require=True)
    assert one.clean[-1] is (expiry_s == 0)


def test_refusal_is_not_tried_otherwise(
    broker: Callable[..., ScriptedBroker], connect: Callable[..., tuple[MqttTransport, queue.Queue]]
) -> None:
    """Wrong credentials are no matter of the version; the error says what the broker said, not the password."""
    one = broker(lambda connection, _version: connection.sendall(NOT_AUTHORIZED_V5))
    transport, _ = connect(one.url.replace("//", "//me:secret-word@"))
    with pytest.raises(BrokerUnreachableError, match="Not authorized") as failed:
        transport.start(require=True)
    assert one.versions[0] == V5
    assert V3 not in one.versions
    assert "secret-word" not in f"{failed.value} {failed.value.hint} {transport!r}"


def test_instant_ends_are_no_takeover(
    broker: Callable[..., ScriptedBroker], connect: Callable[..., tuple[MqttTransport, queue.Queue]]
) -> None:
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


def test_takeover_code_is_believed_at_once(
    broker: Callable[..., ScriptedBroker], connect: Callable[..., tuple[MqttTransport, queue.Queue]]
) -> None:
    """The reason code of a takeover is believed at once."""
    one = broker(lambda connection, _version: connection.sendall(ACCEPT_V5 + bytes([0xE0, 2, 0x8E, 0])))
    transport, events = connect(one.url)
    transport.start()
    assert events.get(timeout=5) == Connected(session_present=False)
    assert events.get(timeout=5) == TakenOver()
    assert len(one.versions) == 1
    transport.publish("t", b"the program has not heard of it yet")
    assert not transport.pending()


def test_other_reason_is_no_takeover(
    broker: Callable[..., ScriptedBroker], connect: Callable[..., tuple[MqttTransport, queue.Queue]]
) -> None:
    """A broker that says it shuts down may say so often; the reason reaches the owner."""
    one = broker(lambda connection, _version: connection.sendall(ACCEPT_V5 + bytes([0xE0, 2, 0x8B, 0])))
    transport, events = connect(one.url)
    transport.start()
    for _ in range(MANY_ENDS + 2):
        assert events.get(timeout=5) == Connected(session_present=False)
        ended = events.get(timeout=5)
        assert isinstance(ended, Disconnected)
        assert "shutting down" in ended.reason


@pytest.mark.parametrize(
    "noise",
    [b"HTTP/1.1 400 Bad Request\r\n\r\n", bytes([0x30, 1, 0]), bytes([0x90, 0]), bytes(100)],
    ids=["http", "short publish", "short suback", "zeros"],
)
def test_noise_ends_the_connection_only(
    noise: bytes, broker: Callable[..., ScriptedBroker], connect: Callable[..., tuple[MqttTransport, queue.Queue]]
) -> None:
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


def test_unasked_retained_are_dropped(
    broker: Callable[..., ScriptedBroker], connect: Callable[..., tuple[MqttTransport, queue.Queue]]
) -> None:
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
    assert events.get(timeout=5) == Connected(session_present=False)
    assert events.get(timeout=5) == Message("ours", b"payload", retained=True)


def test_the_brokers_own_limits_are_kept(
    broker: Callable[..., ScriptedBroker], connect: Callable[..., tuple[MqttTransport, queue.Queue]]
) -> None:
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


def test_only_new_requests_are_sent_anew(
    broker: Callable[..., ScriptedBroker],
    connect: Callable[..., tuple[MqttTransport, queue.Queue]],
    caplog: pytest.LogCaptureFixture,
) -> None:
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
    """A paced transport hands over one message and waits."""
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


def test_a_paced_transport_still_subscribes() -> None:
    pace, link = Turns(), PacedLink()
    pace.free = False
    asked: list[tuple[str, ...]] = []
    link.subscribe = asked.append  # type: ignore[attr-defined]
    transport = MqttTransport("mqtt://localhost", "paced", print, pace=pace)
    transport.publish("t", b"waits")
    transport.subscribe("u")
    transport._feed(link)  # type: ignore[arg-type]
    assert (asked, link.sent) == ([("u",)], [])


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
