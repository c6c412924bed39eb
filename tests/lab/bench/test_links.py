"""The bench of precisions: rows, bytes and the table."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from shoal_lab.bench import links

from shoal.errors import UsageError
from shoal.protocol.precision.lengths import encoded_bytes

pytestmark = pytest.mark.torch
QUICK = links.Options(tasks=("digits",), precisions=("float32", "int8"), algorithm="fedavg", rounds=4)


@pytest.fixture(scope="module")
def rows():
    return links.measure(QUICK, print)


def test_bytes_are_those_of_whole_messages(rows):
    up, down = links.heads()
    assert 400 < up < 1500
    assert 100 < down < 800
    for row in rows:
        uploads, vector = 4 * links.DEVICES, encoded_bytes(row.length, row.precision)
        assert row.vector_up == uploads * vector
        assert row.bytes_up == row.vector_up + uploads * (up + links.HEADER_BYTES)
        assert row.vector_down == 3 * links.DEVICES * vector, "the first round needs no mean"
    exact, rounded = rows
    assert (rounded.bytes_up + rounded.bytes_down) / (exact.bytes_up + exact.bytes_down) < 0.3


def test_rounding_is_measured(rows):
    exact, rounded = rows
    assert exact.cosine_error == 0
    assert 0 < rounded.cosine_error < 0.01
    assert abs(rounded.accuracy - exact.accuracy) < 5
    assert rounded.ari is not None


def test_the_data_have_the_fixed_fields(rows):
    found = links.data(rows, QUICK)
    assert {"precision", "bytes_up", "bytes_down", "accuracy", "ari", "cosine_error"} <= set(found["rows"][0])
    table = links.lines(found["rows"])
    assert [line.split()[0] for line in table] == ["digits,", "precision", "float32", "int8"]
    assert "100.0 %" in table[2]


def test_a_table_without_float32_compares_nothing(rows):
    (line,) = [line for line in links.lines([dataclasses.asdict(rows[1]) | {"ari": None}]) if line.startswith("int8")]
    assert " - " in line


def test_cosine_errors():
    exact = {"a": np.array([1, 0], np.float32), "b": np.array([0, 1], np.float32)}
    assert links._cosine_error(exact, exact) == 0
    assert links._cosine_error(exact, exact | {"b": np.array([1, 0], np.float32)}) == pytest.approx(1)


def test_unknown_names_are_refused():
    for changes in ({"precisions": ("int4",)}, {"tasks": ("no-such-fleet",)}):
        with pytest.raises(UsageError):
            links.measure(dataclasses.replace(QUICK, **changes), print)
