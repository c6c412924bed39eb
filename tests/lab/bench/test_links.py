"""The bench of precisions: rows, bytes and the table."""

from __future__ import annotations

import pytest
from shoal_lab.bench import links

from shoal.protocol.precision.lengths import encoded_bytes

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def rows():
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(links, "ALGORITHM", "fedavg")
        return links.measure(["digits"], 4, progress=print)["rows"]


def test_bytes_are_those_of_whole_messages(rows):
    up, down = links.heads()
    assert 400 < up < 1500
    assert 100 < down < 800
    for row in rows:
        uploads, vector = 4 * links.DEVICES, encoded_bytes(row["length"], row["precision"])
        assert row["vector_up"] == uploads * vector
        assert row["bytes_up"] == row["vector_up"] + uploads * (up + links.HEADER_BYTES)
        assert row["vector_down"] == 3 * links.DEVICES * vector, "the first round needs no mean"
    exact, _, rounded = rows
    assert (rounded["bytes_up"] + rounded["bytes_down"]) / (exact["bytes_up"] + exact["bytes_down"]) < 0.3
    assert exact["cosine_error"] == 0
    assert 0 < rounded["cosine_error"] < 0.01
    assert abs(rounded["accuracy"] - exact["accuracy"]) < 5
    assert rounded["ari"] is not None


def test_the_table(rows):
    table = links.words({"rows": rows})
    assert [line.split()[0] for line in table] == ["digits,", "precision", "float32", "float16", "int8"]
    assert "100.0 %" in table[2]
    assert " - " in links.words({"rows": [rows[2] | {"ari": None}]})[-1]
