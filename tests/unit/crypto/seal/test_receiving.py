"""A device's receiving keys: numbered without gaps, erased in order, stored whole, and never shown."""

import pickle

import pytest

from crypto.seal.receiving import ReceivingSecrets
from shoal import limits
from shoal.errors import ConfigError, IntegrityError
from shoal.util.files import write_private


def test_new_device_counts_keys_from_one():
    """A new device numbers its keys from one."""
    held = ReceivingSecrets.generate()
    assert (held.public.first, held.public.last) == (1, limits.RECEIVING_KEYS)
    for number in range(1, limits.RECEIVING_KEYS + 1):
        assert held.private(number).public_key().public_bytes_raw() == held.public.key(number)
    assert held.private(0) is held.private(limits.RECEIVING_KEYS + 1) is None


@pytest.mark.parametrize("number", [1, 3, limits.RECEIVING_KEYS])
def test_delivered_keys_are_erased(number):
    """The key of a delivery and those before it are erased."""
    held = ReceivingSecrets.generate()
    left = held.after(number)
    assert (left.first, len(left.public.keys)) == (number + 1, limits.RECEIVING_KEYS)
    stay = held.public.keys[number:]
    assert left.public.keys[: len(stay)] == stay
    assert not set(left.public.keys[len(stay) :]) & set(held.public.keys)
    assert left.private(number) is None


def test_an_earlier_delivery_erases_nothing():
    held = ReceivingSecrets.generate().after(3)
    assert held.after(2) == held


def test_keys_come_back_from_their_file(tmp_path):
    held = ReceivingSecrets.generate().after(4)
    held.save(tmp_path / "d" / "k")
    assert ReceivingSecrets.load(tmp_path / "d" / "k").public == held.public
    assert (tmp_path / "d" / "k").stat().st_mode & 0o777 == 0o600
    held.after(5).save(tmp_path / "d" / "k")
    data = (tmp_path / "d" / "k").read_bytes()
    assert held.private(5).private_bytes_raw() not in data
    assert held.private(6).private_bytes_raw() in data


@pytest.mark.parametrize("junk", [b"", b"junk", b"shoal-receiving-1\n", b"shoal-receiving-1\n" + bytes(4 + 8 * 32)])
def test_damaged_and_earlier_files(tmp_path, junk):
    """A damaged file and the eight keys of an earlier version are refused."""
    write_private(tmp_path / "k", junk)
    with pytest.raises(IntegrityError, match="is damaged, or an earlier version of Shoal made it"):
        ReceivingSecrets.load(tmp_path / "k")


def test_readable_file_is_refused(tmp_path):
    """A file that others can read is refused."""
    ReceivingSecrets.generate().save(tmp_path / "k")
    (tmp_path / "k").chmod(0o644)
    with pytest.raises(ConfigError, match="readable by others"):
        ReceivingSecrets.load(tmp_path / "k")


def test_keys_are_not_printed_or_pickled():
    """Keys are neither printed nor pickled."""
    held = ReceivingSecrets.generate()
    assert repr(held) == "ReceivingSecrets(first=1, <secret>)"
    with pytest.raises(TypeError, match="can't be pickled"):
        pickle.dumps(held)
