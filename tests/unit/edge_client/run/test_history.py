"""The history of a run that an announcement implies: what makes a device leave, wait, warn, or go on."""

import dataclasses

import pytest

from crypto.seal.replay import ReplayWatermark
from edge_client.models.store import OWN_FORK, Transcript
from edge_client.run.beginning import resume_run
from edge_client.run.history import certifying, check_history
from edge_client.storage.state import DeviceState
from shoal.errors import ForkedHistoryError, MissingStateError
from shoal.membership.statements import sign_statement
from shoal.protocol.codec import encode
from shoal.protocol.states import FORKED_ROUND, Offer, StateId
from tests.helpers.round_runs import NAMES, ONE, TRAIN, Scene, changed, statements, to_round


def test_broken_history_ends_the_run(scene, models):
    """Another offer, another mean or another key version in round 3, or in round 2 with the same round 3."""
    steps = to_round(scene, models, 2)
    honest = scene.announcement(3, steps=steps)
    for n, altered in enumerate(
        (
            changed(honest, transcript=b"x" * 32),
            changed(honest, offers=(Offer(0, StateId(0, 1)),)),
            changed(honest, steps=(steps[0], scene.step(2, {0: 2 * ONE}))),
        )
    ):
        device = models[NAMES[n]]
        with pytest.raises(ForkedHistoryError, match="another history of run 1"):
            device.locate(altered, TRAIN)
        with pytest.raises(ForkedHistoryError):
            device.locate(honest, TRAIN)
        member = scene.parties.members[NAMES[n]]
        _, resumed = resume_run(DeviceState(member.directory).load_run(), member, ReplayWatermark())
        with pytest.raises(ForkedHistoryError):
            resumed.locate(scene.announcement(4, steps=steps), TRAIN)


def test_repeated_round_has_one_transcript(scene, models):
    """A round that is announced again has the same transcript."""
    steps = to_round(scene, models, 2)
    honest = scene.announcement(3, steps=steps)
    scene.serve(models["dev-1"], honest)
    assert models["dev-1"].locate(honest, TRAIN) == {}
    with pytest.raises(ForkedHistoryError):
        models["dev-1"].locate(changed(honest, transcript=b"x" * 32), TRAIN)


def away_in_round_5(scene, models):
    """Return dev-3, which was away in round 4, and the announcement of round 5, which two devices have signed."""
    steps = to_round(scene, models, 3)
    scene.announcement(4, steps=steps)
    before = statements(scene, models, 4, ("dev-1", "dev-2"))
    steps = (*steps, scene.step(4, {0: ONE}))[-2:]
    return models["dev-3"], scene.announcement(5, steps=steps, statements=before)


def lie(scene, models, name, round_, head=b"y" * 32):
    return sign_statement(scene.parties.members[name].identity, models[name].states.statement(name, round_, head))


def test_missed_round_needs_a_transcript(scene, models):
    """A device that missed a round takes a transcript that enough devices have signed."""
    away, believed = away_in_round_5(scene, models)
    one, other = believed.held.statements
    forged = other[:-1] + bytes([other[-1] ^ 1])
    for signed in ((), (one,), (one, one), (one, forged), (one, lie(scene, models, "dev-2", 4)), (b"junk",)):
        with pytest.raises(MissingStateError, match="have signed the history of round 5, and 2 must"):
            away.locate(changed(believed, statements=signed), TRAIN)
    assert away.locate(believed, TRAIN)
    assert away.contrary == ()


def test_one_other_history_moves_nobody(scene, models):
    """One device that has signed another history makes no device leave."""
    away, believed = away_in_round_5(scene, models)
    said = (*believed.held.statements, lie(scene, models, "dev-1", 4), lie(scene, models, "dev-1", 3))
    assert away.locate(changed(believed, statements=said), TRAIN)
    assert away.contrary == ("dev-1",)
    assert away.head.round == 3
    away.locate(believed, TRAIN)
    assert away.contrary == ()


def test_enough_other_histories_move_it(scene, models):
    """A device leaves if enough others have signed one other history and stays away unless they are revoked."""
    away, believed = away_in_round_5(scene, models)
    liars = ("dev-1", "dev-2")
    two = tuple(lie(scene, models, name, 3) for name in liars)
    apart = (two[0], lie(scene, models, "dev-2", 3, b"z" * 32))
    away.locate(changed(believed, statements=(*believed.held.statements, *apart)), TRAIN)
    with pytest.raises(ForkedHistoryError, match="than 2 devices have signed"):
        away.locate(changed(believed, statements=(*believed.held.statements, *two)), TRAIN)
    assert away.head.round == FORKED_ROUND
    with pytest.raises(ForkedHistoryError):
        away.locate(believed, TRAIN)


def test_revocation_lets_a_device_return(tmp_path):
    """A device that has left returns after a revocation if it or enough others know the history."""
    names = (*NAMES, "dev-4")
    scene = Scene(tmp_path, *names)
    models = {name: scene.device(name) for name in names}
    away, believed = away_in_round_5(scene, models)
    roster, known, held = scene.parties.members["dev-3"].roster, away._store.transcript, believed.held

    def compared(transcript, *revoked, held=held):
        after = dataclasses.replace(roster, revoked=revoked)
        return check_history(scene.plan, after, 5, held, known=transcript, began=True)

    left, own = Transcript(FORKED_ROUND, known.head), Transcript(OWN_FORK, known.head)
    assert compared(left, "dev-4") == ()
    one = dataclasses.replace(held, statements=held.statements[:1])
    # Nobody is revoked; its own announcements contradict each other; a signer is the revoked one; too few have signed.
    for transcript, revoked, shown in (
        (left, (), held),
        (own, ("dev-4",), held),
        (left, ("dev-1",), held),
        (left, ("dev-4",), one),
    ):
        with pytest.raises(ForkedHistoryError, match="than this device"):
            compared(transcript, *revoked, held=shown)
    unsigned = dataclasses.replace(held, statements=())
    assert compared(Transcript(FORKED_ROUND, scene.heads[4]), "dev-4", held=unsigned) == (), "it recomputes the head"
    with pytest.raises(ForkedHistoryError):
        compared(Transcript(FORKED_ROUND, scene.heads[4]), held=unsigned)


def test_thinly_signed_rounds_use_entries(scene, models):
    """Rounds 4 and 5 closed with no signature at all: their entries lead back to round 3, which this device knows."""
    steps = to_round(scene, models, 3)
    links = []
    for round_ in (4, 5):
        announced = scene.announcement(round_, states={0: (0, 3)}, steps=steps)
        links.append(encode(scene.entry(announced)))
    with pytest.raises(MissingStateError):
        models["dev-1"].locate(scene.announcement(6, states={0: (0, 3)}, steps=steps), TRAIN)
    for cut in (links[1:], [links[0], links[0]], [links[0], links[1][:-1] + b"?"]):
        with pytest.raises(MissingStateError):
            models["dev-1"].locate(scene.announcement(6, states={0: (0, 3)}, steps=steps, statements=tuple(cut)), TRAIN)
    models["dev-1"].locate(scene.announcement(6, states={0: (0, 3)}, steps=steps, statements=tuple(links)), TRAIN)
    assert models["dev-1"].head.round == 3


@pytest.mark.parametrize("helped", [False, True])
def test_two_histories_convince_nobody(tmp_path, helped):
    """Of five devices three certify. The halves have two and one, or a liar in one half signs the other half's head as well."""
    names = tuple(f"dev-{n}" for n in range(1, 6))
    scene = Scene(tmp_path, *names, min_contributors=3)
    models = {name: scene.device(name) for name in names}
    steps = to_round(scene, models, 3, names)
    true = scene.announcement(4, steps=steps)
    half = statements(scene, models, 4, ("dev-1", "dev-2"))
    other = changed(scene.announcement(4, steps=(steps[0], scene.step(3, {0: 2 * ONE}))))
    assert other.held.transcript != true.held.transcript
    signers = ("dev-3", "dev-2") if helped else ("dev-3", "dev-4")
    theirs = statements(scene, models, 4, signers)
    shown = scene.announcement(5, states={0: (0, 3)}, steps=other.held.steps, statements=theirs)
    ref = scene.checkpoint("dev-3", models["dev-3"], (0, 2), 4)
    for signed in (theirs, (*theirs, half[0]), (*theirs, theirs[0])):
        with pytest.raises(MissingStateError, match="2 devices have signed the history of round 5, and 3 must"):
            models["dev-5"].locate(changed(shown, statements=signed, checkpoints=(ref,)), TRAIN)
        counted = certifying(
            scene.plan,
            scene.parties.members["dev-5"].roster,
            5,
            changed(shown, statements=signed).held,
            models["dev-5"]._store.transcript,
        )
        assert {c.statement.device for c in counted} == set(signers), "the other half's certify nothing here"
