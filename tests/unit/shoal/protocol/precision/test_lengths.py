"""Sizes of the precisions."""

from __future__ import annotations

import pytest

from shoal import limits
from shoal.errors import WireError
from shoal.protocol.precision.lengths import FEEDBACK, encoded_bytes, norm_room
from tests.helpers.refusals import refused


def test_sizes_of_a_small_network():
    sizes = {precision: encoded_bytes(159_010, precision) for precision in limits.PRECISIONS}
    assert sizes == {"float32": 636_040, "float16": 318_020, "int8": 161_498}


def test_shorter_precisions_need_more_room():
    assert [p for p in limits.PRECISIONS if norm_room(p) > 1] == list(limits.PRECISIONS[1:])
    assert set(FEEDBACK) < set(limits.PRECISIONS)


@pytest.mark.parametrize("call", [norm_room, lambda name: encoded_bytes(1, name)])
def test_an_unknown_precision_has_a_hint(call):
    with refused(WireError, "no precision", hint="float16"):
        call("bfloat16")
