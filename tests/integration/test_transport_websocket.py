"""Websockets and proxies, against a real broker: large packets, lost links, refusals."""

import base64
import time

import pytest

from shoal.address import BrokerAddress
from shoal.errors import BrokerUnreachableError
from shoal.transport.base import Connected, Disconnected
from shoal.transport.local_broker import find_mosquitto, free_port
from shoal.transport.probe import certificate_expiry
from tests.helpers.certificates import Authority
from tests.helpers.mqtt_clients import Client, settle
from tests.helpers.places import mosquitto
from tests.helpers.proxies import ConnectProxy

pytestmark = [
    pytest.mark.broker,
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]


@pytest.fixture(scope="module")
def broker(tmp_path_factory):
    """Return ports of a broker's websockets, without and with TLS, and of TLS alone; and the file of its authority."""
    folder = tmp_path_factory.mktemp("broker")
    authority = Authority(folder, "ours")
    authority.issue("server", server=True)
    plain, tls, bare = free_port(), free_port(), free_port()
    secure = f"certfile {folder}/server.pem", f"keyfile {folder}/server.key"
    lines = (
        "allow_anonymous true",
        *(f"listener {plain} 127.0.0.1", "protocol websockets"),
        *(f"listener {tls} 127.0.0.1", "protocol websockets", *secure),
        *(f"listener {bare} 127.0.0.1", *secure),
    )
    with mosquitto(folder, bare, *lines):
        yield plain, tls, bare, authority.file


@pytest.fixture
def client(request):
    """Return a function that makes and starts a client, subscribed to one topic."""

    def make(address, name, topic="t"):
        made = Client(address, name)
        request.addfinalizer(made.transport.close)
        made.transport.start(require=True)
        made.until(Connected)
        made.transport.subscribe(topic)
        settle(made, topic)
        return made

    return make


@pytest.fixture
def proxy(request):
    def make(**options):
        made = ConnectProxy(**options)
        request.addfinalizer(made.close)
        return made

    return make


def exchange(one, sizes=(0, 1, 125, 126, 66_000)):
    for size in sizes:
        payload = bytes(i % 251 for i in range(size))
        one.transport.publish("t", payload)
        assert one.message().payload == payload


def test_packets_of_every_size(broker, client):
    """Without and with TLS."""
    exchange(client(BrokerAddress.parse(f"ws://127.0.0.1:{broker[0]}"), "ws"))
    exchange(client(BrokerAddress.parse(f"wss://localhost:{broker[1]}/mqtt", ca_file=broker[3]), "wss"))


def test_many_messages_at_once(broker, client):
    one = client(BrokerAddress.parse(f"ws://127.0.0.1:{broker[0]}"), "many")
    for i in range(50):
        one.transport.publish("t", bytes([i]) * 200)
    assert [one.message().payload for _ in range(50)] == [bytes([i]) * 200 for i in range(50)]


@pytest.mark.parametrize("left", [3, 20, 9_000])
def test_a_link_cut_within_a_frame(broker, client, proxy, left):
    between = proxy()
    address = BrokerAddress.parse(f"ws://127.0.0.1:{broker[0]}", proxy=between.url)
    one = client(address, f"cut-{left}")
    between.left = left
    one.transport.publish("t", b"x" * 20_000)
    one.until(Disconnected)
    one.until(Connected)
    assert one.message().payload == b"x" * 20_000


@pytest.mark.parametrize("scheme", ["mqtts", "wss"])
def test_tls_goes_through_a_proxy(broker, client, proxy, scheme):
    port = broker[2] if scheme == "mqtts" else broker[1]
    through = proxy(credentials=base64.b64encode(b"us:p:w"))
    url = through.url.replace("//", "//us:p%3Aw@")
    address = BrokerAddress.parse(f"{scheme}://localhost:{port}", ca_file=broker[3], proxy=url)
    exchange(client(address, f"{scheme}-proxy"), (10, 20_000))
    assert through.asked[0] == f"CONNECT localhost:{port} HTTP/1.1"
    assert certificate_expiry(address) > time.time()
    assert "p:w" not in f"{address!r} {address.proxy_name}"


def test_a_proxy_that_refuses_is_named(broker, proxy):
    through = proxy(credentials=b"other")
    address = BrokerAddress.parse(f"mqtts://localhost:{broker[2]}", proxy=through.url.replace("//", "//us:secret@"))
    with pytest.raises(
        BrokerUnreachableError, match=f"the proxy 127.0.0.1:{through.port} makes no connection"
    ) as caught:
        Client(address, "no").transport.start(require=True)
    assert "407" in str(caught.value)
    assert "secret" not in str(caught.value)
