"""The keeper's rules of looks: each is answered once, with groups and no cosine, and everything else is refused."""

from __future__ import annotations

import dataclasses

import pytest

from aggregator.keeper.memory import KeeperMemory
from tests.helpers.keepers import LOOKS, NAMES, LookScene, deals_of, look_plan, looked_update, plan_of


@pytest.fixture
def scene(tmp_path):
    return LookScene(tmp_path, look_plan())


def first_and_second(scene):
    scene.at()
    return scene.requests


def changed(request, **changes):
    return dataclasses.replace(request, look=dataclasses.replace(request.look, **changes))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda first, _: changed(first, masked=bytes(len(first.look.masked))), "look 0 was used before"),
        (lambda _, second: changed(second, product=bytes(len(second.look.product))), "answered before, with other"),
        (lambda first, _: changed(first, index=2), "look 2 is not the next one"),
        (lambda first, _: changed(first, index=LOOKS), "all 3 looks of the run are used"),
        (lambda first, _: changed(first, index=1), "numbers that the owner has dealt for another look"),
        (lambda first, _: changed(first, index=1, masked=b"m"), "1 bytes for the sketches of 12 devices"),
        (lambda _, second: changed(second, product=b"m"), "products of 1 bytes for 12 devices"),
        (lambda _, second: changed(second, index=1), "look 1 is not the next one"),
    ],
)
def test_second_use_is_refused(scene, change, reason):
    request = change(*first_and_second(scene))
    before = scene.memory
    told = scene.told(request)
    assert reason in told.refused
    assert not told.masked
    assert not told.partitions
    assert scene.memory == before


def test_same_requests_get_the_same_answers(scene):
    first, second = first_and_second(scene)
    before = scene.memory
    assert scene.told(first) == scene.answers[first]
    assert scene.told(second) == scene.answers[second]
    assert scene.memory is before


@pytest.mark.parametrize("names", [NAMES[:5], (*NAMES[:6], NAMES[0])])
def test_few_devices_are_not_compared(scene, names):
    request = first_and_second(scene)[0]
    cell = dataclasses.replace(request.cells[0], shares=tuple(looked_update(n).share for n in names))
    told = scene.told(dataclasses.replace(changed(request, index=1), cells=(cell,)))
    assert ("from 6 to 64" if len(names) < 6 else "named twice") in told.refused


def test_deal_of_another_is_refused(scene):
    request = first_and_second(scene)[0]
    for deal in (deals_of(plan_of(2, "cfl", looks=LOOKS))[2], deals_of(scene.plan, owner="dev-1")[2], scene.deals[0]):
        assert scene.told(changed(request, index=1, deal=deal)).refused


def test_plan_without_looks_has_none(scene):
    request = first_and_second(scene)[0]
    scene.plan = plan_of(1)
    scene.memory = KeeperMemory()
    assert "the plan has no looks" in scene.told(request).refused


def test_later_run_has_looks_of_its_own(scene):
    scene.at()
    assert scene.memory.looks.run_id == scene.plan.run_id
    opened = dataclasses.replace(scene.memory, opened=())
    scene.memory = opened.opening(plan_of(2), 1, b"d" * 32, [])
    assert "run 2 has begun since" in scene.told(scene.requests[0]).refused
