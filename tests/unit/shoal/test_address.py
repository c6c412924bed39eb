"""Broker addresses: every form that is allowed, and no password anywhere it could leak."""

from pathlib import Path

import pytest

from shoal.address import BrokerAddress
from shoal.errors import ConfigError


def test_short_form_gets_the_standard_port() -> None:
    assert BrokerAddress.parse("mqtt://broker.local") == BrokerAddress("broker.local", 1883)
    assert BrokerAddress.parse("mqtts://broker.local/") == BrokerAddress("broker.local", 8883, tls=True)


def test_user_and_port_are_decoded() -> None:
    """User password and port are read and decoded."""
    address = BrokerAddress.parse("mqtts://us%40er:p%3Aw%2Fd@10.0.0.1:18")
    assert (address.username, address.password, address.host, address.port) == ("us@er", "p:w/d", "10.0.0.1", 18)


def test_ipv6_address_keeps_its_brackets() -> None:
    """An ipv6 address keeps its brackets in the text."""
    address = BrokerAddress.parse("mqtt://[::1]:1884")
    assert address.host == "::1"
    assert address.is_loopback
    assert str(address) == "mqtt://[::1]:1884"


def test_only_this_machine_is_loopback() -> None:
    assert BrokerAddress.parse("mqtt://127.0.0.1").is_loopback
    assert BrokerAddress.parse("mqtt://localhost").is_loopback
    assert not BrokerAddress.parse("mqtt://192.168.0.1").is_loopback


def test_text_shows_no_user_or_password() -> None:
    """Neither text form shows user or password."""
    address = BrokerAddress.parse("mqtt://somebody:secret-word@host:1")
    assert "secret-word" not in f"{address} {address!r}"
    assert "somebody" not in f"{address} {address!r}"


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
    ],
)
def test_other_form_is_not_repeated(url: str) -> None:
    """Any other form is refused without repeating it."""
    with pytest.raises(ConfigError) as refused:
        BrokerAddress.parse(url)
    shown = f"{refused.value} {refused.value.hint}"
    assert "secret-word" not in shown
    assert refused.value.hint


def test_certificates_need_tls_and_their_key(tmp_path: Path) -> None:
    file = tmp_path / "x.pem"
    with pytest.raises(ConfigError, match="without TLS"):
        BrokerAddress.parse("mqtt://host", ca_file=file)
    with pytest.raises(ConfigError, match="needs its key"):
        BrokerAddress.parse("mqtts://host", cert_file=file)


def test_broken_certificate_is_config_error(tmp_path: Path) -> None:
    """A missing or broken certificate file is a configuration error."""
    broken = tmp_path / "broken.pem"
    broken.write_text("no certificate")
    for file in (tmp_path / "missing.pem", broken):
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
