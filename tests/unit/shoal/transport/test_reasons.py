"""Why a connection fails, in plain words: against a real TLS server in this process, and proxies that refuse."""

import contextlib
import queue
import re
import socket
import ssl
import threading

import pytest

from shoal.address import BrokerAddress
from shoal.errors import BrokerUnreachableError
from shoal.transport.base import Unreached
from shoal.transport.local_broker import free_port
from shoal.transport.mqtt import MqttTransport
from shoal.transport.probe import certificate_expiry
from tests.helpers.certificates import Authority
from tests.helpers.proxies import ConnectProxy


class TlsServer:
    """Shakes hands by TLS and then says nothing; ``chain`` may be changed while it runs."""

    def __init__(self, folder, *, asks=None):
        self.folder, self.chain = folder, "server"
        self._asks = asks
        self._server = socket.create_server(("127.0.0.1", 0))
        self.port = self._server.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self):
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._server.accept()
                threading.Thread(target=self._serve, args=(client,), daemon=True).start()

    def _serve(self, client):
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(self.folder / f"{self.chain}.pem", self.folder / f"{self.chain}.key")
        if self._asks:
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_verify_locations(self._asks)
        with contextlib.suppress(OSError), context.wrap_socket(client, server_side=True) as connection:
            while connection.recv(4096):
                pass

    def close(self):
        with contextlib.suppress(OSError):
            self._server.shutdown(socket.SHUT_RDWR)
        self._server.close()


@pytest.fixture(scope="module")
def authority(tmp_path_factory):
    made = Authority(tmp_path_factory.mktemp("tls"), "ours")
    for name, since_days in (("server", 0.0), ("expired", -30.0), ("early", 30.0)):
        made.issue(name, server=True, since_days=since_days)
    made.issue("client")
    return made


@pytest.fixture
def server(authority, request):
    made = TlsServer(authority.file.parent, asks=getattr(request, "param", None) and authority.file)
    yield made
    made.close()


def greet_by_http(server):
    with contextlib.suppress(OSError), server.accept()[0] as client:
        client.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        client.recv(4096)


def refusal(address):
    """Return the error of a transport that can't connect."""
    transport = MqttTransport(address, "reasons", lambda _event: None)
    with pytest.raises(BrokerUnreachableError) as caught:
        transport.start(require=True)
    return caught.value


@pytest.mark.parametrize(
    ("chain", "host", "known", "reason", "hint"),
    [
        (
            "expired",
            "localhost",
            True,
            r"has expired, by this machine's clock, 20\d\d-",
            "issue another .* or set this",
        ),
        (
            "early",
            "localhost",
            True,
            r"is not valid yet, by this machine's clock, 20\d\d-",
            "^set this machine's clock",
        ),
        ("server", "localhost", False, "of a CA that is not known here", "the setting `ca`"),
        ("server", "127.0.0.1", True, "not for the name 127.0.0.1", "the name in the certificate"),
    ],
)
def test_refused_certificates(server, authority, chain, host, known, reason, hint):
    """The same words from a connection and from `doctor`'s look at the certificate."""
    server.chain = chain
    address = BrokerAddress.parse(f"mqtts://{host}:{server.port}", ca_file=authority.file if known else None)
    error = refusal(address)
    assert re.search(reason, str(error))
    assert re.search(hint, error.hint)
    with pytest.raises(BrokerUnreachableError, match=reason):
        certificate_expiry(address)


def test_a_ca_of_a_line_is_trusted(server, authority):
    """Alone: with another one, the server is unknown."""
    ours, other = (
        ssl.PEM_cert_to_DER_cert(file.read_text()) for file in (authority.file, authority.file.parent / "client.pem")
    )
    assert certificate_expiry(BrokerAddress.parse(f"mqtts://localhost:{server.port}", ca=ours)) > 0
    with pytest.raises(BrokerUnreachableError, match="not known here"):
        certificate_expiry(BrokerAddress.parse(f"mqtts://localhost:{server.port}", ca=other))


@pytest.mark.parametrize("server", [True], indirect=True)
def test_client_certificate_is_missing(server, authority):
    """Over TLS 1.3 the broker refuses it only once the handshake is over."""
    error = refusal(BrokerAddress.parse(f"mqtts://localhost:{server.port}", ca_file=authority.file))
    assert "the broker asks for a client certificate" in str(error)
    assert "cert and key" in error.hint


def test_no_tls_no_listener_no_name(authority):
    with socket.create_server(("127.0.0.1", 0)) as plain:
        threading.Thread(target=greet_by_http, args=(plain,), daemon=True).start()
        error = refusal(BrokerAddress.parse(f"mqtts://localhost:{plain.getsockname()[1]}", ca_file=authority.file))
    assert "no TLS is spoken" in str(error)
    error = refusal(BrokerAddress.parse(f"mqtt://127.0.0.1:{free_port()}"))
    assert "nothing listens at port" in str(error)
    assert error.hint == "start the broker, or check the port"
    error = refusal(BrokerAddress.parse("mqtt://no-such-host.invalid"))
    assert "the name no-such-host.invalid is not known" in str(error)


@pytest.mark.parametrize(
    ("answer", "hint"),
    [(b"407 Authentication Required", "user and password"), (b"403 No", "443"), (b"418 Tea", "check the address")],
)
def test_a_proxy_refuses(answer, hint):
    proxy = ConnectProxy(answer=b"HTTP/1.1 " + answer + b"\r\n\r\n")
    try:
        error = refusal(BrokerAddress.parse("mqtts://broker.example", proxy=proxy.url))
    finally:
        proxy.close()
    assert answer.decode() in str(error)
    assert hint in error.hint


def test_the_newest_reason_is_told(server, authority):
    """Each new reason once, while the transport goes on trying."""
    events = queue.SimpleQueue()
    server.chain = "expired"
    address = BrokerAddress.parse(f"mqtts://localhost:{server.port}", ca_file=authority.file)
    transport = MqttTransport(address, "reasons", events.put, reconnect_min_s=0.01, reconnect_max_s=0.02)
    transport.start()
    try:
        assert "has expired" in events.get(timeout=10).reason
        server.close()
        found = events.get(timeout=10)
        while "has expired" in found.reason:  # the clock that it names went on
            found = events.get(timeout=10)
        assert found == Unreached(
            f"nothing listens at port {server.port}: Connection refused; start the broker, or check the port"
        )
        with pytest.raises(queue.Empty):
            events.get(timeout=0.2)
    finally:
        transport.close()
