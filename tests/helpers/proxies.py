"""An HTTP proxy for CONNECT, and a link that can be cut in the middle of what it passes on."""

import contextlib
import socket
import threading


class ConnectProxy:
    """Passes bytes on after ``CONNECT host:port``.

    Args:
        answer: its answer to CONNECT.
        credentials: what Proxy-Authorization has to be; empty if none is asked for.

    Attributes:
        asked: the first line of each request.
        left: bytes that are passed to clients before their connection is cut; None for no limit. It may be changed.
    """

    def __init__(self, *, answer=b"HTTP/1.1 200 ok\r\n\r\n", credentials=b""):
        self.answer, self.credentials, self.asked, self.left = answer, credentials, [], None
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        threading.Thread(target=self._accept, daemon=True).start()

    def close(self):
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        with contextlib.suppress(OSError), client:
            head = b""
            while not head.endswith(b"\r\n\r\n"):
                head += client.recv(1)
            lines = head.split(b"\r\n")
            self.asked.append(lines[0].decode())
            if self.credentials and b"Proxy-Authorization: Basic " + self.credentials not in lines:
                client.sendall(b"HTTP/1.1 407 Proxy Authentication Required\r\n\r\n")
                return
            client.sendall(self.answer)
            host, _, port = lines[0].split()[1].decode().rpartition(":")
            with socket.create_connection((host, int(port))) as server:
                up = threading.Thread(target=self._pass, args=(client, server, False), daemon=True)
                up.start()
                self._pass(server, client, True)

    def _pass(self, source, target, counted):
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if counted and self.left is not None:
                    target.sendall(data[: self.left])
                    self.left -= len(data)
                    if self.left <= 0:
                        self.left = None
                        break
                else:
                    target.sendall(data)
            for each in (source, target):
                each.shutdown(socket.SHUT_RDWR)
