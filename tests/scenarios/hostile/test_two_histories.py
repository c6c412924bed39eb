"""An aggregator that shows two histories of a run: devices that see it leave, and the owner sees it in their presences."""

import dataclasses

import numpy as np
import pytest

from shoal.membership.statements import sign_statement
from shoal.protocol.messages import Phase
from shoal.protocol.states import FORKED_ROUND, Statement
from shoal.transport.faults import Hop
from tests.helpers.fleets import LOST, Wiretap, announce, announcements, device_identity, make_fleet, reasons
from tests.helpers.owner_models import reader_of
from tests.helpers.round_fleets import continued, moved, publish_mean

ONE, OTHER = "dev-00", "dev-01"
LENGTH = 28
TWO_HISTORIES = "two histories of run 1: the heads of round {} differ between "


class Forked:
    """A fleet that has served round 1 of two. Its aggregator shows each device another mean of that round."""

    def __init__(self, fleet, tap):
        self.fleet, self.tap = fleet, tap
        (first,) = announcements(fleet, tap)
        self.last = dict.fromkeys((ONE, OTHER), first)

    def only(self, device):
        """Let no other device receive what the aggregator publishes, and return the rule."""

        def rule(passage):
            return LOST if passage.hop is Hop.DOWN and passage.client in others and "/s/" in passage.topic else None

        others = {self.fleet.client_id(name) for name in (ONE, OTHER) if name != device}
        self.tap.rules.append(rule)
        return rule

    def show(self, device, round_, held, **changes):
        """Announce a round to one device, as what follows from its own history."""
        before = self.last[device]
        new = dataclasses.replace(before, round=round_, nonce=bytes([round_]) * 16, held=held, **changes)
        self.last[device] = new = continued(new, before.held)
        rule = self.only(device)
        announce(self.fleet, new)
        self.fleet.settle()
        self.tap.forgive(rule)

    def second_round(self, device, value):
        """Announce round 2 to a device with a mean of its own."""
        rule = self.only(device)
        mean = publish_mean(self.fleet, np.full(LENGTH, value))
        self.fleet.broker.pump()
        self.show(device, 2, moved(self.last[device].held, mean))
        self.tap.forgive(rule)

    def reconnect(self):
        for device in (ONE, OTHER):
            self.fleet.kill_device(device)
            self.fleet.revive_device(device)
        self.fleet.settle()


@pytest.fixture
def forked(tmp_path, caplog):
    tap = Wiretap()
    with make_fleet(tmp_path / "fleet", faults=tap, count=2, rounds=2, min_contributors=2, mode="rotation") as fleet:
        fleet.broker.pump()
        for device in fleet.devices.values():
            device.worker.work()
        fleet.broker.pump()
        fleet.kill_aggregator()
        made = Forked(fleet, tap)
        caplog.clear()
        yield made


def test_the_owner_sees_two_histories_when_devices_connect_again(forked):
    forked.second_round(ONE, 0.01)
    forked.second_round(OTHER, 0.02)
    forked.reconnect()
    reader = reader_of(forked.fleet)
    assert {d: h.round for d, h in reader.heads.items()} == {ONE: 2, OTHER: 2}
    (found,) = reader.histories()
    assert found.startswith(TWO_HISTORIES.format(2))
    assert {ONE, OTHER} <= set(found.replace(",", "").replace(";", "").split())


def test_the_owner_sees_two_histories_at_the_end_of_a_run(forked, caplog):
    for device, value in ((ONE, 0.01), (OTHER, 0.02)):
        forked.second_round(device, value)
        order = forked.last[device].assignments[0]
        final = dataclasses.replace(order, phase=Phase.SCORE, train=False, evaluate=True)
        forked.show(device, 3, forked.last[device].held, finished=True, assignments=(final,), assignment_of=(0, 0))
    assert not reasons(caplog), "no device can see it"
    (found,) = reader_of(forked.fleet).histories()
    assert found.startswith(TWO_HISTORIES.format(3))


def test_one_history_is_no_sign_of_anything(forked):
    for _ in range(2):
        forked.reconnect()
    assert reader_of(forked.fleet).heads.keys() == {ONE, OTHER}
    assert reader_of(forked.fleet).histories() == []


def test_a_device_that_sees_another_head_goes_on_and_says_so_to_the_owner(forked, caplog):
    """The announcement passes on what the other device has signed about the round that this one took part in."""
    forked.second_round(ONE, 0.01)
    forked.second_round(OTHER, 0.02)
    plan, theirs = forked.fleet.plan, forked.last[OTHER].held.transcript
    said = Statement(plan.fleet, plan.run_id, 2, OTHER, (), transcript=theirs)
    signed = sign_statement(device_identity(forked.fleet, OTHER), said)
    held = dataclasses.replace(forked.last[ONE].held, statements=(signed,))
    order = dataclasses.replace(forked.last[ONE].assignments[0], phase=Phase.SCORE, train=False, evaluate=True)
    forked.show(ONE, 3, held, finished=True, assignments=(order,), assignment_of=(0, 0))
    assert not reasons(caplog), "one device may lie"
    assert "too few to believe" in caplog.text
    reader = reader_of(forked.fleet)
    assert reader.heads[ONE].round == 3
    assert f"{OTHER} has signed another history or state than {ONE} was shown" in reader.histories()


def test_a_device_whose_announcements_contradict_each_other_leaves_and_says_so_to_the_owner(forked, caplog):
    forked.second_round(ONE, 0.01)
    forked.second_round(OTHER, 0.02)
    forked.last[ONE] = forked.last[OTHER]
    order = dataclasses.replace(forked.last[ONE].assignments[0], phase=Phase.SCORE, train=False, evaluate=True)
    forked.show(ONE, 3, forked.last[OTHER].held, finished=True, assignments=(order,), assignment_of=(0, 0))
    assert any("another history" in reason for reason in reasons(caplog))
    told = f"{ONE} has left run 1: the aggregator has shown it another history than before or than others"
    assert told in reader_of(forked.fleet).histories()
    forked.reconnect()
    assert reader_of(forked.fleet).heads[ONE].round == FORKED_ROUND, "it stays so after a restart"


def test_all_devices_state_their_heads_of_every_tenth_round_and_of_the_last(tmp_path):
    with make_fleet(tmp_path / "fleet", rounds=11) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 10, 60)
        assert {head.round for head in reader_of(fleet).heads.values()} == {10}
        fleet.run(20)
        reader = reader_of(fleet)
        assert {head.round for head in reader.heads.values()} == {12}
        assert reader.histories() == []
