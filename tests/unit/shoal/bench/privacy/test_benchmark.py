"""Reports of `shoal bench privacy` follow from the measurements."""

import json

import pytest

from shoal.bench.privacy.benchmark import measure
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


def test_an_unknown_mode_is_refused_before_anything_is_measured():
    with pytest.raises(ConfigError, match="not known"):
        measure(["none", "rot13"])
