"""The stored secrets of earlier key versions."""

import pytest

from shoal.errors import WireError
from shoal.owner.keys.vault import MOST_VERSIONS, StoredVersions, VersionSecrets
from shoal.protocol.codec import decode, encode


def secrets(number, byte=b"s"):
    return VersionSecrets(number, byte * 32, b"b" * 32)


def numbers(versions):
    return [v.number for v in versions.versions]


def test_versions_are_in_order():
    """Versions are in order and each is there once."""
    found = StoredVersions().adding(secrets(7)).adding(secrets(3)).adding(secrets(7, b"t"))
    assert numbers(found) == [3, 7]
    assert found.versions[1].version_secret == b"t" * 32
    assert decode(encode(found), StoredVersions) == found


def test_oldest_is_removed_beyond_the_limit():
    found = StoredVersions()
    for number in range(1, MOST_VERSIONS + 4):
        found = found.adding(secrets(number))
    assert numbers(found) == list(range(4, MOST_VERSIONS + 4))


def test_since_removes_older_ones():
    found = StoredVersions((secrets(3), secrets(5), secrets(8)))
    assert numbers(found.since(5)) == [5, 8]
    assert numbers(found.since(9)) == []


def test_damaged_bytes_show_no_secrets():
    """Damaged bytes are refused and secrets are not shown."""
    with pytest.raises(WireError):
        decode(encode(StoredVersions((secrets(3),)))[:-1], StoredVersions)
    assert "sss" not in repr(StoredVersions((secrets(3),)))
