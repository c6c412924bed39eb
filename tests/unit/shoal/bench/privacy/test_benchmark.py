"""Reports of `shoal bench privacy` follow from the measurements; the page loads nothing from outside."""

import json
import re
import struct
import zlib

import numpy as np
import pytest

from crypto.mask.modes.registry import MODES
from shoal.bench.attacks.base import Picture, Result
from shoal.bench.attacks.lab import make_lab
from shoal.bench.privacy.benchmark import ModeReport, PrivacyReport, measure, one_thread
from shoal.bench.privacy.cost import Computed, Cost, measure_computed, measure_cost, measure_seal
from shoal.bench.privacy.page import page, png
from shoal.bench.privacy.table import lines
from shoal.errors import ConfigError

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


def mode_report(mode="rotation", success=0.9, **can):
    square = np.linspace(0, 1, 9, dtype=np.float32).reshape(3, 3)
    pictures = (Picture("true", square), Picture("got", 1 - square))
    result = Result(
        name="labels <1>",
        attacker="an aggregator & others",
        success=success,
        chance=0.5,
        unit="share",
        margin=0.1,
        note="a 'note'",
        pictures=pictures,
    )
    seen = {"sees_updates": False, "sees_values": False, "sees_magnitudes": False} | can
    costs = (
        Cost(d=100_000, derive_ms=1.0, apply_ms=0.1, invert_ms=0.2, apply_memcpy_ratio=3.0, bytes=400_000),
        Cost(d=1_000_000, derive_ms=10.0, apply_ms=1.5, invert_ms=2.0, apply_memcpy_ratio=4.0, bytes=4_000_000),
    )
    attacked = {
        "counting": (result, Result(name="again", attacker="x", success=0.1, chance=0.5, unit="dB")),
        "other": (Result(name="y", attacker="z", success=0.0, chance=0.0, unit="AUC"),),
    }
    return ModeReport(mode, costs, Computed(1e-7, 2e-7, seen), attacked)


def whole(*modes):
    return PrivacyReport(
        modes=modes,
        dataset="digits",
        coordinates=4810,
        quick=True,
        seal={"seal_ms_per_mb": 1, "open_ms_per_mb": 2, "bytes_added": 162},
        seconds=3,
    )


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


def test_a_picture_is_a_png_of_the_right_levels():
    """Parsed by hand: signature, size, and the rows, each after a filter byte."""
    image = np.array([[0.0, 1.0, 0.5], [2.0, -1.0, 0.2]], np.float32)
    data = png(image)
    assert data[:8] == b"\x89PNG\r\n\x1a\n"
    assert struct.unpack(">II", data[16:24]) == (3, 2)
    at = data.index(b"IDAT")
    (size,) = struct.unpack(">I", data[at - 4 : at])
    assert zlib.decompress(data[at + 4 : at + 4 + size]) == bytes([0, 0, 255, 128, 0, 255, 0, 51])


def test_the_page_is_whole_and_loads_nothing():
    text = page(whole(mode_report("none", sees_updates=True), mode_report()))
    assert text.count("src='data:image/png;base64,") == 4
    assert not re.search(r"(?:src|href)=['\"]?(?!'?data:)", text)
    assert "http" not in text
    assert "labels &lt;1&gt;" in text
    assert "labels <1>" not in text
    assert "an aggregator &amp; others" in text


def test_the_table_has_every_attack_and_mode():
    text = "\n".join(lines(whole(mode_report("none"), mode_report())))
    assert re.search(r"labels <1> +0.900 \* +0.900 \* +0.500 +share", text)
    assert re.search(r"again +0.1 +0.1 +0.5 +dB", text)
    assert "sealing 1.00 ms a MB" in text


def test_an_unknown_mode_is_refused_before_anything_is_measured():
    with pytest.raises(ConfigError, match="not known"):
        measure(["none", "rot13"])


def test_costs_are_measured():
    small, large = measure_cost("permutation", quick=True)
    assert (small.d, large.d) == (100_000, 1_000_000)
    assert large.bytes == 4_000_000
    assert large.derive_ms > large.apply_ms > 0
    assert large.apply_memcpy_ratio > 1


def test_sealing_is_measured_and_adds_few_bytes():
    seal = measure_seal(quick=True)
    assert 0 < seal["bytes_added"] < 300
    assert 0 < seal["seal_ms_per_mb"] < 1000


@pytest.fixture(scope="module")
def lab():
    with one_thread():
        return make_lab(quick=True)


@pytest.mark.torch
@pytest.mark.parametrize("mode", MODES)
def test_what_the_aggregator_can_compute(lab, mode):
    """All modes give cosines, means and CFL's split to 1e-6; only those that leave values in sight give more."""
    found = measure_computed(lab, mode)
    assert found.cosine_error < 1e-6
    assert found.mean_error < 1e-6
    needed = ["norms", "cosines", "mean", "cfl_split", "singular_values", "fedgroup_embedding", "distances_of_kmeans"]
    assert all(found.can[name] for name in needed)
    assert found.can["sees_updates"] == (mode == "none")
    assert found.can["sees_values"] == (mode in ("none", "permutation"))
    assert found.can["sees_magnitudes"] == (mode != "rotation")
    assert found.can["sees_sparsity"] == (mode != "rotation")
    assert found.can["coordinate_median"] == (mode != "rotation")
