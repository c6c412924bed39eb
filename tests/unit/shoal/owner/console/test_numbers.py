"""The numbers of the owner's requests."""

import pytest

from shoal.errors import ConfigError, IntegrityError
from shoal.owner.console.asking import COUNT_FILE, MOST_AHEAD, RequestNumbers
from shoal.owner.keys.directory import FleetDirectory
from tests.helpers.refusals import refused


@pytest.fixture
def fleet(tmp_path):
    return FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://h")


def test_each_number_is_taken_once(fleet):
    """Each number is taken once also by another process."""
    assert RequestNumbers(fleet).last() == 0
    assert [RequestNumbers(FleetDirectory(fleet.path)).take() for _ in range(3)] == [1, 2, 3]
    assert (fleet.path / COUNT_FILE).stat().st_mode & 0o777 == 0o600


def test_restored_directory_says_so_once(fleet):
    """A restored directory says so once and goes on beyond."""
    numbers = RequestNumbers(fleet)
    numbers.take()
    numbers.count_on(1)
    with refused(
        ConfigError, "has seen request 9 of this owner, and this directory has made 1", hint="restored from a backup"
    ):
        numbers.count_on(9)
    assert numbers.take() == 10


def test_aggregator_can_not_use_numbers_up(fleet):
    numbers = RequestNumbers(fleet)
    with pytest.raises(ConfigError):
        numbers.count_on(MOST_AHEAD + 1)
    assert numbers.take() == 1


@pytest.mark.parametrize("data", [b"", b"-1", b"seven", "\u0663".encode(), b"9" * 30])
def test_a_damaged_file_is_named(fleet, data):
    path = fleet.path / COUNT_FILE
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(IntegrityError, match=r"requests\.count is damaged"):
        RequestNumbers(fleet).take()
