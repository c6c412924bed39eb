"""The privacy benchmark as text."""

import dataclasses
import re

import pytest
from shoal_lab.bench.attacks.base import Result
from shoal_lab.bench.privacy.table import lines, marked, shown

from tests.helpers.privacy_reports import mode_report, whole


def test_the_table_has_every_attack_and_mode():
    text = "\n".join(lines(whole(mode_report("none"), mode_report())))
    assert re.search(r"labels <1> +0.900 \* +0.900 \* +0.500 +share", text)
    assert re.search(r"again +0.1 +0.1 +0.5 +dB", text)
    assert "sealing 1.00 ms a MB" in text


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (12.34, "dB", "12.3"),
        (0.5, "share", "0.500"),
        (0.0123, "AUC", "0.012"),
        (0.0012, "share", "0.0012"),
        (0.0, "ARI", "0.000"),
    ],
)
def test_a_figure_has_the_digits_of_its_unit(value, unit, text):
    """Small shares have one digit more: chance is often one in thousands."""
    assert shown(value, unit) == text


def test_a_star_marks_the_attacks_that_work():
    """And leaves the columns where they are."""
    works = Result(name="x", attacker="y", success=0.7, chance=0.5, unit="share")
    assert marked(works) == "0.700 *"
    assert marked(dataclasses.replace(works, success=0.6)) == "0.600  "


def test_every_line_of_figures_is_as_wide_as_its_head():
    text = lines(whole(mode_report("none", sees_updates=True), mode_report()))
    head = next(line for line in text if line.startswith("cost"))
    for name in ("derive_ms, d = 1e+05", "apply_memcpy_ratio, d = 1e+06", "mean_error", "aggregator: sees_updates"):
        (row,) = (line for line in text if line.startswith(name))
        assert len(row) == len(head)
    assert next(line for line in text if line.startswith("aggregator: sees_updates")).split()[-2:] == ["yes", "no"]
    assert text[-1] == "3 s"
    assert text[-2].startswith("rotation: ")
