"""Names, mask segments and masked vectors."""

import pytest

from shoal import limits
from shoal.errors import ConfigError
from shoal.types import Segment, check_name
from tests.helpers.refusals import refused


@pytest.mark.parametrize("name", ["a", "0", "dev-01", "a-", "9" * limits.MAX_NAME_CHARS])
def test_a_valid_name_is_returned(name):
    assert check_name(name, "device") == name


@pytest.mark.parametrize(
    "name",
    [
        "",
        "-a",
        "A",
        "dev_1",
        "dev.1",
        "a/b",
        "a#",
        "+",
        "dev 1",
        "a\n",
        "\u0661",
        "ä",
        "a" * (limits.MAX_NAME_CHARS + 1),
    ],
)
def test_dangerous_name_is_refused(name):
    """A name that could leave its topic or its folder is refused; a hostile one must not fill the log."""
    hint = f"use 1 to {limits.MAX_NAME_CHARS} of a-z, 0-9 and '-', not beginning with '-'"
    with refused(ConfigError, hint_is=hint) as caught:
        check_name(name, "device")
    assert str(caught.value) == f"device {name!r} is not a valid name"
    with pytest.raises(ConfigError, match=r"^.{1,119}$"):
        check_name("x" * 10**6, "device")


@pytest.mark.parametrize("name", ["cluster", "shared"])
@pytest.mark.parametrize("length", [1, limits.MAX_COORDINATES])
def test_segment_takes_the_ends_of_its_range(name, length):
    assert Segment(name, length).length == length


@pytest.mark.parametrize(
    ("name", "length", "message"),
    [
        ("cluster", 0, "segment 'cluster' has length 0"),
        ("shared", -1, "segment 'shared' has length -1"),
        ("cluster", limits.MAX_COORDINATES + 1, f"has length {limits.MAX_COORDINATES + 1}"),
        ("", 3, "segment name '' is not known"),
        ("Cluster", 3, "segment name 'Cluster' is not known"),
    ],
)
def test_any_other_segment_is_refused(name, length, message):
    with pytest.raises(ConfigError, match=message):
        Segment(name, length)
