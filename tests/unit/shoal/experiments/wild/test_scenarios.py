"""The scenarios: that each can be made, that names and kinds agree, and that a third of the fleets has a CNN."""

from __future__ import annotations

import pytest

from shoal.errors import UsageError
from shoal.experiments.wild import scenarios
from shoal.experiments.wild.scenarios import KINDS, SCENARIOS, blocks


def test_blocks_are_groups_in_order():
    assert blocks(2, 1, 3) == (0, 0, 1, 2, 2, 2)


def test_every_kind_has_scenarios_and_every_scenario_a_kind():
    assert {s.kind for s in SCENARIOS.values()} == set(KINDS)


def test_a_third_of_the_fleets_trains_a_cnn_too():
    with_cnn = {name for name, s in SCENARIOS.items() if s.network == "cnn"}
    assert with_cnn == {name for name in SCENARIOS if name.endswith("-cnn")}
    assert len(with_cnn) * 3 >= len(SCENARIOS) - len(with_cnn)
    assert {SCENARIOS[name].kind for name in with_cnn} == set(KINDS) - {"tables"}
    for name in with_cnn:
        assert SCENARIOS[name].groups == SCENARIOS[name.removesuffix("-cnn")].groups


def test_devices_have_groups_sizes_and_pairs():
    for name, s in SCENARIOS.items():
        if s.needs:
            assert s.groups, name
            assert isinstance(s.samples, int) or len(s.samples) == len(s.groups), name
            assert s.shift != "swapped" or len(s.pairs) > max(s.groups), name
            assert s.later is None or (len(s.later) == len(s.groups) and not s.faulty), name


def test_drifting_devices_take_another_group():
    some, before = SCENARIOS["drift-some"].later, SCENARIOS["drift-some"].groups
    assert [i for i, (a, b) in enumerate(zip(before, some, strict=True)) if a != b] == [0, 5, 10, 15]
    assert SCENARIOS["drift-all"].later == tuple((g + 1) % 4 for g in SCENARIOS["drift-all"].groups)


def test_an_unknown_name_is_refused():
    assert scenarios.find("alike").kind == "none"
    with pytest.raises(UsageError, match="no scenario 'x'"):
        scenarios.find("x")
