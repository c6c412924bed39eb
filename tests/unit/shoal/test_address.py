"""Broker addresses: every form that is allowed, and no password anywhere it could leak."""

from pathlib import Path

import pytest

from shoal.address import BrokerAddress
from shoal.errors import ConfigError


@pytest.mark.parametrize(
    "url",
    [
        "",
        "host",
        "host:1883",
        "http://host",
        "mqtt://",
        "mqtt://:1883",
        "mqtt://u:secret-word@host:port",
        "mqtt://u:secret-word@host:70000",
        "mqtt://host/path",
        "mqtt://host?x=1",
        "mqtt://host#f",
        "mqtt://[::1",
        "mqtt://h\u00f6st",
        "mqtt://" + "a" * 64,
        "wss://host/a b",
        "wss://host/\u00f6",
        "wss://host/m?x=1",
    ],
)
def test_other_form_is_not_repeated(url: str) -> None:
    """Any other form is refused without repeating it."""
    with pytest.raises(ConfigError) as refused:
        BrokerAddress.parse(url)
    assert "secret-word" not in f"{refused.value} {refused.value.hint}"
    assert refused.value.hint


def test_certificates_need_tls_and_their_key(tmp_path: Path) -> None:
    """A missing or broken certificate file is a configuration error."""
    file = tmp_path / "x.pem"
    with pytest.raises(ConfigError, match="without TLS"):
        BrokerAddress.parse("mqtt://host", ca_file=file)
    with pytest.raises(ConfigError, match="needs its key"):
        BrokerAddress.parse("mqtts://host", cert_file=file)
    with pytest.raises(ConfigError, match="TLS files"):
        BrokerAddress.parse("mqtts://host", ca_file=file).tls_context()
    file.write_text("no certificate")
    with pytest.raises(ConfigError, match="TLS files"):
        BrokerAddress.parse("mqtts://host", ca_file=file).tls_context()


def test_tls_verifies_the_broker_by_default() -> None:
    import ssl

    context = BrokerAddress.parse("mqtts://host").tls_context()
    assert context is not None
    assert context.check_hostname
    assert context.verify_mode == ssl.CERT_REQUIRED
    assert context.minimum_version >= ssl.TLSVersion.TLSv1_2
    assert BrokerAddress.parse("mqtt://host").tls_context() is None


@pytest.mark.parametrize(
    ("url", "address", "loopback", "text"),
    [
        ("mqtt://broker.local", BrokerAddress("broker.local", 1883), False, "mqtt://broker.local:1883"),
        ("mqtts://broker.local/", BrokerAddress("broker.local", 8883, tls=True), False, "mqtts://broker.local:8883"),
        (
            "mqtts://us%40er:p%3Aw%2Fd@10.0.0.1:18",
            BrokerAddress("10.0.0.1", 18, tls=True, username="us@er", password="p:w/d"),
            False,
            "mqtts://10.0.0.1:18",
        ),
        ("mqtt://[::1]:1884", BrokerAddress("::1", 1884), True, "mqtt://[::1]:1884"),
        ("mqtt://127.0.0.1", BrokerAddress("127.0.0.1", 1883), True, "mqtt://127.0.0.1:1883"),
        ("mqtt://localhost", BrokerAddress("localhost", 1883), True, "mqtt://localhost:1883"),
        ("ws://10.0.0.1", BrokerAddress("10.0.0.1", 80, path="/mqtt"), False, "ws://10.0.0.1:80/mqtt"),
        (
            "wss://u:p-word@broker.example:8443/site/mqtt/",
            BrokerAddress("broker.example", 8443, tls=True, username="u", password="p-word", path="/site/mqtt"),
            False,
            "wss://broker.example:8443/site/mqtt",
        ),
    ],
)
def test_each_form_is_read(url: str, address: BrokerAddress, loopback: bool, text: str) -> None:
    """User, password and port are decoded; neither text form shows user or password."""
    found = BrokerAddress.parse(url)
    assert found == address
    assert (found.is_loopback, str(found)) == (loopback, text)
    assert [secret for secret in ("us@er", "p:w/d", "p-word") if secret in f"{found} {found!r}"] == []


@pytest.mark.parametrize(
    ("url", "no_proxy", "used"),
    [
        ("mqtts://broker.example", "", True),
        ("wss://broker.example", "other.example", True),
        ("wss://broker.example", ".example", False),
        ("wss://broker.example", "broker.example", False),
        ("wss://broker.example", "*", False),
        ("mqtt://broker.example", "", False),
        ("ws://broker.example", "", False),
        ("mqtts://localhost", "", False),
        ("mqtts://192.168.0.7", "", False),
        ("mqtts://10.1.2.3", "", False),
        ("mqtts://site.local", "", False),
        ("mqtts://93.184.216.34", "", True),
    ],
)
def test_the_environments_proxy(monkeypatch: pytest.MonkeyPatch, url: str, no_proxy: str, used: bool) -> None:
    monkeypatch.setenv("https_proxy", "http://us:secret-word@proxy:3128")
    monkeypatch.setenv("no_proxy", no_proxy)
    address = BrokerAddress.parse(url)
    assert not address.proxy, "an address is parsed in the same way everywhere"
    address = address.routed()
    assert address.proxy_name == ("http://proxy:3128" if used else "")
    assert "secret-word" not in f"{address} {address!r}"


def test_a_wrong_proxy_hinders_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """A given proxy is for each address."""
    monkeypatch.setenv("https_proxy", "proxy:3128")
    with pytest.raises(ConfigError, match="the proxy's URL is not valid"):
        BrokerAddress.parse("mqtts://broker.example").routed()
    assert BrokerAddress.parse("mqtt://10.0.0.1", proxy="socks5://proxy").proxy_name == "socks5://proxy:1080"


@pytest.mark.parametrize("proxy", ["proxy:3128", "https://proxy", "http://", "http://proxy:99999", "http://proxy/x"])
def test_other_proxies_are_not_repeated(proxy: str) -> None:
    with pytest.raises(ConfigError, match="the proxy's URL is not valid"):
        BrokerAddress.parse("mqtts://host", proxy=proxy)


def test_port_443_is_shared_by_name() -> None:
    """ALPN: brokers in the cloud have MQTT beside HTTPS."""
    offered = []

    class Context:
        minimum_version = None

        def set_alpn_protocols(self, names: list[str]) -> None:
            offered.extend(names)

    import ssl

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl, "create_default_context", lambda **_files: Context())
        for url in ("mqtts://host:443", "mqtts://host", "wss://host"):
            BrokerAddress.parse(url).tls_context()
    assert offered == ["mqtt", "x-amzn-mqtt-ca"]
