"""Options and results of experiments."""

from __future__ import annotations

import json

import numpy as np
import pytest
from shoal_lab.experiments.common.experiment import Options, as_json

from shoal.errors import UsageError
from tests.helpers.results import result


def test_the_interface_is_the_fixed_one():
    """The names that a reader of --json relies on, in every result."""
    data = result(purity=1.0, ari=0.9).data()
    fixed = ["experiment", "algorithm", "accuracy", "purity", "ari", "clusters", "rounds", "cpu_seconds_per_round"]
    assert {*fixed, "published", "history"} <= set(data)
    assert (data["accuracy"], data["purity"], data["ari"], data["published"]) == (91.5, 1.0, 0.9, 90.0)
    assert data["history"] == [{"round": 1, "accuracy": 50.0, "loss": 1.0, "purity": 0.5}]


def test_the_last_accuracy_is_there_only_where_the_protocol_takes_the_maximum():
    assert "accuracy_last" not in result().data()
    assert result(accuracy_last=88.0).data()["accuracy_last"] == 88.0


def test_extras_stand_beside_and_hide_nothing():
    assert result(extra={"gap": 0.3}).data()["gap"] == 0.3
    with pytest.raises(ValueError, match="purity"):
        result(extra={"purity": 0.3}).data()


def test_numpys_values_and_infinities_become_json():
    """A result is always one JSON object, for any values of an experiment."""
    odd = {"a": np.float32(0.5), "b": np.arange(2), "c": float("nan"), "d": (1, np.int64(2)), 3: np.bool_(True)}
    data = result(extra={"odd": odd}, accuracy=np.float64("inf")).data()
    assert data["odd"] == {"a": 0.5, "b": [0, 1], "c": None, "d": [1, 2], "3": True}
    assert data["accuracy"] is None
    json.dumps(data, allow_nan=False)
    assert as_json({"x": [np.nan, 1]}) == {"x": [None, 1]}


@pytest.mark.parametrize(
    ("text", "default", "value"),
    [
        ("3", 1, 3),
        ("0.5", 1.0, 0.5),
        ("off", True, False),
        ("on", False, True),
        ("edc", "madc", "edc"),
        ("1e-3", 1.0, 1e-3),
    ],
)
def test_a_knob_is_read_as_its_default_is(text, default, value):
    read = Options(settings={"knob": text}).knob("knob", default)
    assert (read, type(read)) == (value, type(value))
    assert Options().knob("knob", default) == default


@pytest.mark.parametrize(
    ("text", "default"), [("x", 1), ("1.5", 1), ("nan", 1.0), ("inf", 1.0), ("maybe", True), ("", 2)]
)
def test_a_knob_that_is_no_such_value_is_refused(text, default):
    with pytest.raises(UsageError, match=f"--set knob={text}: it takes"):
        Options(settings={"knob": text}).knob("knob", default)


def test_other_settings_are_for_the_strategy():
    options = Options(settings={"eps1": "0.4", "trials": "3"})
    assert options.strategy_settings("trials") == {"eps1": "0.4"}
