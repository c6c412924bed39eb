"""The aggregator's side of looks: groups of a cell, one look for each, also over restarts and lies."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest

from aggregator.looks import opened_seed
from aggregator.sums import KeeperAwaitedError
from shoal.errors import UntrustedError
from shoal.limits import MOST_LOOKED
from shoal.protocol.sums import Figures
from tests.helpers.keepers import (
    AGGREGATOR_SEED,
    GROUPS,
    LOOKS,
    NAMES,
    NONCE,
    LookScene,
    deals_of,
    identity,
    look_plan,
    looked_update,
    looks_of,
    plan_of,
)


@pytest.fixture
def scene(tmp_path):
    return LookScene(tmp_path, look_plan())


def test_groups_are_found(scene):
    found = scene.at()
    assert found.devices == tuple(sorted(NAMES))
    assert found.labels() in ({n: GROUPS[n] for n in NAMES}, {n: 1 - GROUPS[n] for n in NAMES})
    assert found.partitions[0].gap
    assert (found.used, found.false) == (1, ())


def test_same_cell_is_looked_at_once_a_round(scene):
    assert scene.at() is scene.at()
    assert len(scene.requests) == 2
    scene.at(model=1)
    assert scene.memory.looks.begun[1:]


def test_looks_are_counted(scene):
    for round_ in range(1, LOOKS + 1):
        assert scene.at(round_=round_).used == round_
    found = scene.at(round_=LOOKS + 1)
    assert (found.partitions, found.used) == ((), LOOKS)


def test_killed_after_each_request(tmp_path):
    scene = LookScene(tmp_path, look_plan(), late=True)
    assert scene.at().labels()
    assert (len(scene.memory.looks.begun), scene.at(round_=2).used) == (1, 2)


def test_lost_memory_costs_a_look(scene):
    scene.at()
    (scene.directory / "looks.bin").unlink()
    scene.restarted()
    assert scene.at(NAMES[:8], 2).used == 2


def looked(scene, given):
    scene.looks.begin(1, NONCE)
    return scene.looks.at(given)


def test_false_share_costs_its_device(scene):
    given = [looked_update(name, figures=Figures(norm=-1.0) if name == "dev-3" else None) for name in NAMES]
    found = looked(scene, given)
    assert (set(found.devices), found.used) == ({*NAMES} - {"dev-3"}, 1)


def test_false_sketch_is_named(scene):
    given = [looked_update(name) for name in NAMES]
    given[4] = dataclasses.replace(given[4], sketch=bytes(len(given[4].sketch)))
    found = looked(scene, given)
    assert found.false == ("dev-4",)
    assert {n: s for n, s in found.labels().items() if n != "dev-4"}


def test_at_most_64_are_compared(tmp_path):
    names = [f"dev-{at}" for at in range(MOST_LOOKED + 5)]
    asked = []

    def ask(request):
        asked.append(len(request.cells[0].shares))
        raise KeeperAwaitedError("not yet")

    looks = looks_of(look_plan(), tmp_path, ask)
    looks.begin(1, NONCE)
    with pytest.raises(KeeperAwaitedError):
        looks.at([dataclasses.replace(looked_update(NAMES[0]), device=name) for name in names])
    assert asked == [MOST_LOOKED]


MEMBER = SimpleNamespace(identity=identity("aggregator"), owner_key=identity("owner").member.sign_key)


def test_seed_is_the_owners():
    plan = look_plan()
    assert opened_seed(plan, deals_of(plan), MEMBER) == AGGREGATOR_SEED


@pytest.mark.parametrize(
    "deals",
    [
        lambda plan: deals_of(plan)[:2],
        lambda plan: deals_of(plan)[::-1],
        lambda plan: deals_of(plan, owner="dev-1"),
        lambda _plan: deals_of(plan_of(2, "cfl", looks=LOOKS)),
    ],
    ids=["too-few", "the-keepers", "not-the-owners", "another-run"],
)
def test_false_seed_is_refused(deals):
    plan = look_plan()
    with pytest.raises(UntrustedError):
        opened_seed(plan, deals(plan), MEMBER)
