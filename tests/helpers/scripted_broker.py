"""A broker on a socket that follows a test's script."""

import contextlib
import socket
import threading
from collections.abc import Callable

ACCEPT_V3 = bytes([0x20, 2, 0, 0])
ACCEPT_V5 = bytes([0x20, 3, 0, 0, 0])
REFUSE_VERSION_V3 = bytes([0x20, 2, 0, 1])
NOT_AUTHORIZED_V5 = bytes([0x20, 3, 0, 0x87, 0])
V3, V5 = 4, 5

Script = Callable[[socket.socket, int], None]


class ScriptedBroker:
    """Accepts connections, reads the greeting and hands the socket and the client's MQTT version to a script."""

    def __init__(self, script: Script) -> None:
        self.versions: list[int] = []
        self.clean: list[bool] = []
        self._script = script
        self._server = socket.create_server(("127.0.0.1", 0))
        self.url = f"mqtt://127.0.0.1:{self._server.getsockname()[1]}"
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._server.accept()
            except OSError:
                return
            threading.Thread(target=self._serve, args=(connection,), daemon=True).start()

    def _serve(self, connection: socket.socket) -> None:
        with connection:
            greeting = connection.recv(65536)
            if len(greeting) > 8:
                self.versions.append(greeting[8])
                self.clean.append(bool(greeting[9] & 2))
                self._script(connection, greeting[8])

    def close(self) -> None:
        self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


def hold(connection: socket.socket) -> None:
    """Read until the client disconnects or the connection breaks."""
    with contextlib.suppress(ConnectionResetError):
        while connection.recv(65536):
            pass
