"""Addresses to listen on, tokens and host names."""

import pytest

from aggregator.page.access import LEAST_TOKEN, Access, Listen
from shoal.errors import ConfigError

TOKEN = "0123456789abcdef"
LOOPBACK, OPEN = Listen("127.0.0.1", 9464), Listen("0.0.0.0", 9464)


def token_file(path, text, mode=0o600):
    path.write_text(text)
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("text", "host", "port", "loopback"),
    [
        ("127.0.0.1:9464", "127.0.0.1", 9464, True),
        ("localhost:0", "localhost", 0, True),
        ("[::1]:80", "::1", 80, True),
        ("0.0.0.0:65535", "0.0.0.0", 65535, False),
        ("[::]:1", "::", 1, False),
        ("server.example:443", "server.example", 443, False),
    ],
)
def test_an_address_is_parsed(text, host, port, loopback):
    listen = Listen.parse(text)
    assert (listen.host, listen.port, listen.is_loopback, str(listen)) == (host, port, loopback, text)


@pytest.mark.parametrize(
    "text",
    ["", "9464", ":9464", "127.0.0.1", "127.0.0.1:", "127.0.0.1:x", "::1:80", "[host]:80", "a:65536", "a:-1", "a:٣"],
)
def test_another_form_is_refused(text):
    with pytest.raises(ConfigError, match="no address to listen on") as caught:
        Listen.parse(text)
    assert "127.0.0.1:9464" in caught.value.hint


def test_loopback_needs_no_token():
    """Loopback needs no token and other addresses do."""
    assert Access.load(LOOPBACK, None).admits("")
    with pytest.raises(ConfigError, match=r"0\.0\.0\.0:9464 is open to other machines and needs a token") as caught:
        Access.load(OPEN, None)
    assert "umask 077" in caught.value.hint


def test_a_token_comes_from_a_private_file(tmp_path):
    access = Access.load(OPEN, token_file(tmp_path / "t", f"  {TOKEN}\n"))
    assert access.admits(f"Bearer {TOKEN}")
    assert not access.admits("")
    assert not Access.load(LOOPBACK, tmp_path / "t").admits(""), "it also protects a loopback address"
    assert TOKEN not in repr(access)


def test_readable_token_is_refused(tmp_path):
    """A token that others can read is refused."""
    with pytest.raises(ConfigError, match="mode"):
        Access.load(OPEN, token_file(tmp_path / "t", TOKEN, mode=0o644))
    with pytest.raises(ConfigError):
        Access.load(OPEN, tmp_path / "missing")


@pytest.mark.parametrize(
    "text", ["", "x" * (LEAST_TOKEN - 1), "x" * 513, "two words of a token", "ümläüt-ümläüt-ümläüt"]
)
def test_malformed_token_is_not_repeated(tmp_path, text):
    """A token of another form is refused and not repeated."""
    with pytest.raises(ConfigError, match="one word of 16 to 512 ASCII characters") as caught:
        Access.load(LOOPBACK, token_file(tmp_path / "t", text))
    assert not text or text not in str(caught.value)


def test_host_name_matters_on_loopback_alone():
    assert Access(OPEN, TOKEN.encode()).admits_host("server.example:9464")
    assert not Access(LOOPBACK).admits_host("server.example:9464")
    assert Access(LOOPBACK).admits_host("[::1]")


def test_binary_credentials_are_refused():
    """Credentials that are no text are refused."""
    access = Access(OPEN, TOKEN.encode())
    assert not access.admits("Bearer \udcff")
    assert not access.admits("Basic " + "=" * 7)
