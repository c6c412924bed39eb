"""The scenarios: that each can be made, that names and kinds agree, and that a third of those with images has a CNN."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from shoal_lab.experiments import registry
from shoal_lab.experiments.wild import images, scenarios, tables
from shoal_lab.experiments.wild.fleets import Fleet
from shoal_lab.experiments.wild.scenarios import KINDS, SCENARIOS, blocks

from shoal.errors import UsageError
from shoal.protocol.recipe import DEFAULTS


def test_blocks_are_groups_in_order():
    assert blocks(2, 1, 3) == (0, 0, 1, 2, 2, 2)


def test_kinds_and_scenarios_agree():
    assert list(dict.fromkeys(s.kind for s in SCENARIOS.values())) == list(KINDS)
    kinds = [s.kind for s in SCENARIOS.values()]
    assert sum(a != b for a, b in itertools.pairwise(kinds)) == len(KINDS) - 1, "scenarios of a kind follow each other"


def test_a_third_of_the_images_has_a_cnn():
    with_cnn = {name for name, s in SCENARIOS.items() if s.network == "cnn"}
    assert with_cnn == {name for name in SCENARIOS if name.endswith("-cnn")}
    images = {name for name, s in SCENARIOS.items() if s.data in scenarios.IMAGES and s.network == "mlp"}
    assert len(with_cnn) * 3 >= len(images)
    assert {SCENARIOS[name].kind for name in with_cnn} == {SCENARIOS[name].kind for name in images} - {"counts"}
    for name in with_cnn:
        assert SCENARIOS[name].groups == SCENARIOS[name.removesuffix("-cnn")].groups


def test_devices_have_groups_sizes_and_pairs():
    for name, s in SCENARIOS.items():
        if s.data in scenarios.IMAGES:
            assert s.groups, name
            assert isinstance(s.samples, int) or len(s.samples) == len(s.groups), name
            assert s.shift != "swapped" or len(s.pairs) > max(s.groups), name
            assert s.later is None or (len(s.later) == len(s.groups) and not s.faulty), name


def test_power_laws_run_from_12_to_600():
    for name in ("power-permuted", "power-turned", "power-none"):
        train = [int(images.TRAIN * count) for count in SCENARIOS[name].samples]
        assert (train[0], train[-1]) == (12, 600)
        assert np.allclose(np.diff(np.log(train)), np.log(50) / 19, atol=0.06)


def test_few_devices_may_form_means_of_two():
    few = {name: s for name, s in SCENARIOS.items() if s.kind == "few"}
    assert {(s.min_contributors, len(s.groups) < 7) for s in few.values()} == {(2, True)}
    assert {s.min_contributors for s in SCENARIOS.values() if s.kind != "few"} == {DEFAULTS.min_contributors}


def test_drifting_devices_take_another_group():
    some, before = SCENARIOS["drift-some"].later, SCENARIOS["drift-some"].groups
    assert [i for i, (a, b) in enumerate(zip(before, some, strict=True)) if a != b] == [0, 5, 10, 15]
    assert SCENARIOS["drift-all"].later == tuple((g + 1) % 4 for g in SCENARIOS["drift-all"].groups)


def test_scenarios_are_described():
    about = registry.find("wild").scenarios
    assert list(about) == list(SCENARIOS)
    assert about["swapped-4-fashion"]["needs"] == ["fashion-mnist"]
    assert about["table-wine"] == {
        "title": "three labels shifted on half of the devices",
        "kind": "tables, classification and regression",
        "data": "wine",
        "network": "linear",
        "needs": [],
    }


def test_the_last_data_are_the_later_ones():
    before, later = (tables.deal(SCENARIOS["table-iris"], seed=seed).population for seed in (0, 1))
    assert [Fleet(population=before, network=None, local=None, later=at).last for at in (None, later)] == [
        before,
        later,
    ]


def test_an_unknown_name_is_refused():
    assert scenarios.find("alike").kind == "none"
    with pytest.raises(UsageError, match="no scenario 'x'"):
        scenarios.find("x")
