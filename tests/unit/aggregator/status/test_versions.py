"""Versions of devices beside the aggregator's."""

import pytest

from aggregator.status.versions import NEWER, OLDER, OTHER, SAME, advice, compared, left_out


@pytest.mark.parametrize(
    ("version", "ours", "state"),
    [
        ("0.1.0", "0.1.0", SAME),
        ("0.1.0", "0.2.0.dev0", OLDER),
        ("0.2.0.dev0", "0.2.0", OLDER),
        ("0.2.0a1", "0.2.0rc1", OLDER),
        ("0.2.0rc1", "0.2.0", OLDER),
        ("0.9.0", "0.10.0", OLDER),
        ("1.0", "0.9.9", NEWER),
        ("0.1.0.post1", "0.1.0", NEWER),
        ("0.1", "0.1.0", OTHER),
        ("0.1.0+mine", "0.1.0", OTHER),
        ("nightly", "0.1.0", OTHER),
        ("", "0.1.0", ""),
        ("0.1.0", "", ""),
    ],
)
def test_a_version_is_older_newer_or_another(version, ours, state):
    assert compared(version, ours) == state


def test_advice_names_the_machine_to_upgrade():
    assert advice(OLDER, "0.2.0").startswith("upgrade Shoal on it to 0.2.0")
    assert advice(NEWER, "0.2.0").startswith("upgrade the aggregator, which has 0.2.0")
    assert advice(OTHER, "0.2.0").startswith("install 0.2.0 on it")
    assert advice(SAME, "0.2.0") == advice("", "0.2.0") == ""


def test_device_that_is_left_out_is_told_why():
    reason, older = left_out("0.1.0", 1, 2)
    assert reason == "its software (shoal 0.1.0, wire 1) does not speak wire version 2 of the run"
    assert older.startswith("upgrade Shoal on it")
    assert left_out("", 3, 2)[1].startswith("upgrade the owner's program and the aggregator")
