"""Ranges of wire versions, and the newest that several have in common."""

import pytest

from shoal.errors import WireError
from shoal.protocol.wire_versions import SPOKEN, WireRange, newest_common


def test_a_range_has_its_ends():
    found = WireRange(2, 4)
    assert [version in found for version in (1, 2, 4, 5)] == [False, True, True, False]
    assert (str(found), str(WireRange(3, 3))) == ("2 to 4", "3")


@pytest.mark.parametrize(("least", "most"), [(0, 1), (2, 1)])
def test_a_range_without_a_version_is_refused(least, most):
    with pytest.raises(WireError, match="wire versions from"):
        WireRange(least, most)


@pytest.mark.parametrize(
    ("ranges", "common"),
    [
        ([(1, 1)], 1),
        ([(1, 3), (2, 5)], 3),
        ([(1, 3), (2, 5), (2, 2)], 2),
        ([(1, 1), (2, 2)], None),
        ([(1, 2), (2, 3), (3, 4)], None),
    ],
)
def test_the_newest_common_version(ranges, common):
    assert newest_common(WireRange(*pair) for pair in ranges) == common


def test_this_software_speaks_a_version():
    assert newest_common([SPOKEN]) == SPOKEN.most
