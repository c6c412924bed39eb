"""Options of the form NAME=VALUE."""

import pytest

from shoal.errors import UsageError
from shoal.owner.cli.pairs import pairs as pairs_of
from shoal.owner.cli.pairs import private_words, whole
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
