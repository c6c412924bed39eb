"""Reports of `shoal bench privacy` follow from the measurements."""

import dataclasses
import json
import re

import pytest
from shoal_lab.bench.attacks.base import Result
from shoal_lab.bench.privacy.benchmark import measure, result_rows
from shoal_lab.bench.privacy.page import page
from shoal_lab.bench.privacy.table import lines

from shoal.errors import ConfigError
from tests.helpers.privacy_reports import mode_report, whole

FIELDS = {
    "mode",
    "derive_ms",
    "apply_ms",
    "invert_ms",
    "apply_memcpy_ratio",
    "cosine_error",
    "mean_error",
    "can",
    "attacks",
    "verdict",
}


def test_the_fixed_fields_are_there_and_are_of_a_million_coordinates():
    data = whole(mode_report()).data()
    json.dumps(data, allow_nan=False)
    (mode,) = data["modes"]
    assert set(mode) >= FIELDS
    assert (mode["derive_ms"], mode["apply_ms"], mode["apply_memcpy_ratio"]) == (10.0, 1.5, 4.0)
    assert set(mode["attacks"][0]) >= {"name", "attacker", "success", "chance", "unit"}
    assert [s["d"] for s in mode["sizes"]] == [100_000, 1_000_000]


def test_the_verdict_follows_the_results():
    """An attack counts if one of its variants works, and the verdict names the values that remain visible."""
    assert "1 of 2 attacks get more than chance (counting); not: other" in mode_report().verdict
    assert "0 of 2" in mode_report(success=0.55).verdict
    assert "norms and dot products in sight" in mode_report().verdict
    assert "all values in sight" in mode_report(sees_values=True, sees_magnitudes=True).verdict
    assert "all absolute values" in mode_report(sees_magnitudes=True).verdict
    assert "every update in clear" in mode_report(sees_updates=True, sees_values=True).verdict


def variant(keys, success, devices=15):
    return Result(name="structure", attacker="x", success=success, chance=0.1, unit="share", keys=keys, devices=devices)


def with_results(mode, *results):
    return dataclasses.replace(mode_report(mode), attacked={"structure": results})


def test_rows_are_those_of_the_same_variant_in_each_mode():
    """Both key lifetimes and each fleet size have a row of their own; a mode without a variant has a gap."""
    modes = (
        with_results("permutation", variant("run", 0.9), variant("round", 0.8), variant("round", 0.7, 100)),
        with_results("rotation", variant("round", 0.1)),
    )
    figures = [[r and r.success for r in row] for row in result_rows(modes)]
    assert figures == [[0.9, None], [0.8, 0.1], [0.7, None]]
    text = "\n".join(lines(whole(*modes)))
    assert re.search(r"structure, n=15 +0.900 \* +- +0.100 +share", text)
    assert re.search(r"structure, n=15, fresh keys +0.800 \* +0.100 +0.100 +share", text)
    assert page(whole(*modes)).count("<td></td>") == 2


def test_the_json_has_the_key_lifetime_and_the_devices_of_each_row():
    (row,) = with_results("rotation", variant("round", 0.1, 450)).data()["attacks"]
    assert (row["name"], row["keys"], row["devices"]) == ("structure", "round", 450)


def test_the_verdict_says_that_an_attack_needs_one_key_a_run():
    one_key, both = (variant("run", 0.9), variant("round", 0.1)), (variant("run", 0.9), variant("round", 0.9))
    assert "(structure with one key a run)" in with_results("rotation", *one_key).verdict
    assert "(structure)" in with_results("rotation", *both).verdict


def test_an_unknown_mode_is_refused_before_anything_is_measured():
    with pytest.raises(ConfigError, match="not known"):
        measure(["none", "rot13"])
