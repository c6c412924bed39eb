"""Websockets: handshakes with a deadline, frames as RFC 6455 has them, and answers that divide no frame."""

import base64
import contextlib
import hashlib
import os
import queue
import socket
import threading

import pytest

from shoal.transport import websocket
from shoal.transport.base import Connected, Disconnected, Message
from shoal.transport.mqtt import MqttTransport
from shoal.transport.websocket import WebSocket, connected, masked_frame
from tests.helpers.scripted_broker import ACCEPT_V5, hold


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    yield ours, theirs
    ours.close()
    theirs.close()


def opened(sock, timeout_s=5.0):
    return WebSocket(sock, "host", 80, "/mqtt", tls=False, timeout_s=timeout_s)


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (b"HTTP/1.1 404 not here\r\n\r\n", "accepts no websocket at /mqtt: HTTP/1.1 404 not here"),
        (b"HTTP/1.1 101 yes\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n\r\n", "accepts no websocket"),
        (b"HTTP/1.1 101 yes\r\nSec-WebSocket-Accept:x\r\n\r\n", "accepts no websocket"),
        (b"", "accepts no websocket"),
        (b"x" * 20_000, "too long"),
    ],
    ids=["404", "no key", "wrong key", "nothing", "endless"],
)
def test_other_answers_are_refused(pair, answer, message):
    ours, theirs = pair
    theirs.sendall(answer)
    theirs.shutdown(socket.SHUT_WR)
    with pytest.raises(OSError, match=message):
        opened(ours)


def test_the_handshake_has_one_deadline(pair, monkeypatch):
    """A server that sends a byte now and then does not hold the client."""
    ours, theirs = pair
    times = iter([0.0, *(float(i) for i in range(100))])
    monkeypatch.setattr(websocket.time, "monotonic", lambda: next(times))
    theirs.sendall(b"H" * 100)
    with pytest.raises(TimeoutError, match="too long"):
        opened(ours, timeout_s=3.0)


@pytest.mark.parametrize("size", [0, 1, 125, 126, 65535, 65536])
def test_frames_are_masked(size):
    data, key = os.urandom(size), b"\x01\x02\x03\x04"
    frame = masked_frame(2, data, key)
    head = 2 + (0 if size < 126 else 2 if size < 65536 else 8)
    assert frame[0] == 0x82
    assert frame[1] & 0x80
    assert frame[head : head + 4] == key
    assert bytes(b ^ key[i % 4] for i, b in enumerate(frame[head + 4 :])) == data


def made(sock):
    """Return a websocket without its handshake."""
    one = WebSocket.__new__(WebSocket)
    one.connected, one._ssl, one._socket = True, False, sock
    one._sendbuffer, one._readbuffer = bytearray(), bytearray()
    one._requested_size = one._payload_head = one._readbuffer_head = 0
    return one


def test_a_pong_does_not_divide_a_frame(pair):
    ours, theirs = pair
    ours.setblocking(False)
    one = made(ours)
    ours.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4096)
    data = os.urandom(200_000)
    assert one.send(data) == 0, "half sent"
    theirs.sendall(b"\x89\x02hi")
    with pytest.raises(BlockingIOError):
        one.recv(10)
    theirs.settimeout(5)
    received = bytearray()
    while one._sendbuffer:
        try:
            one.send(data)
        except BlockingIOError:
            received += theirs.recv(65536)
    ours.close()
    while more := theirs.recv(65536):
        received += more
    frame = 2 + 8 + 4 + len(data)
    assert len(received) == frame + 2 + 4 + 2
    assert received[frame] == 0x8A, "the pong follows"


def framed(data):
    return bytes([0x82, len(data)]) + data


def published(payload):
    return bytes([0x30, 4 + len(payload), 0, 1]) + b"t\0" + payload


def serve(listener, streams):
    """Accept a websocket for each stream, and send it byte by byte; the last connection stays."""
    for stream in streams:
        client, _ = listener.accept()
        with client, contextlib.suppress(OSError):
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += client.recv(1)
            (key,) = (
                line[19:].strip() for line in head.split(b"\r\n") if line.lower().startswith(b"sec-websocket-key:")
            )
            accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
            answer = b"HTTP/1.1 101 Switching\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Accept: "
            client.sendall(answer + accept + b"\r\n\r\n")
            client.recv(4096)
            for byte in stream:
                client.sendall(bytes([byte]))
            if stream is streams[-1]:
                hold(client)


def test_partial_frames_and_a_cut_one():
    """Packets across frames, frames with more than one packet, byte by byte; then the link is cut within a frame."""
    first, second, lost, later = (published(word) for word in (b"one", b"two", b"lost", b"later"))
    whole = framed(ACCEPT_V5[:2]) + framed(ACCEPT_V5[2:]) + framed(first[:3]) + framed(first[3:] + second)
    events = queue.SimpleQueue()
    with socket.create_server(("127.0.0.1", 0)) as listener:
        streams = (whole + framed(lost)[:5], framed(ACCEPT_V5 + later))
        threading.Thread(target=serve, args=(listener, streams), daemon=True).start()
        url = f"ws://127.0.0.1:{listener.getsockname()[1]}"
        transport = MqttTransport(url, "frames", events.put, reconnect_min_s=0.01, reconnect_max_s=0.02)
        transport.start(require=True)
        found = [events.get(timeout=10) for _ in range(6)]
        transport.close()
    assert [type(event) for event in found] == [Connected, Message, Message, Disconnected, Connected, Message]
    assert [event.payload for event in found if isinstance(event, Message)] == [b"one", b"two", b"later"]


def test_a_huge_frame_ends_the_connection(pair):
    ours, theirs = pair
    one = made(ours)
    theirs.sendall(b"\x82\x7f" + (1 << 40).to_bytes(8, "big"))
    assert one.recv(websocket.FRAME_BYTES + 1) == b""


def test_a_proxy_that_is_away_is_named():
    with pytest.raises(ConnectionError, match=r"the proxy 127\.0\.0\.1:1 can't be reached"):
        connected(("host", 1883), "http://us:secret@127.0.0.1:1", 1.0)


def test_socks_needs_its_package(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "socks", None)
    with pytest.raises(ConnectionError, match="needs PySocks"):
        connected(("host", 1883), "socks5://127.0.0.1:1", 1.0)
