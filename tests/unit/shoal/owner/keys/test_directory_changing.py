"""Several of the owner's programs at once: each one's change is in the roster that the last one signs."""

from __future__ import annotations

import multiprocessing

import pytest

from crypto.seal.identity import Identity
from shoal.errors import ConfigError
from shoal.membership.grants import AGGREGATOR_ROLE, make_card
from shoal.owner.keys.directory import LOCKED_HINT, FleetDirectory
from shoal.util.files import exclusive
from tests.helpers.receiving import device_card
from tests.helpers.refusals import refused

PROGRAMS, DEVICES_EACH = 4, 3
SPAWN = multiprocessing.get_context("spawn")


@pytest.fixture
def fleet(tmp_path):
    fleet = FleetDirectory.create(tmp_path / "fleet", "plant", "mqtt://localhost")
    fleet.add_aggregator(make_card(Identity.generate("aggregator"), AGGREGATOR_ROLE))
    return fleet


def add_some(path, program, start):
    fleet = FleetDirectory(path)
    start.wait(60)
    for number in range(DEVICES_EACH):
        fleet.add_device(device_card(Identity.generate(f"dev-{program}-{number}")))


@pytest.mark.slow
def test_several_programs_add_devices(fleet):
    """Devices that several programs add at once are all in the roster."""
    before = fleet.roster.sequence
    start = SPAWN.Barrier(PROGRAMS)
    programs = [SPAWN.Process(target=add_some, args=(fleet.path, n, start)) for n in range(PROGRAMS)]
    for program in programs:
        program.start()
    for program in programs:
        program.join(60)
        assert program.exitcode == 0
    roster = FleetDirectory(fleet.path).roster
    assert {d.name for d in roster.devices} == {f"dev-{p}-{n}" for p in range(PROGRAMS) for n in range(DEVICES_EACH)}
    assert roster.sequence == before + PROGRAMS * DEVICES_EACH


def test_ever_changing_fleet_is_left_alone(fleet, monkeypatch):
    """A fleet that another program keeps changing is left alone."""
    monkeypatch.setattr("shoal.owner.keys.directory.CHANGE_WAIT_S", 0.1)
    card = device_card(Identity.generate("dev-1"))
    with exclusive(fleet.path, wait_s=0, hint="-"):
        with refused(ConfigError, "in use by another program", hint_is=LOCKED_HINT):
            fleet.add_device(card)
        assert FleetDirectory(fleet.path).roster.devices == ()  # looking is free
    fleet.add_device(card)


def test_nested_change_needs_no_second_lock(fleet):
    """A change inside a change needs no second lock."""
    with fleet.changing():
        run = fleet.take_run()
        assert fleet.take_run() == run + 1


def cards_of(*names):
    return [device_card(Identity.generate(name)) for name in names]


def test_many_devices_take_one_signature(fleet):
    """Many devices join the roster with one signature."""
    before = fleet.roster
    fleet.add_devices(cards_of("dev-a", "dev-b", "dev-c"))
    assert fleet.roster.sequence == before.sequence + 1
    assert [d.name for d in fleet.roster.devices[len(before.devices) :]] == ["dev-a", "dev-b", "dev-c"]
    assert FleetDirectory(fleet.path).roster == fleet.roster


@pytest.mark.parametrize("names", [("dev-a", "dev-a"), ("dev-a", "owner"), ("dev-a", "dev-0")])
def test_one_refused_name_joins_nobody(fleet, names):
    """Of many devices none joins where one name is refused."""
    fleet.add_devices(cards_of("dev-0"))
    before = fleet.roster
    with pytest.raises(ConfigError):
        fleet.add_devices(cards_of(*names))
    assert fleet.roster == before
