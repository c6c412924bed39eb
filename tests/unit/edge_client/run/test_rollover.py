"""A device's part in a rollover: it folds, or compares another device's fold bit for bit, and signs it or refuses."""

import dataclasses
import hashlib

import numpy as np
import pytest

from crypto.mask.masking import mask, unmask
from crypto.seal.identity import Identity
from edge_client.run import package, rollover
from edge_client.storage.state import OwnModel, write_model
from shoal.errors import NotEnrolledError, UntrustedError
from shoal.membership.certificates import has_signed
from shoal.protocol.codec import decode_prefix, encode
from shoal.protocol.epochs import Endorsement
from shoal.protocol.messages import CARRIED_FIRST, PROPOSAL_MODEL, ModelRef, Phase
from shoal.types import MaskedVector
from tests.helpers.crews import BUNDLE, FOLDER, ORIGINS, Crew, sealed_of
from tests.helpers.tasks import logistic_bundle

D = BUNDLE.length
SIGNER = "dev-2"


@pytest.fixture(scope="module")
def crew(tmp_path_factory):
    """A crew for tests that change no files."""
    return Crew(tmp_path_factory.mktemp("crew"))


@pytest.fixture
def fresh(tmp_path):
    """A crew for tests that change keys, rosters or cached updates."""
    return Crew(tmp_path)


def do_endorse(crew, checkpoint, sealed, *, generation=0, renew=(), models=None, shop=None):
    """Return (Endorsement, bytes after it, objection) as ``SIGNER`` makes them."""
    shop = shop or crew.shop(SIGNER)
    announcement, assignment = crew.announced(shop.plan, Phase.ENDORSE, generation=generation)
    assignment = dataclasses.replace(assignment, renew=renew)
    data = encode(checkpoint) + sealed
    finished = rollover.endorse(shop, announcement, assignment, models or crew.models, data, crew.members[SIGNER])
    _, body = crew.read(finished, SIGNER)
    return (*decode_prefix(body, Endorsement), finished.objection)


def is_signed(crew, endorsement, checkpoint):
    return has_signed(crew.members[SIGNER].identity.member, checkpoint, endorsement.signature)


# ---------------------------------------------------------------------------------------------------- fold


def test_the_fold_holds_the_models_in_order_of_their_ids(crew):
    proposal, rest = crew.fold()
    c, run = proposal.checkpoint, package.open_run(crew.package, crew.members[SIGNER])
    assert (c.fleet, c.run_id, c.round, c.epoch, c.next_epoch) == ("demo", run.plan.run_id, 2, 1, 2)
    assert (c.generation, c.origins, proposal.carried) == (0, 2, 0)
    sealed = sealed_of(proposal, rest)
    assert c.digest == hashlib.sha256(sealed).digest()
    task, origins = package.open_origins(sealed, c, run.plan, crew.members[SIGNER])
    assert task.digest == BUNDLE.digest
    assert origins.tobytes() == ORIGINS.tobytes()
    key = package.epoch_key(run.plan, crew.members[SIGNER].secret_at(0, 2), 2)
    assert c.key_id == key.key_id != run.key.key_id


def test_only_devices_and_the_owner_can_read_a_fold(crew, tmp_path):
    """It is sealed under the content key, which only devices and the owner have; the upload shows no model."""
    proposal, rest = crew.fold()
    body = bytes(rest)
    assert ORIGINS[0].tobytes()[:16] not in body
    stranger = Crew(tmp_path)
    with pytest.raises(UntrustedError):
        package.open_origins(sealed_of(proposal, rest), proposal.checkpoint, crew.plan, stranger.members[SIGNER])


def test_carried_vectors_get_the_new_mask_and_are_the_same_in_clear(crew):
    vectors = {CARRIED_FIRST + 1: ORIGINS[1] * 2, CARRIED_FIRST: ORIGINS[0] * 3}
    proposal, rest = crew.fold(vectors)
    assert proposal.carried == 2
    run = package.open_run(crew.package, crew.members[SIGNER])
    new = package.epoch_key(run.plan, crew.members[SIGNER].secret_at(0, 2), 2)
    for i, clear in enumerate((ORIGINS[0] * 3, ORIGINS[1] * 2)):
        masked = np.frombuffer(rest[4 * D * i : 4 * D * (i + 1)], "<f4").copy()
        assert masked.tobytes() not in (clear.tobytes(), mask(clear, run.key).values.tobytes())
        assert unmask(MaskedVector(masked, new.key_id), new).tobytes() == clear.tobytes()


def test_under_fresh_secrets_the_epoch_is_the_owners(fresh):
    fresh.rotate()
    generation = fresh.owner.roster.keys_since
    proposal, rest = fresh.fold(generation=generation)
    c = proposal.checkpoint
    assert (c.generation, c.next_epoch) == (generation, fresh.owner.secrets.mask_epoch)
    _, origins = package.open_origins(sealed_of(proposal, rest), c, fresh.plan, fresh.members[SIGNER])
    assert origins.tobytes() == ORIGINS.tobytes()


def test_a_device_does_not_fold_for_secrets_that_it_does_not_have(fresh):
    fresh.owner.rotate()
    with pytest.raises(NotEnrolledError, match="no keys of roster"):
        fresh.fold(generation=fresh.owner.roster.keys_since)


def test_a_rollover_to_older_secrets_is_refused(crew):
    """Revoked devices hold those."""
    shop = crew.shop(FOLDER)
    newer = dataclasses.replace(shop, run=dataclasses.replace(shop.run, generation=9))
    announcement, _ = crew.announced(shop.plan, Phase.CHECKPOINT, generation=8)
    with pytest.raises(UntrustedError, match="a rollover to keys of roster 8 after 9"):
        rollover.next_epoch(newer, announcement, crew.members[FOLDER])


# ---------------------------------------------------------------------------------------------------- endorse


def test_the_same_fold_is_signed(crew):
    proposal, rest = crew.fold()
    endorsement, more, objection = do_endorse(crew, proposal.checkpoint, sealed_of(proposal, rest))
    assert is_signed(crew, endorsement, proposal.checkpoint)
    assert (endorsement.renewed, bytes(more), objection) == ((), b"", "")


def test_a_fold_under_fresh_secrets_is_signed(fresh):
    fresh.rotate()
    generation = fresh.owner.roster.keys_since
    proposal, rest = fresh.fold(generation=generation)
    endorsement, _, objection = do_endorse(fresh, proposal.checkpoint, sealed_of(proposal, rest), generation=generation)
    assert is_signed(fresh, endorsement, proposal.checkpoint), objection


def forged(crew, models=ORIGINS, *, task=BUNDLE, signer=None, **changes):
    """Return (Checkpoint, sealed) as a compromised device can make them."""
    honest = crew.fold()[0].checkpoint
    claimed = dataclasses.replace(honest, **{"origins": len(models), **changes})
    member = crew.members[FOLDER]
    identity, models = signer or member.identity, np.ascontiguousarray(models, "<f4")
    sealed = package.seal_origins(task, models, claimed, identity, member.content_of(0))
    return dataclasses.replace(claimed, digest=hashlib.sha256(sealed).digest()), sealed


def one_bit_off():
    off = ORIGINS.copy()
    off.view("<u4")[1, 4] ^= 1
    return off


def with_one(value):
    off = ORIGINS.copy()
    off[0, 0] = value
    return off


BAD = {
    "one bit of one model": (lambda c: forged(c, one_bit_off()), "our fold of the models differs"),
    "models in another order": (lambda c: forged(c, ORIGINS[::-1]), "our fold of the models differs"),
    "not a number": (lambda c: forged(c, with_one(np.nan)), "not finite"),
    "infinity": (lambda c: forged(c, with_one(np.inf)), "not finite"),
    "a model too few": (lambda c: forged(c, ORIGINS[:1]), "not what is sealed"),
    "a model too many": (lambda c: forged(c, ORIGINS[[0, 1, 1]]), "not what is sealed"),
    "fewer models than sealed": (lambda c: forged(c, ORIGINS[:1], origins=2), "bytes where a task and 2 origins"),
    "shorter models": (lambda c: forged(c, ORIGINS[:, :-1]), "bytes where a task and 2 origins"),
    "longer models": (lambda c: forged(c, np.c_[ORIGINS, ORIGINS]), "bytes where a task and 2 origins"),
    "another task": (
        lambda c: forged(c, task=logistic_bundle(segment="cluster", name="other")),
        "not the one that the run plan names",
    ),
    "another digest": (lambda c: _with_digest(c, bytes(32)), "not what is sealed"),
    "sealed bytes cut short": (lambda c: _cut(c), "not what is sealed"),
    "sealed junk": (lambda c: _with_sealed(c, b"junk"), "not a sealed message"),
    "sealed by a stranger": (lambda c: forged(c, signer=Identity.generate("dev-9")), "that is not this checkpoint's"),
    "sealed under another's name": (lambda c: forged(c, signer=Identity.generate("dev-3")), "was refused"),
    "of another run": (lambda c: forged(c, run_id=bytes(16)), "of another run, round or mask epoch"),
    "of another fleet": (lambda c: forged(c, fleet="other"), "of another run, round or mask epoch"),
    "of another round": (lambda c: forged(c, round=1), "of another run, round or mask epoch"),
    "of another epoch": (lambda c: forged(c, epoch=0), "of another run, round or mask epoch"),
    "for an epoch too far": (lambda c: forged(c, next_epoch=3), "another key than ours"),
    "for other secrets": (lambda c: forged(c, generation=1), "another key than ours"),
    "for another key": (lambda c: forged(c, key_id=bytes(16)), "another key than ours"),
}


def _with_digest(crew, digest):
    checkpoint, sealed = forged(crew)
    return dataclasses.replace(checkpoint, digest=digest), sealed


def _cut(crew):
    checkpoint, sealed = forged(crew)
    return checkpoint, sealed[:-1]


def _with_sealed(crew, sealed):
    return dataclasses.replace(forged(crew)[0], digest=hashlib.sha256(sealed).digest()), sealed


@pytest.mark.parametrize("case", BAD)
def test_the_fold_of_a_compromised_device_is_not_signed(crew, case):
    make, expected = BAD[case]
    checkpoint, sealed = make(crew)
    endorsement, more, objection = do_endorse(crew, checkpoint, sealed, renew=(1,))
    assert endorsement == Endorsement(bytes(64), ())
    assert bytes(more) == b""
    assert expected in objection


def test_the_forger_without_a_fault_makes_a_valid_fold(crew):
    """The control: the same steps without a fault are signed."""
    checkpoint, sealed = forged(crew)
    assert is_signed(crew, do_endorse(crew, checkpoint, sealed)[0], checkpoint)


@pytest.mark.parametrize("junk", [b"", b"SHM1", encode(Endorsement(bytes(64), ()))])
def test_an_invalid_proposal_is_answered_without_a_signature(crew, junk):
    """So that the round does not wait for its deadline."""
    shop = crew.shop(SIGNER)
    announcement, assignment = crew.announced(shop.plan, Phase.ENDORSE)
    finished = rollover.endorse(shop, announcement, assignment, crew.models, junk, crew.members[SIGNER])
    assert finished.objection
    assert decode_prefix(crew.read(finished, SIGNER)[1], Endorsement)[0].signature == bytes(64)


def test_a_device_whose_own_models_differ_does_not_sign(crew):
    proposal, rest = crew.fold()
    mine = {3: ORIGINS[0], 7: ORIGINS[1] + np.float32(1e-3)}
    endorsement, _, objection = do_endorse(crew, proposal.checkpoint, sealed_of(proposal, rest), models=mine)
    assert endorsement.signature == bytes(64)
    assert "differs" in objection


def test_nothing_is_signed_under_secrets_that_the_owner_has_replaced(fresh):
    """The device may not have the newer secrets yet: the roster names their key version."""
    proposal, rest = fresh.fold()
    fresh.owner.rotate()
    fresh.members[SIGNER].adopt(fresh.owner.roster_bytes)
    endorsement, _, objection = do_endorse(fresh, proposal.checkpoint, sealed_of(proposal, rest))
    assert endorsement.signature == bytes(64)
    assert "the owner has replaced the keys of roster 0" in objection


def test_a_fold_by_a_device_that_was_revoked_meanwhile_is_not_signed(fresh):
    """Same secrets, newer roster: the roster may arrive before the new secrets."""
    proposal, rest = fresh.fold()
    member = fresh.members[SIGNER]
    member.roster = dataclasses.replace(member.roster, revoked=(FOLDER,))
    endorsement, _, objection = do_endorse(fresh, proposal.checkpoint, sealed_of(proposal, rest))
    assert endorsement.signature == bytes(64)
    assert "'dev-1'" in objection


def test_without_the_newest_secrets_nothing_is_signed(fresh):
    fresh.rotate(FOLDER)
    generation = fresh.owner.roster.keys_since
    proposal, rest = fresh.fold(generation=generation)
    endorsement, _, objection = do_endorse(fresh, proposal.checkpoint, sealed_of(proposal, rest), generation=generation)
    assert endorsement.signature == bytes(64)
    assert f"no keys of roster {generation}" in objection


@pytest.mark.parametrize(("off", "signs"), [(1e-6, True), (1e-4, False)])
def test_rotations_may_differ_by_rounding(tmp_path, off, signs):
    """Their floating point differs between processors; 1e-5 in relative l2 is the line."""
    crew = Crew(tmp_path, mode="rotation")
    proposal, rest = crew.fold()
    mine = {m: theta * np.float32(1 + off) for m, theta in crew.models.items()}
    endorsement, _, _ = do_endorse(crew, proposal.checkpoint, sealed_of(proposal, rest), models=mine)
    assert is_signed(crew, endorsement, proposal.checkpoint) == signs


def test_one_model_that_is_off_is_not_hidden_by_a_large_one(tmp_path):
    """The line is drawn for each model."""
    crew = Crew(tmp_path, mode="rotation")
    crew.models = {3: ORIGINS[0] * np.float32(1e6), 7: ORIGINS[1]}
    proposal, rest = crew.fold()
    mine = {**crew.models, 7: ORIGINS[1] * np.float32(1.001)}
    endorsement, _, _ = do_endorse(crew, proposal.checkpoint, sealed_of(proposal, rest), models=mine)
    assert endorsement.signature == bytes(64)


# ---------------------------------------------------------------------------------------------------- own updates


def test_its_own_updates_get_the_new_mask(fresh):
    shop = fresh.shop(SIGNER)
    one, two = ORIGINS[0] * 2, ORIGINS[1] * 5
    shop.own.note(1, one)
    shop.own.keep(1)
    shop.own.note(2, two)
    proposal, rest = fresh.fold()
    endorsement, more, _ = do_endorse(fresh, proposal.checkpoint, sealed_of(proposal, rest), renew=(1, 2, 3), shop=shop)
    assert endorsement.renewed == (1, 2), "there is none of round 3"
    new = package.epoch_key(shop.plan, fresh.members[SIGNER].secret_at(0, 2), 2)
    for i, clear in enumerate((one, two)):
        masked = np.frombuffer(more[4 * D * i : 4 * D * (i + 1)], "<f4").copy()
        assert unmask(MaskedVector(masked, new.key_id), new).tobytes() == clear.tobytes()


def test_a_damaged_update_costs_no_signature(fresh):
    shop = fresh.shop(SIGNER)
    path = fresh.members[SIGNER].directory / "own-000001.bin"
    write_model(path, OwnModel(shop.plan.run, shop.plan.run_id, 1, 0, ORIGINS[0]), durable=False)
    path.write_bytes(path.read_bytes()[:-5])
    proposal, rest = fresh.fold()
    endorsement, _, objection = do_endorse(fresh, proposal.checkpoint, sealed_of(proposal, rest), renew=(1,), shop=shop)
    assert is_signed(fresh, endorsement, proposal.checkpoint)
    assert (endorsement.renewed, objection) == ((), "")


# ---------------------------------------------------------------------------------------------------- job


def test_only_the_announced_proposal_is_looked_at(crew):
    shop = crew.shop(SIGNER)
    ref = ModelRef(model=PROPOSAL_MODEL, origin=0, label="x", transfer=b"\1" * 16, contributors=0, norm=0.0)
    announcement, assignment = crew.announced(shop.plan, Phase.ENDORSE, proposal=ref)
    arguments = (shop, announcement, assignment, crew.models, {})
    with pytest.raises(UntrustedError, match="not the one that was announced"):
        rollover.job(*arguments, (b"\2" * 16, b"x"), crew.members[SIGNER])
    assert rollover.job(*arguments, (b"\1" * 16, b"x"), crew.members[SIGNER])(lambda: False).objection
