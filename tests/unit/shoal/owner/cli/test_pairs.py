"""Options of the form NAME=VALUE."""

import re

import pytest

from shoal.errors import UsageError
from shoal.owner.cli.pairs import broker_users, private_words, whole
from shoal.owner.cli.pairs import pairs as pairs_of
from shoal.owner.keys.directory import FleetDirectory
from tests.helpers.tasks import CLASSES, logistic_bundle


@pytest.mark.parametrize(
    ("items", "pairs"),
    [([], {}), (["k=3"], {"k": "3"}), (["a=b=c", "x=-1"], {"a": "b=c", "x": "-1"}), (["k=1", "k=2"], {"k": "2"})],
)
def test_pairs_are_split_at_the_first_sign(items, pairs):
    """Pairs are split at their first equals sign."""
    assert pairs_of(items) == pairs


@pytest.mark.parametrize(
    ("item", "hint"),
    [("k", "write k=VALUE"), ("k=", "write k=VALUE"), ("=3", "write NAME=VALUE"), ("", "write NAME=VALUE")],
)
def test_incomplete_pair_is_a_usage_error(item, hint):
    """A pair without name or value is a mistake of usage."""
    with pytest.raises(UsageError) as caught:
        pairs_of(["a=1", item])
    assert (str(caught.value), caught.value.hint) == (f"{item!r} is not NAME=VALUE", hint)


@pytest.mark.parametrize("text", ["", "1.5", "ten", "0x10"])
def test_fractional_size_is_a_usage_error(text):
    """A size that is no whole number is a mistake of usage."""
    assert whole("-3", "hidden") == -3
    with pytest.raises(UsageError) as caught:
        whole(text, "hidden")
    assert str(caught.value) == f"hidden is a whole number, not {text!r}"


def test_private_parameters_are_named():
    manifest = logistic_bundle(private=[0.0] * CLASSES).manifest
    assert private_words(manifest) == f"private: bias: {CLASSES} of {manifest.length} coordinates never leave a device"


SIGHUP = (
    "next: shoal-fleet broker-config {0} FOLDER again.*send mosquitto a SIGHUP: only then the broker accepts dev-1\n"
)


@pytest.mark.parametrize(
    ("dynamic", "published", "told"),
    [
        (None, False, ""),
        (False, True, SIGHUP),
        (True, True, ""),
        (True, False, "next: shoal-fleet publish {0}: only then the broker accepts dev-1\n"),
    ],
    ids=["without users", "users in a file", "users that are published", "users of before"],
)
def test_reminder_of_the_brokers_users(tmp_path, capsys, dynamic, published, told):
    """A broker with users has to be updated; one that takes users while it runs has them once they are published."""
    fleet = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://h")
    if dynamic is not None:
        fleet.users.make()
        fleet.users.set_dynamic(dynamic)
    broker_users(fleet, "accepts dev-1", published=published)
    out, err = capsys.readouterr()
    assert out == "", "stdout is for data"
    assert re.fullmatch(told.format(fleet.path), err, re.S)
