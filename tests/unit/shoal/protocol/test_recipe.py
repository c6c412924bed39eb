import dataclasses

import pytest

from shoal.errors import OutOfRangeError, UsageError, WireError
from shoal.protocol.recipe import DEFAULTS, LocalTraining, Recipe, Setting, as_settings, knobs


def test_defaults():
    """A field has a knob or its own type. Whole numbers become floats: equal recipes have one encoding."""
    assert (DEFAULTS.algorithm, DEFAULTS.min_contributors, DEFAULTS.mode) == ("cfl", 3, "rotation")
    assert (DEFAULTS.weighting, DEFAULTS.weight_cap, DEFAULTS.robust) == ("samples", 3.0, "filter")
    own = {"algorithm", "settings", "local", "pretrain"}
    assert {field.name for field in dataclasses.fields(Recipe)} == own | knobs(Recipe).keys()
    made = Recipe("ifca", as_settings({"k": 2, "restarts": "3"}), quorum=1)
    assert type(made.quorum) is float
    assert made.settings == (Setting("k", "2"), Setting("restarts", "3"))
    assert made.values == {"k": "2", "restarts": "3"}


@pytest.mark.parametrize(
    ("name", "right", "wrong", "words"),
    [
        ("rounds", (1, 100_000), (0, 100_001, 2.0, True, "3", None), "a whole number from 1 to 100000"),
        ("participation", (1e-9, 1), (0, 1.01, float("nan"), "1"), "a number above 0 and at most 1"),
        ("weight_cap", (0, 1, 7.5), (0.5, -3, float("inf")), "a number of at least 1, or 0 (off)"),
        ("norm_limit", (1e-9, 1e300), (0, float("inf")), "a number above 0"),
        ("weighting", ("samples", "uniform"), ("median", 1, None), "one of samples, uniform"),
        ("mode", ("rotation", "mine"), (None, 3), "text"),
        ("seed", (None, 0, 2**64 - 1), (-1, 2**64, 0.5), "a whole number from 0 to 18446744073709551615"),
    ],
)
def test_ranges(name, right, wrong, words):
    assert knobs(Recipe)[name].words == words
    for value in right:
        assert getattr(Recipe(**{name: value}), name) == value
    for value in wrong:
        with pytest.raises(OutOfRangeError, match=f"^{name} is ") as caught:
            Recipe(**{name: value})
        assert isinstance(caught.value, UsageError)
        assert isinstance(caught.value, WireError)


@pytest.mark.parametrize(
    ("name", "value"),
    [("epochs", -1), ("steps", 1.5), ("batch_size", True), ("lr", 0), ("lr_decay", 2), ("momentum", 1), ("clip", -1)],
)
def test_local_training(name, value):
    with pytest.raises(OutOfRangeError, match=f"^{name} is "):
        LocalTraining(**{name: value})
