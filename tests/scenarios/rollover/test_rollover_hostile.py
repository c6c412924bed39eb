"""Mask epochs under attack by an aggregator that oversteps and a broker that replays; devices: test_rollover_devices.py."""

import dataclasses

import pytest

from crypto.seal.envelope import GroupKey, open_from_group, read_head
from crypto.seal.identity import Identity
from crypto.seal.signed import sign_document
from edge_client.membership import DeviceMembership
from shoal.membership.certificates import sign_checkpoint
from shoal.protocol.chunking import parse
from shoal.protocol.messages import CARRIED_FIRST, ModelRef
from shoal.transport.base import Message
from shoal.transport.faults import Hop
from tests.helpers.fleets import (
    Wiretap,
    device_identity,
    inject,
    make_one_key_fleet,
    open_upload,
    reasons,
    seal_upload,
    uploads_of,
)
from tests.helpers.takeovers import SIGN, TRAIN, Takeover, open_round
from tests.scenarios.revocation.test_revocation import publish

CFL = {"algorithm": "cfl", "settings": {"validate": "off"}}
CARRIED = ModelRef(model=CARRIED_FIRST, origin=0, label="x", transfer=b"\5" * 16, contributors=3, norm=1.0, scale=0.0)


def taken_over(root, rounds_served=2, **options):
    """Return the takeover of a fleet of three in its first epoch, which is two rounds long."""
    tap = Wiretap()
    fleet = make_one_key_fleet(root / "fleet", faults=tap, **{"rounds": 6, "epoch_rounds": 2, **options})
    open_round(fleet, rounds_served)
    return Takeover(fleet, tap)


@pytest.fixture
def rogue(tmp_path, caplog):
    found = taken_over(tmp_path)
    found.sent()
    caplog.clear()
    with found.fleet:
        yield found


# ---------------------------------------------------------------------------------------------------- an aggregator


def test_an_aggregator_that_keeps_to_the_rules_is_followed(rogue):
    """The control: each message refused below differs from a true one in one place."""
    proposal, sealed = rogue.folded()
    given = rogue.endorsements(proposal.checkpoint, sealed)
    assert len(given) == 3
    assert rogue.epochs() == [1, 1, 1]
    rogue.publish(rogue.certificate(proposal.checkpoint, dict(list(given.items())[:2])), sealed)
    assert rogue.epochs() == [2, 2, 2]


OUT_OF_TURN = {
    "before the epoch has had its rounds": (1, {}, "a rollover after round 1, under a mask of 2 rounds, used since 0"),
    "as if after more rounds": (2, {"round": 3}, "a rollover after round 3, under a mask of 2 rounds, used since 0"),
    "after the last round": (2, {"round": 6}, "a rollover after round 6"),
    "in a run of its own": (2, {"run": 2}, "an announcement of another run"),
    "under another key": (2, {"key_id": bytes(16)}, "another mask key"),
    "with a round's order": (2, {"assignments": (TRAIN,)}, "work of a round in a rollover"),
    "with vectors that its algorithm does not have": (2, {"carried": (CARRIED,)}, "vectors that are no models"),
    "to sign nothing": (2, {"assignments": (SIGN,)}, "an order to sign without a proposed checkpoint"),
}


@pytest.mark.parametrize("case", OUT_OF_TURN)
def test_a_rollover_out_of_turn_is_refused(tmp_path, caplog, case):
    served, changes, expected = OUT_OF_TURN[case]
    rogue = taken_over(tmp_path, served)
    with rogue.fleet:
        rogue.sent()
        caplog.clear()
        rogue.announce(rogue.step(**changes))
        assert rogue.sent() == [0, 0, 0]
        assert expected in reasons(caplog)[0]
        if served == 2:
            rogue.announce(rogue.step())
            assert rogue.sent() == [1, 0, 0], "a refused announcement leaves no trace"


def test_nobody_folds_for_secrets_that_have_not_come(rogue, caplog):
    rogue.announce(rogue.step(generation=99))
    assert rogue.sent() == [0, 0, 0]
    assert "no keys of roster 99 have come yet" in reasons(caplog)[0]


def test_a_second_rollover_after_the_same_round_is_refused(rogue, caplog):
    """It would bring the fleet into epochs that the owner has given to later runs."""
    proposal, sealed = rogue.folded()
    given = rogue.endorsements(proposal.checkpoint, sealed)
    rogue.publish(rogue.certificate(proposal.checkpoint, given), sealed)
    assert rogue.epochs() == [2, 2, 2]
    rogue.sent()
    caplog.clear()
    here = {"epoch": 2, "key_id": proposal.checkpoint.key_id}
    rogue.announce(rogue.step(3, **here))
    assert rogue.sent() == [0, 0, 0]
    assert "a rollover after round 2" in reasons(caplog)[0]


def test_steps_go_back_no_more_than_rounds_do(rogue, caplog):
    proposal, sealed = rogue.folded()
    rogue.endorsements(proposal.checkpoint, sealed)
    rogue.sent()
    caplog.clear()
    rogue.announce(rogue.step(1))
    assert rogue.sent() == [0, 0, 0]
    assert "announced after" in reasons(caplog)[0]
    rogue.announce(rogue.step(2, nonce=b"\7" * 16))
    assert rogue.sent() == [0, 0, 0]
    assert (
        "an order to sign without a proposed checkpoint" in reasons(caplog)[-1]
        or "announced twice" in reasons(caplog)[-1]
    )


def too_few(rogue, c, given):
    return rogue.certificate(c, dict(list(given.items())[:1]))


def twice(rogue, c, given):
    one = next(iter(given.items()))
    return rogue.certificate(c, [one, one])


def foreign(rogue, c, given):
    stranger = Identity.generate("dev-09")
    return rogue.certificate(c, [*list(given.items())[:1], ("dev-09", sign_checkpoint(stranger, c))])


def of_something_else(rogue, c, given):
    """Honest signatures, recorded at another time."""
    return rogue.certificate(dataclasses.replace(c, round=1), given)


def of_another_run(rogue, c, given):
    other = dataclasses.replace(c, run_id=bytes(16))
    return rogue.certificate(other, {d: rogue.signature(d, other) for d in given})


def of_another_fleet(rogue, c, given):
    other = dataclasses.replace(c, fleet="other")
    return rogue.certificate(other, {d: rogue.signature(d, other) for d in given})


def under_a_roster_of_ones_own(rogue, c, given):
    owner = rogue.fleet.stage.fleet
    small = dataclasses.replace(owner.roster, devices=owner.roster.devices[:1])
    return rogue.certificate(c, dict(list(given.items())[:1]), sign_document(Identity.generate("owner"), small))


def under_an_older_roster(rogue, c, given):
    """The owner's own, of a time when the fleet was one device, who colludes; the secrets are the same."""
    return rogue.certificate(c, {"dev-00": given["dev-00"]}, rogue.first_roster)


CERTIFICATES = {
    "too few signatures": (too_few, "1 signatures of 3"),
    "a signature twice": (twice, "names a device twice"),
    "a stranger's signature": (foreign, "1 signatures of 3"),
    "signatures of something else": (of_something_else, "0 signatures of 3"),
    "of another run": (of_another_run, "a mask epoch of another run"),
    "of another fleet": (of_another_fleet, "a checkpoint of fleet 'other'"),
    "under a roster of its own": (under_a_roster_of_ones_own, "signature"),
    "under an older roster": (under_an_older_roster, "refused as a rollback"),
}


@pytest.mark.parametrize("case", CERTIFICATES)
def test_a_certificate_that_does_not_hold_moves_nobody(tmp_path, caplog, case):
    make, expected = CERTIFICATES[case]
    rogue = taken_over(tmp_path)
    with rogue.fleet:
        rogue.first_roster = first_roster(rogue)
        proposal, sealed = rogue.folded()
        given = rogue.endorsements(proposal.checkpoint, sealed)
        caplog.clear()
        rogue.publish(make(rogue, proposal.checkpoint, given), sealed)
        assert rogue.epochs() == [1, 1, 1]
        if case != "of another run":  # that is not even looked at
            assert expected in reasons(caplog)[0]
        rogue.publish(rogue.certificate(proposal.checkpoint, given), sealed)
        assert rogue.epochs() == [2, 2, 2]


def first_roster(rogue):
    """Return a roster of the owner's that is older than the run's announcements and lists dev-00 alone."""
    owner = rogue.fleet.stage.fleet
    old = dataclasses.replace(owner.roster, devices=owner.roster.devices[:1])
    owner.renew()
    return sign_document(owner.owner, old)


def test_signed_origins_can_t_be_swapped(rogue, caplog):
    """Both folds are honest; the certificate is for the one, the sealed bytes are the other's."""
    proposal, sealed = rogue.folded()
    given = rogue.endorsements(proposal.checkpoint, sealed)
    _, other = rogue.folded(3)
    assert other != sealed
    caplog.clear()
    rogue.publish(rogue.certificate(proposal.checkpoint, given), other)
    assert rogue.epochs() == [1, 1, 1]
    assert "not what the devices signed" in reasons(caplog)[0]


@pytest.mark.parametrize("keys", [True, False], ids=["with the newer keys", "with the roster only"])
def test_nobody_trains_on_under_secrets_that_the_owner_has_replaced(tmp_path, keys):
    """An aggregator that ignores a revocation gets no more updates, for any announcement."""
    rogue = taken_over(tmp_path, 1, count=4)
    with rogue.fleet as fleet:
        fleet.stage.fleet.revoke("dev-03")
        if keys:
            publish(fleet)
        else:
            for device in ("dev-00", "dev-01", "dev-02"):
                fleet.devices[device].runtime._membership.adopt(fleet.stage.fleet.roster_bytes)
        rogue.sent()
        everybody = ("dev-00", "dev-01", "dev-02", "dev-03")
        round_2 = rogue.step(0, TRAIN, everybody, round=2, nonce=b"\2" * 16)
        held = rogue.fleet.stage.fleet.secrets
        rogue.fleet.stage.fleet.secrets = dataclasses.replace(held, broadcast_key=old_key(fleet, "dev-03"))
        rogue.announce(round_2)
        assert rogue.sent() == [0, 0, 0, 1], "whoever was revoked may still help itself"


def old_key(fleet, name):
    return DeviceMembership(fleet.stage.device_dir(name)).grant.broadcast_key


@pytest.mark.parametrize("algorithm", ["fedgroup", "cfl"])
def test_nothing_is_masked_anew_for_an_aggregator_that_helps_who_was_revoked(tmp_path, caplog, algorithm):
    """It knows the vector in clear, from the revoked device, and would read the new mask off its new masked form."""
    settings = {"groups": "2", "alpha": "2"} if algorithm == "fedgroup" else CFL["settings"]
    rogue = taken_over(tmp_path, 2, count=4, algorithm=algorithm, settings=settings)
    with rogue.fleet as fleet:
        fleet.stage.fleet.revoke("dev-03")
        publish(fleet)
        rogue.sent()
        caplog.clear()
        generation = fleet.stage.fleet.roster.keys_since
        signing = dataclasses.replace(SIGN, renew=(1,))
        if algorithm == "fedgroup":
            rogue.announce(rogue.step(1, generation=generation, carried=(CARRIED,)))
        else:
            proposal, sealed = rogue.folded(1, generation=generation)
            rogue.sent()
            found = rogue.endorsements(proposal.checkpoint, sealed, 2, assignment=signing, generation=generation)
            assert found == {}
        assert rogue.sent()[:3] == [0, 0, 0]
        assert any("in a rollover to a new key version" in r for r in reasons(caplog))
        rogue.announce(rogue.step(5, generation=generation))
        assert rogue.sent()[:3] == [1, 0, 0], "the same without is done"


def test_a_device_says_where_it_is_under_the_key_that_came_in_force(tmp_path):
    """The new epoch was announced under the old broadcast key, which the aggregator may have erased."""
    rogue = taken_over(tmp_path)
    with rogue.fleet as fleet:
        owner = fleet.stage.fleet
        old = owner.secrets
        owner.rotate()
        publish(fleet)
        new, generation = owner.secrets, owner.roster.keys_since
        proposal, sealed = rogue.folded(generation=generation)
        given = rogue.endorsements(proposal.checkpoint, sealed, generation=generation)
        owner.secrets = old
        fleet.broker.retained.pop("shoal/v1/demo/s/round")  # nothing else follows by which it could notice
        rogue.publish(rogue.certificate(proposal.checkpoint, given), sealed)
        assert rogue.epochs() == [new.mask_epoch] * 3
        for device in fleet.stage.devices:
            payload = parse(fleet.broker.retained[f"shoal/v1/demo/d/{device}/state"])[1]
            head, at = read_head(payload)
            key = GroupKey("demo", "broadcast", new.broadcast_key)
            assert open_from_group(key, payload, head, at, device_identity(fleet, device).member.sign_key)


# ---------------------------------------------------------------------------------------------------- mixed epochs


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """(fleet, wiretap) of a run through three epochs that is over but for its final round's answers."""
    tap = Wiretap()
    with make_one_key_fleet(
        tmp_path_factory.mktemp("recorded") / "fleet", faults=tap, rounds=5, epoch_rounds=2
    ) as fleet:
        fleet.run_until(lambda: fleet.service.state.run.epoch == 3, 60)
        fleet.settle()
        yield fleet, tap


def replayed(fleet, tap, part):
    """Leave everything that lay under a topic with ``part`` in it once more, as the broker can."""
    for p in [p for p in tap.sent(hop=Hop.UP) if part in p.topic and p.payload and p.client != "attacker"]:
        fleet.broker.submit("attacker", Message(p.topic, p.payload, retained=True), lambda: None)
        fleet.settle()


@pytest.mark.parametrize("part", ["/s/checkpoint", "/s/round", "/s/model/", "/up"])
def test_what_belongs_to_an_earlier_epoch_comes_too_late(recorded, part):
    """Certificates, announcements, models and uploads of three epochs, replayed in order: no party reacts."""
    fleet, tap = recorded
    state = fleet.service.state
    before = (state.run, state.received, [d.runtime._state.mark for d in fleet.devices.values()])
    marks = {d: x.runtime._run.plan for d, x in fleet.devices.items()}
    replayed(fleet, tap, part)
    state = fleet.service.state
    assert (state.run, state.received, [d.runtime._state.mark for d in fleet.devices.values()]) == before
    assert {d: x.runtime._run.plan for d, x in fleet.devices.items()} == marks


def test_a_device_that_restarts_does_not_take_an_earlier_epoch_for_its_own(recorded):
    """The broker withholds the newest certificate and delivers the previous one."""
    fleet, tap = recorded
    first = next(p for p in tap.sent(hop=Hop.UP) if p.topic.endswith("/s/checkpoint"))
    newest = fleet.broker.retained[first.topic]
    fleet.kill_device("dev-02")
    fleet.broker.retained[first.topic] = first.payload
    fleet.revive_device("dev-02")
    fleet.settle()
    assert fleet.devices["dev-02"].runtime._run.plan.epoch == 3
    fleet.broker.retained[first.topic] = newest


def test_an_upload_of_another_epoch_is_refused(tmp_path, caplog):
    """Under its own key, and under the true one's name: both ways an error, never a sum of two masks."""
    tap = Wiretap()
    with make_one_key_fleet(tmp_path / "fleet", faults=tap, rounds=4, epoch_rounds=2, quorum=1.0) as fleet:
        fleet.run_until(lambda: fleet.service.state.run.epoch == 2 and fleet.service.state.round == 3, 60)
        rule = tap.lose(client=fleet.client_id("dev-02"), ending="/up")
        fleet.settle()
        upload, body = open_upload(fleet, "dev-02", uploads_of(fleet, tap, "dev-02")[-1])
        old, _ = open_upload(fleet, "dev-02", uploads_of(fleet, tap, "dev-02")[0])
        assert (upload.epoch, old.epoch) == (2, 1)
        caplog.clear()
        for changes, expected in (
            ({"epoch": 1, "key_id": old.key_id}, "of another run, epoch or task"),
            ({"key_id": old.key_id}, "masked under another key"),
            ({"epoch": 3}, "of another run, epoch or task"),
        ):
            inject(fleet, "dev-02", seal_upload(fleet, "dev-02", dataclasses.replace(upload, **changes), body))
            fleet.settle()
            assert any(expected in r for r in reasons(caplog)), changes
            caplog.clear()
        tap.forgive(rule)
        assert [r["contributed"] for r in fleet.run(60)][2:] == [3, 3, 3]
