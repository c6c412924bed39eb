"""Files under a passphrase: opened by it alone, for one purpose, and never by a file that asks for impossible work."""

import pickle
import struct

import pytest
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

from crypto.seal.passphrase import Lock, is_locked
from shoal.errors import ConfigError, IntegrityError, UntrustedError

WORD = b"correct horse battery"
LOCK = Lock(WORD)
LOCKED = LOCK.close("owner.key", b"secret")


def test_same_passphrase_opens():
    """What is locked is opened by the same passphrase."""
    assert is_locked(LOCKED)
    assert not is_locked(b"shoal-identity-1\n")
    assert LOCK.open("owner.key", LOCKED) == b"secret"
    assert b"secret" not in LOCKED
    assert LOCK.close("owner.key", b"secret") != LOCKED


def test_the_layout_is_argon2id_and_aes_gcm():
    """Opened without our code."""
    head, nonce, sealed = LOCKED[:32], LOCKED[32:44], LOCKED[44:]
    magic, memory, passes, lanes = struct.unpack("<4sIII", head[:16])
    assert (magic, memory, passes, lanes) == (b"SHP1", 65536, 3, 4)
    key = Argon2id(salt=head[16:], length=32, iterations=passes, lanes=lanes, memory_cost=memory).derive(WORD)
    assert AESGCM(key).decrypt(nonce, sealed, head + b"owner.key") == b"secret"


def test_another_passphrase_opens_nothing():
    """Another passphrase purpose or byte opens nothing."""
    with pytest.raises(UntrustedError, match="passphrase is wrong"):
        Lock(WORD + b"x").open("owner.key", LOCKED)
    with pytest.raises(UntrustedError):
        LOCK.open("secrets.bin", LOCKED)
    with pytest.raises(UntrustedError):
        LOCK.open("owner.key", LOCKED[:-1] + bytes([LOCKED[-1] ^ 1]))


@pytest.mark.parametrize(
    "numbers", [(1 << 21, 3, 4), (65536, 17, 4), (65536, 3, 17), (65536, 0, 4), (0, 3, 4), (31, 3, 4)]
)
def test_impossible_work_is_refused(numbers):
    """Impossible work is refused before it begins."""
    with pytest.raises(IntegrityError, match="impossible work"):
        LOCK.open("owner.key", b"SHP1" + struct.pack("<III", *numbers) + LOCKED[16:])


@pytest.mark.parametrize(
    "data", [b"", b"SHP1", LOCKED[:59], b"x" + LOCKED], ids=["nothing", "mark alone", "short", "shifted"]
)
def test_what_is_not_locked_file_is_refused(data):
    with pytest.raises(IntegrityError, match="not a file"):
        LOCK.open("owner.key", data)


def test_passphrase_is_long_and_hidden():
    """A passphrase is long enough and shows nowhere."""
    with pytest.raises(ConfigError, match="at least 8"):
        Lock(b"1234567")
    assert "horse" not in repr(LOCK)
    with pytest.raises(TypeError):
        pickle.dumps(LOCK)
