"""A device's receiving keys: numbered without gaps, erased in order, stored whole, and never shown."""

import pickle

import pytest

from crypto.seal.receiving import ReceivingSecrets
from shoal import limits
from shoal.errors import ConfigError, IntegrityError
from shoal.util.files import write_private


def test_a_new_device_numbers_its_keys_from_one():
    held = ReceivingSecrets.generate()
    assert (held.public.first, held.public.last) == (1, limits.RECEIVING_KEYS)
    for number in range(1, limits.RECEIVING_KEYS + 1):
        assert held.private(number).public_key().public_bytes_raw() == held.public.key(number)
    assert held.private(0) is held.private(limits.RECEIVING_KEYS + 1) is None


@pytest.mark.parametrize("number", [1, 3, limits.RECEIVING_KEYS])
def test_the_key_of_a_delivery_and_those_before_it_are_erased(number):
    held = ReceivingSecrets.generate()
    left = held.after(number)
    assert left.first == number + 1
    assert len(left.public.keys) == limits.RECEIVING_KEYS
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
def test_a_damaged_file_and_the_eight_keys_of_an_earlier_version_are_refused(tmp_path, junk):
    write_private(tmp_path / "k", junk)
    with pytest.raises(IntegrityError, match="is damaged, or an earlier version of Shoal made it"):
        ReceivingSecrets.load(tmp_path / "k")


def test_a_file_that_others_can_read_is_refused(tmp_path):
    ReceivingSecrets.generate().save(tmp_path / "k")
    (tmp_path / "k").chmod(0o644)
    with pytest.raises(ConfigError, match="readable by others"):
        ReceivingSecrets.load(tmp_path / "k")


def test_keys_are_neither_printed_nor_pickled():
    held = ReceivingSecrets.generate()
    assert repr(held) == "ReceivingSecrets(first=1, <secret>)"
    with pytest.raises(TypeError, match="can't be pickled"):
        pickle.dumps(held)
