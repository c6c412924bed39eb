"""Reports of `shoal bench privacy` follow from the measurements: the document, its lines, and the page."""

import base64
import html
import io
import json
import re

import numpy as np
import pytest
from PIL import Image
from shoal_lab.bench.attacks.lab import Picture, Result
from shoal_lab.bench.privacy.benchmark import mode_report, page, png, rows_of, shown, verdict, words

SQUARE = np.linspace(0, 1, 9, dtype=np.float32).reshape(3, 3)
COUNTS = Result(
    name="labels <1>",
    attacker="an aggregator & others",
    success=0.9,
    chance=0.5,
    unit="share",
    note="a 'note'",
    pictures=(Picture("true", SQUARE), Picture("got", 1 - SQUARE)),
)
OTHER = Result(name="y", attacker="z", success=0.0, chance=0.0, unit="AUC")
COST = {"derive_ms": 10.0, "apply_ms": 1.5, "invert_ms": 2.0, "apply_memcpy_ratio": 4.0}
CAN = {"sees_updates": False, "sees_values": False, "sees_magnitudes": False}


def report(mode="rotation", attacked=None, **can):
    costs = [{"d": d, **COST, "bytes": 4 * d} for d in (100_000, 1_000_000)]
    computed = {"cosine_error": 1e-7, "mean_error": 2e-7, "can": CAN | can}
    return mode_report(mode, costs, computed, attacked or {"counting": (COUNTS,), "other": (OTHER,)})


def document(*modes):
    seal = {"seal_ms_per_mb": 1, "open_ms_per_mb": 2, "bytes_added": 162}
    return {"modes": list(modes), "dataset": "digits", "coordinates": 4810, "quick": True, "seal": seal, "seconds": 3}


def variant(keys, success, devices=15):
    return Result(name="structure", attacker="x", success=success, chance=0.1, unit="share", keys=keys, devices=devices)


def test_fixed_fields_are_of_a_million():
    """Fixed fields are of a million coordinates."""
    found = json.loads(json.dumps(report(), allow_nan=False))
    assert found.keys() == {
        *("mode", "derive_ms", "apply_ms", "invert_ms", "apply_memcpy_ratio", "cosine_error", "mean_error"),
        *("can", "attacks", "verdict", "sizes"),
    }
    assert {name: found[name] for name in COST} == COST
    assert found["attacks"][0] == COUNTS.data()
    assert [size["d"] for size in found["sizes"]] == [100_000, 1_000_000]


@pytest.mark.parametrize(
    ("seen", "left"),
    [
        ((), "norms and dot products in sight"),
        (("sees_magnitudes",), "all absolute values"),
        (("sees_values", "sees_magnitudes"), "all values in sight"),
        (("sees_updates", "sees_values"), "every update in clear"),
    ],
)
def test_the_verdict_follows_the_results(seen, left):
    """An attack counts if one of its variants works; a remark names one that needs one key a run."""
    found = verdict(CAN | dict.fromkeys(seen, True), {"counting": (OTHER, COUNTS), "other": (OTHER,), "none": ()})
    assert left in found
    assert "1 of 2 attacks get more than chance (counting); not: other" in found
    alone, both = ({"s": (variant("run", 0.9), variant("round", fresh))} for fresh in (0.1, 0.9))
    assert "(s with one key a run)" in verdict(CAN, alone)
    assert "(s)" in verdict(CAN, both)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(12.345, "dB", "12.3"), (0.5, "share", "0.500"), (0.001, "share", "0.0010"), (0, "", "0.000")],
)
def test_figures_in_the_form_of_their_unit(value, unit, text):
    assert shown(value, unit) == text


def test_picture_is_a_png_of_right_levels():
    """Also where values lie beyond 0 and 1."""
    data = png(np.array([[0.0, 1.0, 0.5], [2.0, -1.0, 0.2]], np.float32))
    found = Image.open(io.BytesIO(data))
    assert found.format == "PNG"
    assert np.asarray(found).tolist() == [[0, 255, 128], [255, 0, 51]]


def test_rows_are_of_one_variant():
    """Both key lifetimes and each fleet size have a row of their own; a mode without a variant has a gap."""
    permuted = {"structure": (variant("run", 0.9), variant("round", 0.8), variant("round", 0.7, 100))}
    found = document(report("permutation", permuted), report("rotation", {"structure": (variant("round", 0.1),)}))
    assert [[r and r["success"] for r in row] for _, row, _ in rows_of(found)] == [[0.9, None], [0.8, 0.1], [0.7, None]]
    text = "\n".join(words(found))
    assert re.search(r"structure, n=15 +0.900 \* +- +0.100 +share", text)
    assert re.search(r"structure, n=15, fresh keys +0.800 \* +0.100 +0.100 +share", text)
    assert re.search(r"aggregator: sees_values +no +no", text)
    assert re.search(r"apply_ms, d = 1e\+06 +1.50 +1.50", text)
    assert page(found, {}).count("<td></td>") == 2


def test_page_holds_pictures_escapes_text():
    """The page holds its pictures and escapes text."""
    found = page(document(report()), {"rotation": [COUNTS]})
    assert "labels &lt;1&gt;" in found
    assert "labels <1>" not in found
    assert "an aggregator &amp; others" in found
    assert "title='a &#x27;note&#x27;'" in found
    sources = re.findall(r"src='data:image/png;base64,([^']+)'", found)
    assert [base64.b64decode(one) for one in sources] == [png(SQUARE), png(1 - SQUARE)]
    assert html.unescape(found).count("labels <1>: true") == 2
    assert "got: mean 0.900 share" in found
    assert not re.search(r"(src|href)='(?!data:)", found)
