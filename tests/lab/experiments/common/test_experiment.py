"""Options, settings and results of studies."""

from __future__ import annotations

import json

import numpy as np
import pytest
from shoal_lab.experiments.common.experiment import Options, Quiet, Study, as_json, nearest, parsed

from shoal.errors import UsageError
from tests.lab.experiments.results import result


def test_the_interface_is_the_fixed_one():
    """The names that a reader of --json relies on, in every result."""
    data = result(purity=1.0, ari=0.9)
    fixed = ["experiment", "algorithm", "accuracy", "purity", "ari", "clusters", "rounds", "cpu_seconds_per_round"]
    assert {*fixed, "published", "history"} <= set(data)
    assert (data["accuracy"], data["purity"], data["ari"], data["published"]) == (91.5, 1.0, 0.9, 90.0)
    assert "accuracy_last" not in data
    assert result(accuracy_last=88.0)["accuracy_last"] == 88.0


def test_extras_hide_no_fixed_name():
    assert result(extra={"gap": 0.3})["gap"] == 0.3
    with pytest.raises(ValueError, match="purity"):
        result(extra={"purity": 0.3})


def test_numpys_values_become_json():
    """A result is always one JSON object, for any values of an experiment."""
    odd = {"a": np.float32(0.5), "b": np.arange(2), "c": float("nan"), "d": (1, np.int64(2)), 3: np.bool_(True)}
    data = result(extra={"odd": odd}, accuracy=np.float64("inf"))
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
        ("Yes", False, True),
        ("edc", "madc", "edc"),
        ("1e-3", 1.0, 1e-3),
        ("64, 8", [1], [64, 8]),
    ],
)
def test_a_setting_is_read_as_its_default_is(text, default, value):
    read = parsed("knob", text, default)
    assert (read, type(read)) == (value, type(value))


@pytest.mark.parametrize(
    ("text", "default"),
    [("x", 1), ("1.5", 1), ("nan", 1.0), ("inf", 1.0), ("maybe", True), ("", 2), ("3,", [1]), ("0", [1]), ("", [1])],
)
def test_a_setting_of_other_type_is_refused(text, default):
    with pytest.raises(UsageError, match=f"--set knob={text}: it takes") as caught:
        parsed("knob", text, default)
    assert caught.value.hint == f"the default is knob={default}"


def test_the_nearest_name_is_offered():
    assert nearest("epoch", ("lr", "epochs")) == "do you mean epochs? there are epochs, lr"
    assert nearest("colour", ("lr",)) == "there are lr"
    assert nearest("x", ()) == "there are none"


def study(**changes):
    """Return a study that gives its resolved options as the published figure."""
    methods = {"cfl": {"strategy": "cfl", "settings": {"eps1": "$eps", "eps2": "0.5"}, "values": {"lr": 0.3}}}
    methods["fedavg"] = {"fixed": {"mu": 0.0}}
    fields = {
        "runner": lambda _study, options, _progress: options,
        "devices": 20,
        "rounds": 9,
        "refuses": {"samples": "sizes are drawn"},
        "values": {"lr": 0.1, "mu": 1.0, "eps": 0.2},
        "methods": methods,
    }
    return Study("toy", "", "", ("cfl", "fedavg"), {"cfl": {"3": 88.0}}, **{**fields, **changes})


def resolved(algorithm="", *, of=None, **options):
    return (of or study()).run(Options(algorithm=algorithm, **options), Quiet())


def test_a_table_fills_in_what_is_not_asked():
    """The first algorithm, sizes, values and the strategy's settings; --set wins over all but what a method fixes."""
    found = resolved()
    assert (found.algorithm, found.devices, found.samples, found.rounds) == ("cfl", 20, None, 9)
    assert (found.values, found.settings) == ({"lr": 0.3, "mu": 1.0, "eps": 0.2}, {"eps1": "0.2", "eps2": "0.5"})
    found = resolved(settings={"lr": "2", "eps": "0.7", "eps2": "0.6", "warm_up": "3"}, devices=4)
    assert (found.values["lr"], found.devices) == (2.0, 4)
    assert found.settings == {"eps1": "0.7", "eps2": "0.6", "warm_up": "3"}
    assert resolved("fedavg", settings={"mu": "5"}).values["mu"] == 0.0


def test_few_samples_take_more_rounds():
    few = study(samples=500, refuses={}, values={"few_samples": 200, "few_samples_rounds": 300})
    found = [resolved("fedavg", of=few, samples=n).rounds for n in (None, 199, 200)]
    assert found == [9, 300, 9]
    assert resolved("fedavg", of=few, samples=10, rounds=7).rounds == 7


@pytest.mark.parametrize(
    ("options", "message", "hint"),
    [
        ({"algorithm": "cfll"}, "toy has no algorithm 'cfll'", "do you mean cfl?"),
        ({"samples": 3}, "sizes are drawn", "leave --samples out"),
        ({"settings": {"lrr": "1"}}, "toy has no setting 'lrr' with cfl", "do you mean lr? there are "),
        ({"algorithm": "fedavg", "settings": {"eps1": "1"}}, "no setting 'eps1' with fedavg", "do you mean eps?"),
        ({"checkpoint": "x"}, "toy can't save a run of cfl in a checkpoint", "leave --checkpoint out"),
    ],
)
def test_what_a_table_lacks_is_refused(options, message, hint):
    with pytest.raises(UsageError, match=message) as caught:
        resolved(**options)
    assert caught.value.hint.startswith(hint)


def test_a_result_holds_its_resolved_table():
    """And the published figure of the value by which the table has it, or all figures."""
    options, table = Options(algorithm="cfl", rounds=3, values={"k": 3}, settings={"eps1": "1"}), {"more": 1}
    figures = {"accuracy": 1.0, "clusters": 1, "cpu_seconds_per_round": 0.1, "history": []}
    made = study(published_by="k").result(options, table, **figures)
    assert (made["experiment"], made["rounds"], made["published"]) == ("toy", 3, 88.0)
    assert made["parameters"] == {"rounds": 3, "seed": 0, "mask": "none", "k": 3, "settings": {"eps1": "1"}, "more": 1}
    assert study(published_by="more").result(options, table, **figures)["published"] == {"3": 88.0}
