"""An aggregator that shows two histories of a run: devices that see it leave, and the owner sees it in their presences."""

import contextlib
import dataclasses
from collections import defaultdict

import numpy as np
import pytest
from shoal_lab.loopback.transport import Hop

from shoal.membership.statements import sign_statement
from shoal.protocol.messages import Phase
from shoal.protocol.states import FORKED_ROUND, Statement
from tests.helpers.fleets import (
    LOST,
    Wiretap,
    announce,
    device_identity,
    make_fleet,
    names,
    reasons,
    restart_device,
    uploads_of,
)
from tests.helpers.owner_models import reader_of
from tests.scenarios.round_fleets import (
    continued,
    moved,
    publish_mean,
    taken_over,
)

ONE, OTHER = "dev-00", "dev-01"
LENGTH = 28
TWO_HISTORIES = "two histories of run 1: the heads of round {} differ between "


class Forked:
    """A fleet that has served round 1. Its aggregator shows each device, or each tuple of devices, another mean of that round."""

    def __init__(self, fleet, tap, first):
        self.fleet, self.tap = fleet, tap
        self.last = defaultdict(lambda: first)

    def only(self, *devices):
        """Let no other devices receive what the aggregator publishes, and return the rule."""

        def rule(passage):
            return LOST if passage.hop is Hop.DOWN and passage.client in others and "/s/" in passage.topic else None

        others = {self.fleet.client_id(name) for name in self.fleet.stage.devices if name not in devices}
        self.tap.rules.append(rule)
        return rule

    def show(self, device, round_, held, **changes):
        """Announce a round to one device, as what follows from its own history."""
        before = self.last[device]
        new = dataclasses.replace(before, round=round_, nonce=bytes([round_]) * 16, held=held, **changes)
        self.last[device] = new = continued(new, before.held)
        rule = self.only(*((device,) if isinstance(device, str) else device))
        announce(self.fleet, new)
        self.fleet.settle()
        self.tap.forgive(rule)

    def end(self, device, held):
        """Announce the final round to a device."""
        order = dataclasses.replace(self.last[device].assignments[0], phase=Phase.SCORE, train=False, evaluate=True)
        self.show(device, 3, held, finished=True, assignments=(order,), assignment_of=(0, 0))

    def second_round(self, device, value):
        """Announce round 2 to a device with a mean of its own."""
        rule = self.only(*((device,) if isinstance(device, str) else device))
        mean = publish_mean(self.fleet, np.full(LENGTH, value), contributors=self.fleet.plan.recipe.min_contributors)
        self.fleet.broker.pump()
        self.show(device, 2, moved(self.last[device].held, mean))
        self.tap.forgive(rule)

    def reconnect(self):
        for device in (ONE, OTHER):
            restart_device(self.fleet, device)
        self.fleet.settle()


@contextlib.contextmanager
def forked_fleet(root, caplog, **options):
    tap = Wiretap()
    with make_fleet(root, faults=tap, mode="rotation", **options) as fleet:
        made = Forked(fleet, tap, taken_over(fleet, tap))
        caplog.clear()
        yield made


@pytest.fixture
def forked(tmp_path, caplog):
    with forked_fleet(tmp_path / "fleet", caplog, count=2, rounds=2, min_contributors=2) as made:
        yield made


@pytest.mark.parametrize(("at", "believed"), [(2, False), pytest.param(3, True, marks=pytest.mark.long)])
@pytest.mark.parametrize("all_said", [True, pytest.param(False, marks=pytest.mark.long)])
def test_divided_fleet_convinces_nobody_away(tmp_path, caplog, at, believed, all_said):
    """Of five devices three certify: neither half of four is enough, whatever the other half has signed beside it."""
    away = "dev-04"
    with forked_fleet(tmp_path, caplog, count=5, rounds=4, min_contributors=3) as forked:
        fleet, signed = forked.fleet, {}
        fleet.kill_device(away)
        shown, other = names(4)[:at], names(4)[at:]
        for half, value in ((other, 0.02), (shown, 0.01)):
            forked.second_round(half, value)
            head = forked.last[half].held.transcript
            about = [Statement(fleet.plan.fleet, fleet.plan.run_id, 2, name, (), transcript=head) for name in half]
            signed[half] = tuple(sign_statement(device_identity(fleet, said.device), said) for said in about)
        assert [len(uploads_of(fleet, forked.tap, name)) for name in names(4)] == [2] * 4, "each half goes on"
        fleet.revive_device(away)
        forked.last[away] = forked.last[shown]
        statements = signed[shown] + (signed[other] if all_said else ())
        forked.show(away, 3, dataclasses.replace(forked.last[shown].held, statements=statements))
        assert len(uploads_of(fleet, forked.tap, away)) == 1 + believed
        told = "2 devices have signed the history of round 3, and 3 must"
        assert any(told in reason for reason in reasons(caplog)) == (not believed)


def test_two_histories_show_on_reconnecting(forked):
    """The owner sees two histories when devices connect again."""
    forked.second_round(ONE, 0.01)
    forked.second_round(OTHER, 0.02)
    forked.reconnect()
    reader = reader_of(forked.fleet)
    assert {d: h.round for d, h in reader.heads.items()} == {ONE: 2, OTHER: 2}
    (found,) = reader.histories()
    assert found.startswith(TWO_HISTORIES.format(2))
    assert {ONE, OTHER} <= set(found.replace(",", "").replace(";", "").split())


def test_owner_sees_two_histories_at_the_end(forked, caplog):
    """The owner sees two histories at the end of a run."""
    for device, value in ((ONE, 0.01), (OTHER, 0.02)):
        forked.second_round(device, value)
        forked.end(device, forked.last[device].held)
    assert not reasons(caplog), "no device can see it"
    (found,) = reader_of(forked.fleet).histories()
    assert found.startswith(TWO_HISTORIES.format(3))


def test_one_history_is_no_sign_of_anything(forked):
    for _ in range(2):
        forked.reconnect()
    assert reader_of(forked.fleet).heads.keys() == {ONE, OTHER}
    assert reader_of(forked.fleet).histories() == []


def test_another_head_is_said_to_the_owner(forked, caplog):
    """The announcement passes on what the other device has signed about the round that this one took part in."""
    forked.second_round(ONE, 0.01)
    forked.second_round(OTHER, 0.02)
    plan, theirs = forked.fleet.plan, forked.last[OTHER].held.transcript
    said = Statement(plan.fleet, plan.run_id, 2, OTHER, (), transcript=theirs)
    signed = sign_statement(device_identity(forked.fleet, OTHER), said)
    forked.end(ONE, dataclasses.replace(forked.last[ONE].held, statements=(signed,)))
    assert not reasons(caplog), "one device may lie"
    assert "too few to believe" in caplog.text
    reader = reader_of(forked.fleet)
    assert reader.heads[ONE].round == 3
    assert f"{OTHER} has signed another history or state than {ONE} was shown" in reader.histories()


def test_contradicting_history_is_left(forked, caplog):
    """A device whose announcements contradict each other leaves and says so to the owner."""
    forked.second_round(ONE, 0.01)
    forked.second_round(OTHER, 0.02)
    forked.last[ONE] = forked.last[OTHER]
    forked.end(ONE, forked.last[OTHER].held)
    assert any("another history" in reason for reason in reasons(caplog))
    told = f"{ONE} has left run 1: the aggregator has shown it another history than before or than others"
    assert told in reader_of(forked.fleet).histories()
    forked.reconnect()
    assert reader_of(forked.fleet).heads[ONE].round == FORKED_ROUND, "it stays so after a restart"


def test_heads_are_stated_every_tenth_round(tmp_path):
    """All devices state their heads of every tenth round and of the last."""
    with make_fleet(tmp_path / "fleet", rounds=11) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 10, 60)
        assert {head.round for head in reader_of(fleet).heads.values()} == {10}
        fleet.run(20)
        reader = reader_of(fleet)
        assert {head.round for head in reader.heads.values()} == {12}
        assert reader.histories() == []
