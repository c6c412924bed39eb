"""Users of the broker: passwords that follow from one stored secret, addresses with them, and mosquitto's password lines."""

import base64
import hashlib

import pytest

from shoal.address import BrokerAddress
from shoal.errors import ConfigError, IntegrityError
from shoal.owner.keys.broker_users import SECRET_BYTES, USERS_FILE, USERS_HINT, BrokerUsers
from shoal.util.files import write_private
from tests.helpers.refusals import refused


@pytest.fixture
def users(tmp_path):
    write_private(tmp_path / USERS_FILE, bytes(range(SECRET_BYTES)))
    return BrokerUsers(tmp_path)


URL = "mqtts://broker.example:8884"


def test_secret_is_stored_once(tmp_path):
    """A second draw would lock out every party that has joined. Before the first there are no users."""
    one, other = BrokerUsers(tmp_path), BrokerUsers(tmp_path)
    assert not one
    assert one.address(URL, "dev-1") == URL
    assert not (tmp_path / USERS_FILE).exists()
    one.make()
    secret = (tmp_path / USERS_FILE).read_bytes()
    assert one
    assert (tmp_path / USERS_FILE).stat().st_mode & 0o777 == 0o600
    other.make()
    one.make()
    assert (tmp_path / USERS_FILE).read_bytes() == secret
    assert other.password("dev-1") == one.password("dev-1") == BrokerUsers(tmp_path).password("dev-1")
    another = BrokerUsers(tmp_path / "another")
    another.make()
    assert another.password("dev-1") != one.password("dev-1")
    (tmp_path / USERS_FILE).chmod(0o644)
    with pytest.raises(ConfigError, match=USERS_FILE):
        BrokerUsers(tmp_path)


def test_password_is_same_in_every_version(users):
    """A known answer: another derivation would lock out every party that has joined. Each user has its own."""
    passwords = {users.password(name) for name in ("dev-1", "dev-2", "owner", "enrol")}
    assert users.password("dev-1") == "iTtZNtl9GTcooE-S8Jm7xiQZ"
    assert [len(password) for password in passwords] == [24] * 4
    assert repr(users).endswith("<secret>)")
    assert "\\x01" not in repr(users)


def test_address_has_the_new_user(users):
    """An address has user and password in place of earlier ones."""
    for url in (URL, "mqtts://old:word@broker.example:8884"):
        found = BrokerAddress.parse(users.address(url, "dev-1"))
        assert (found.username, found.password) == ("dev-1", users.password("dev-1"))
        assert (found.host, found.port, found.tls) == ("broker.example", 8884, True)


def test_password_verifies_as_in_mosquitto(users):
    """A password line verifies as mosquitto does."""
    lines = [users.hashed("dev-1") for _ in range(2)]
    assert lines[0] != lines[1], "the salt is drawn for each line"
    for line in lines:
        name, _, rest = line.partition(":")
        _, kind, iterations, salt, digest = rest.split("$")
        assert (name, kind) == ("dev-1", "7")
        expected = hashlib.pbkdf2_hmac(
            "sha512", users.password("dev-1").encode(), base64.b64decode(salt, validate=True), int(iterations)
        )
        assert base64.b64decode(digest, validate=True) == expected
        assert users.password("dev-1") not in line


@pytest.mark.parametrize("size", [0, SECRET_BYTES - 1, SECRET_BYTES + 1])
def test_secret_of_another_length_is_damage(tmp_path, size):
    """A secret of another length is damage and not replaced."""
    write_private(tmp_path / USERS_FILE, bytes(size))
    with refused(IntegrityError, f"{USERS_FILE} is damaged: it has {size} bytes, not 32", hint_is=USERS_HINT):
        BrokerUsers(tmp_path)
    assert (tmp_path / USERS_FILE).read_bytes() == bytes(size)
