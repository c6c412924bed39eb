"""The owner's book of receiving keys: never back to older ones, one key for each draw of secrets, and the last key."""

import pytest

from crypto.seal.passphrase import Lock
from shoal import limits
from shoal.errors import IntegrityError, UntrustedError, WireError
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.keys.receiving import RECEIVING_FILE, ReceivingBook
from shoal.protocol.documents import ReceivingKeys
from tests.helpers.refusals import refused

LAST = limits.RECEIVING_KEYS


def keys(first, mark=b"k"):
    return ReceivingKeys(first, tuple(mark + bytes([n]) * 31 for n in range(LAST)))


@pytest.fixture
def book():
    return ReceivingBook().admitting({"dev-1": keys(1), "dev-2": keys(1)})


def test_the_book_comes_back_from_its_bytes(book):
    book = book.advanced(["dev-2"]).taking({"dev-1": keys(4)})
    assert ReceivingBook.from_bytes(book.to_bytes()) == book
    with pytest.raises(WireError):
        ReceivingBook.from_bytes(b"junk")


def test_older_keys_are_never_taken(book):
    """The same secrets go to the same key: a later delivery of them must not be below the device's first key."""
    book = book.taking({"dev-1": keys(5)})
    for first in (4, 5):
        assert book.taking({"dev-1": keys(first, b"x")}) == book
    assert book.taking({"dev-1": keys(6, b"x")}).of("dev-1").receiving == keys(6, b"x")
    assert book.taking({"dev-1": keys(6)}).of("dev-1").number == 6
    assert book.advanced(["dev-1"]).taking({"dev-1": keys(6)}).of("dev-1").number == 6


def test_unlisted_devices_keys_are_left_out(book):
    """Keys of a device that is not listed are left out."""
    assert book.taking({"dev-9": keys(2)}) == book
    with refused(IntegrityError, "no keys of device 'dev-9'", hint="shoal-fleet add-device"):
        book.of("dev-9")


def test_last_key_serves_for_all_further(book):
    """Each draw of secrets moves on to the next key of its devices; the last one serves for all further secrets."""
    state = lambda: (book.of("dev-1").number, book.of("dev-1").exhausted)  # noqa: E731
    for number in range(1, LAST):
        assert state() == (number, False)
        book = book.advanced(["dev-1"])
    assert state() == (LAST, False)
    book = book.advanced(["dev-1"])
    assert state() == (LAST, True)
    assert book.of("dev-2").number == 1
    book = book.taking({"dev-1": keys(LAST + 1)})
    assert state() == (LAST + 1, False)


def test_a_fleet_without_the_file_is_refused(tmp_path):
    """And so is one with a damaged file."""
    fleet = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://x")
    (fleet.path / RECEIVING_FILE).write_bytes(b"junk")
    with pytest.raises(IntegrityError, match=rf"{RECEIVING_FILE} is damaged"):
        FleetDirectory(fleet.path)
    (fleet.path / RECEIVING_FILE).unlink()
    with refused(IntegrityError, "an earlier version of Shoal made this fleet", hint="make a new fleet"):
        FleetDirectory(fleet.path)


def test_passphrase_keeps_others_out(tmp_path):
    """Secrets would be sealed to them."""
    fleet = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://x", Lock(b"a long passphrase"))
    data = (fleet.path / RECEIVING_FILE).read_bytes()
    (fleet.path / RECEIVING_FILE).write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
    with pytest.raises(UntrustedError, match="altered"):
        FleetDirectory(fleet.path, Lock(b"a long passphrase"))
