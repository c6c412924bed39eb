from types import SimpleNamespace

import pytest

from shoal.protocol.sums import precision_in


@pytest.mark.parametrize(
    ("unit", "keeper", "found"), [(0.0, None, "int8"), (0.0, "keeper", "float32"), (0.5, "keeper", "int8")]
)
def test_first_keeper_round_has_float32(unit, keeper, found):
    plan = SimpleNamespace(keeper=keeper, recipe=SimpleNamespace(precision_up="int8"))
    assert precision_in(plan, unit) == found
