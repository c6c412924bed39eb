"""The owner changes the roster during a run: devices hear of the change alone, and of the whole only where they missed one."""

import time

import pytest
from shoal_lab.loopback.transport import Hop, LoopbackTransport

from shoal.owner.enrolment.admission import Registrar
from tests.helpers.fleets import (
    Wiretap,
    make_fleet,
    restart_aggregator,
)

LATE = "dev-01"


class Scene:
    """A fleet in its first round, and its owner at the broker."""

    def __init__(self, root):
        self.tap = Wiretap()
        self.fleet = make_fleet(root, faults=self.tap, count=3, rounds=3, quorum=1.0)
        self.owner = self.fleet.stage.fleet
        transport = LoopbackTransport(self.fleet.broker, "owner", lambda _event: None)
        self.registrar = Registrar(self.owner, transport)
        self.registrar.start(int(time.time()))
        transport.start()
        self.fleet.settle()
        self.tap.heard.clear()  # devices that joined early have fetched the whole roster by now

    def renew(self):
        self.owner.renew()
        self.registrar.publish_roster()
        self.fleet.settle()

    def heard(self, name, leaf):
        """Return how many bytes of a topic a device was sent."""
        client = self.fleet.client_id(name)
        passed = [p for p in self.tap.heard if p.client == client and p.hop is Hop.DOWN and p.payload]
        return sum(len(p.payload) for p in passed if p.topic.split("/s/")[-1].split("/")[0] == leaf)

    def held(self, name):
        return self.fleet.devices[name].runtime._membership.roster_bytes


@pytest.fixture
def scene(tmp_path):
    made = Scene(tmp_path / "fleet")
    with made.fleet:
        yield made


def test_present_device_hears_changes_only(scene):
    """A device that is there hears changes only, also of an aggregator that starts again."""
    for restarts in (False, False, True, False):
        if restarts:
            restart_aggregator(scene.fleet)
        scene.renew()
        assert {scene.held(name) for name in scene.fleet.devices} == {scene.owner.roster_bytes}
    for name in scene.fleet.devices:
        assert scene.heard(name, "roster") == 0
        assert scene.heard(name, "roster-change") > 0
    scene.fleet.run(60)


def test_missed_change_asks_once_for_whole(scene):
    """Whoever missed a change asks for the whole once."""
    rule = scene.tap.lose(client=scene.fleet.client_id(LATE), ending="/roster-change", hop=Hop.DOWN)
    before = scene.held(LATE)
    scene.renew()
    assert scene.held(LATE) == before
    scene.tap.forgive(rule)
    scene.renew()
    assert scene.held(LATE) == scene.owner.roster_bytes
    once = scene.heard(LATE, "roster")
    assert once > 0
    scene.renew()
    assert scene.held(LATE) == scene.owner.roster_bytes
    assert scene.heard(LATE, "roster") == once
    scene.fleet.run(60)


def test_missing_roster_is_asked_for_again(scene):
    """A whole roster that does not come is asked for again."""
    change = scene.tap.lose(client=scene.fleet.client_id(LATE), ending="/roster-change", hop=Hop.DOWN)
    scene.renew()
    scene.tap.forgive(change)
    whole = scene.tap.lose(client=scene.fleet.client_id(LATE), ending="/roster", hop=Hop.DOWN)
    scene.renew()
    scene.tap.forgive(whole)
    scene.fleet.run_until(lambda: scene.held(LATE) == scene.owner.roster_bytes, 90)
    scene.fleet.run(90)


def test_away_device_follows_waiting_changes(scene):
    """A device that was away follows from the changes that waited."""
    scene.fleet.kill_device(LATE)
    for _ in range(2):
        scene.renew()
    scene.fleet.revive_device(LATE)
    scene.fleet.settle()
    assert scene.held(LATE) == scene.owner.roster_bytes
    scene.fleet.run(60)


def test_lost_note_costs_the_whole(scene, monkeypatch):
    """An aggregator restored from a backup: it does not know which roster the fleet has, and names the newest."""
    scene.renew()
    scene.fleet.kill_aggregator()
    (scene.fleet.stage.aggregator_dir / "roster.told").write_bytes(b"junk")
    scene.owner.renew()
    scene.registrar.publish_roster()
    scene.fleet.broker.pump()
    scene.fleet.revive_aggregator()
    scene.fleet.settle()
    scene.renew()
    assert {scene.held(name) for name in scene.fleet.devices} == {scene.owner.roster_bytes}
    scene.fleet.run(60)
