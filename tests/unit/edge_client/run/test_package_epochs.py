"""Opening of a later mask epoch: enough signatures, of the right roster, over the sealed origins."""

import dataclasses

import pytest

from edge_client.run import package
from shoal.errors import IntegrityError, UntrustedError
from shoal.membership.certificates import sign_checkpoint
from shoal.protocol.codec import encode
from shoal.protocol.epochs import Certificate, Checkpoint, Epoch, SignedBy
from shoal.task.bundle import TaskBundle
from tests.helpers.crews import FOLDER, ORIGINS, Crew, sealed_of

SIGNER = "dev-2"


@pytest.fixture
def crew(tmp_path):
    return Crew(tmp_path)


def certified(crew, proposal, rest, signers=None, roster=None):
    """Return the Epoch that the fleet would continue with."""
    c = proposal.checkpoint
    names = signers or list(crew.members)
    given = tuple(SignedBy(d, sign_checkpoint(crew.members[d].identity, c)) for d in names)
    return Epoch(Certificate(c, roster or crew.owner.roster_bytes, given), sealed_of(proposal, rest))


def test_the_next_epoch_is_opened_with_its_certificate(crew):
    proposal, rest = crew.fold()
    run = package.open_epoch(crew.package, certified(crew, proposal, rest, [FOLDER, SIGNER]), crew.members["dev-3"])
    c: Checkpoint = proposal.checkpoint
    assert (run.plan.epoch, run.plan.key_id, run.plan.origins, run.since, run.generation) == (2, c.key_id, 2, 2, 0)
    assert run.origins.tobytes() == ORIGINS.tobytes()
    assert isinstance(run.bundle, TaskBundle)


def test_one_of_three_signatures_opens_nothing(crew):
    proposal, rest = crew.fold()
    with pytest.raises(UntrustedError, match="1 signatures of 3"):
        package.open_epoch(crew.package, certified(crew, proposal, rest, [FOLDER]), crew.members["dev-3"])


def test_the_sealed_origins_must_be_those_that_were_signed(crew):
    proposal, rest = crew.fold()
    epoch = certified(crew, proposal, rest)
    other = dataclasses.replace(epoch, sealed=sealed_of(*crew.fold()))
    assert other.sealed != epoch.sealed
    with pytest.raises(IntegrityError, match="not what the devices signed"):
        package.open_epoch(crew.package, other, crew.members["dev-3"])


def test_a_certificate_under_an_older_roster_than_announced_is_refused(tmp_path):
    """The fleet was one device when its secrets were drawn: that one must not decide for the three of today."""
    crew = Crew(tmp_path)
    old = crew.owner.roster_bytes
    crew.owner.renew()
    proposal, rest = crew.fold()
    epoch = certified(crew, proposal, rest, roster=old)
    at = crew.owner.roster.sequence
    assert package.open_epoch(crew.package, epoch, crew.members["dev-3"], at - 1).plan.epoch == 2
    with pytest.raises(UntrustedError, match="refused as a rollback"):
        package.open_epoch(crew.package, epoch, crew.members["dev-3"], at)


def test_a_device_finds_its_way_back_after_the_owner_has_replaced_the_keys(crew):
    """Its stored epoch is older: the device that folded was revoked since, and the fleet has not rolled over yet."""
    proposal, rest = crew.fold()
    epoch = certified(crew, proposal, rest)
    member = crew.members["dev-3"]
    member.enter(0, 2)
    crew.owner.revoke(FOLDER)
    crew.hand_out("dev-3")
    assert member.adopt(crew.owner.roster_bytes)
    assert member.roster.revoked == (FOLDER,)
    run = package.reopen(crew.package, encode(epoch), member)
    assert (run.plan.epoch, run.generation) == (2, 0)


def test_an_epoch_of_another_run_is_not_looked_at(crew, tmp_path):
    other = Crew(tmp_path / "other")
    proposal, rest = other.fold()
    epoch = certified(other, proposal, rest)
    assert package.reopen(crew.package, encode(epoch), crew.members[SIGNER]).plan.epoch == 1
    with pytest.raises(UntrustedError):
        package.open_epoch(crew.package, epoch, crew.members[SIGNER])
