"""MQTT over websockets, and connections through an HTTP or SOCKS proxy: the sockets that paho's client gets from us.

paho has the frames of websockets. Added here: a deadline and a bound of the handshake, which paho reads byte by byte without
either; a bound of a frame; fast masks; and what `Link` asks of a socket. A proxy gets `CONNECT host:port`, and TLS goes through
it to the broker.

Example: ``connected(("broker.example", 443), "http://proxy:3128", 5.0)`` returns a socket to the broker.
"""

from __future__ import annotations

import base64
import os
import socket
import time
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import unquote, urlsplit

from paho.mqtt.client import WebsocketConnectionError, _WebsocketWrapper

from shoal import limits
from shoal.address import PROXY_PORTS

if TYPE_CHECKING:
    import ssl

HANDSHAKE_BYTES: Final = 16 * 1024
"""Most bytes of a server's or a proxy's answer to the handshake."""

FRAME_BYTES: Final = 2 * limits.MAX_PACKET_BYTES
"""Largest frame of a server: it may hold several packets, and is kept until it is whole."""


class WebSocket(_WebsocketWrapper):
    """A websocket over a connected socket, non-blocking once its handshake is done.

    Args:
        sock: a TCP or TLS connection.
        host, port, path: of the server, for its handshake.
        tls: whether ``sock`` is encrypted.
        timeout_s: for the whole handshake.

    Raises:
        OSError: the server answers too late, too much, or refuses.
    """

    def __init__(self, sock: Any, host: str, port: int, path: str, *, tls: bool, timeout_s: float) -> None:
        hurried: Any = _Hurried(sock, timeout_s)
        try:
            super().__init__(hurried, host, port, tls, path, None)
        except (WebsocketConnectionError, ValueError, IndexError) as error:
            raise ConnectionError(
                f"the server accepts no websocket at {path}: {hurried.first_line or error}"
            ) from error
        self._socket = sock

    def setsockopt(self, level: int, option: int, value: int) -> None:
        """Set an option of the connection."""
        self._socket.setsockopt(level, option, value)

    def shutdown(self, how: int) -> None:
        """Shut the connection down."""
        self._socket.shutdown(how)

    def _buffered_read(self, length: int) -> bytearray:
        if length > FRAME_BYTES:
            raise ConnectionError("a frame above the limit")
        return super()._buffered_read(length)

    def _create_frame(self, opcode: int, data: bytearray, do_masking: int = 1) -> bytearray:  # noqa: ARG002
        """Return a frame; every frame of a client is masked, those that answer a ping or a close too (RFC 6455, 5.1).

        Such an answer never divides a frame that is half sent: it is put behind it, and an empty frame is returned.
        """
        frame = masked_frame(opcode, bytes(data), os.urandom(4))
        if opcode == self.OPCODE_BINARY or not self._sendbuffer:
            return frame
        self._sendbuffer += frame
        return bytearray()


def masked_frame(opcode: int, data: bytes, key: bytes) -> bytearray:
    """Return the only frame of a message, masked with a key of four bytes; the mask is one long exclusive or."""
    size = len(data)
    if size < 126:
        head = bytes((0x80 | opcode, 0x80 | size))
    elif size < 1 << 16:
        head = bytes((0x80 | opcode, 0x80 | 126)) + size.to_bytes(2, "big")
    else:
        head = bytes((0x80 | opcode, 0x80 | 127)) + size.to_bytes(8, "big")
    stream = (key * (size // 4 + 1))[:size]
    mixed = int.from_bytes(data, "big") ^ int.from_bytes(stream, "big")
    return bytearray(head + key + mixed.to_bytes(size, "big"))


def expiry_of(connection: ssl.SSLSocket) -> int:
    """Return the unix time in seconds at which the certificate of a server expires, after its handshake."""
    from ssl import cert_time_to_seconds  # loaded already, where there is TLS

    return int(cert_time_to_seconds(str((connection.getpeercert() or {})["notAfter"])))


class _Hurried:
    """A socket during a handshake: all that is received arrives before a deadline, and is not too much."""

    def __init__(self, sock: Any, timeout_s: float) -> None:
        self._sock, self._by_s = sock, time.monotonic() + timeout_s
        self.received = bytearray()

    @property
    def first_line(self) -> str:
        """The first line of what was received, for messages."""
        return self.received.split(b"\n")[0][:80].decode("ascii", "replace").strip()

    def send(self, data: bytes) -> int:
        self._sock.sendall(data)
        return len(data)

    def recv(self, most: int) -> bytes:
        left_s = self._by_s - time.monotonic()
        if left_s <= 0:
            raise TimeoutError("the handshake takes too long")
        if len(self.received) >= HANDSHAKE_BYTES:
            raise ConnectionError("the answer to the handshake is too long")
        self._sock.settimeout(left_s)
        data: bytes = self._sock.recv(most)
        self.received += data
        return data


def connected(address: tuple[str, int], proxy: str, timeout_s: float) -> socket.socket:
    """Return a TCP connection to ``address``, through ``proxy`` if it is not empty.

    Args:
        address: host and port of the broker.
        proxy: ``http://[user:password@]host[:port]`` or ``socks5://...``, which needs PySocks.
        timeout_s: for the connection, and again for the proxy's answer.

    Raises:
        OSError: no connection, or the proxy refuses. The message names the proxy without its password.
    """
    if not proxy:
        return socket.create_connection(address, timeout=timeout_s)
    parts = urlsplit(proxy)
    place = parts.hostname or "", parts.port or PROXY_PORTS[parts.scheme]
    user, password = unquote(parts.username or ""), unquote(parts.password or "")
    try:
        if parts.scheme == "socks5":
            return _through_socks(address, place, user, password, timeout_s)
        sock = socket.create_connection(place, timeout=timeout_s)
    except OSError as error:
        raise ConnectionError(f"the proxy {place[0]}:{place[1]} can't be reached: {error}") from error
    try:
        _connect(sock, address, f"{user}:{password}" if user else "", timeout_s)
    except OSError as error:
        sock.close()
        raise ConnectionError(f"the proxy {place[0]}:{place[1]} makes no connection: {error}") from error
    return sock


def _connect(sock: socket.socket, address: tuple[str, int], credentials: str, timeout_s: float) -> None:
    hurried = _Hurried(sock, timeout_s)
    host = f"[{address[0]}]" if ":" in address[0] else address[0]
    lines = [f"CONNECT {host}:{address[1]} HTTP/1.1", f"Host: {host}:{address[1]}"]
    if credentials:
        lines.append(f"Proxy-Authorization: Basic {base64.b64encode(credentials.encode()).decode()}")
    hurried.send("\r\n".join([*lines, "", ""]).encode())
    while not hurried.received.endswith(b"\r\n\r\n"):
        if not hurried.recv(1):  # byte by byte: what follows belongs to the broker
            raise ConnectionError(f"it ended the connection: {hurried.first_line or 'no answer'}")
    if hurried.received.split(b" ", 2)[1:2] != [b"200"]:
        raise ConnectionError(hurried.first_line or "no answer")
    sock.settimeout(timeout_s)


def _through_socks(
    address: tuple[str, int], place: tuple[str, int], user: str, password: str, timeout_s: float
) -> socket.socket:
    from importlib import import_module

    try:
        socks: Any = import_module("socks")
    except ImportError:
        raise ConnectionError("a SOCKS proxy needs PySocks: pip install PySocks") from None
    made: socket.socket = socks.create_connection(
        address,
        timeout=timeout_s,
        proxy_type=socks.SOCKS5,
        proxy_addr=place[0],
        proxy_port=place[1],
        proxy_rdns=True,
        proxy_username=user or None,
        proxy_password=password or None,
    )
    return made
