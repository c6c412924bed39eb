"""A proxy in front of a broker, for bad links and for brokers that refuse what mosquitto takes."""

import contextlib
import socket
import threading

from tests.helpers.scripted_broker import REFUSE_VERSION_V3, V5

CONNECT, PUBLISH = 1, 3


class BadLink:
    """Passes MQTT on to the broker at ``port``.

    Args:
        port: the broker's.
        only_3_1_1: refuse MQTT 5.
        most_bytes: end a connection at a publish whose packet is longer than this; None for no limit.
        life_s: reset each connection after this time; None for a good link. It may be changed while the proxy runs.
    """

    def __init__(self, port, *, only_3_1_1=False, most_bytes=None, life_s=None):
        self.port, self.only_3_1_1, self.most_bytes, self.life_s = port, only_3_1_1, most_bytes, life_s
        self.connections = 0
        self.refused = []
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"mqtt://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self):
        while True:
            try:
                client, _ = self._server.accept()
            except OSError:
                return
            self.connections += 1
            try:
                broker = socket.create_connection(("127.0.0.1", self.port))
            except OSError:
                client.close()
                continue
            for task in ((self._up, client, broker), (self._down, broker, client)):
                threading.Thread(target=task[0], args=task[1:], daemon=True).start()
            if self.life_s is not None:
                threading.Timer(self.life_s, _reset, (client, broker)).start()

    def _up(self, client, broker):
        with contextlib.suppress(OSError, EOFError):
            while True:
                head, packet = read_packet(client)
                kind = head[0] >> 4
                if kind == CONNECT and self.only_3_1_1 and packet[6] == V5:
                    client.sendall(REFUSE_VERSION_V3)
                    break
                if kind == PUBLISH and self.most_bytes is not None and len(packet) > self.most_bytes:
                    self.refused.append(len(packet))
                    break
                broker.sendall(head + packet)
        _reset(client, broker)

    @staticmethod
    def _down(broker, client):
        with contextlib.suppress(OSError):
            while data := broker.recv(1 << 16):
                client.sendall(data)
        _reset(client, broker)


def read_packet(source):
    """Return the fixed header of a packet, and the rest."""
    head = bytearray(_exactly(source, 1))
    length = shift = 0
    while True:
        head += (byte := _exactly(source, 1))
        length |= (byte[0] & 127) << shift
        shift += 7
        if not byte[0] & 128:
            return bytes(head), _exactly(source, length)


def _exactly(source, count):
    data = b""
    while len(data) < count:
        more = source.recv(count - len(data))
        if not more:
            raise EOFError
        data += more
    return data


def _reset(*sockets):
    for each in sockets:
        with contextlib.suppress(OSError):
            each.shutdown(socket.SHUT_RDWR)
        each.close()
