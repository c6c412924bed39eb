"""Models that a device holds: the way to each round by means and checkpoints, and what is refused on it."""

import dataclasses

import numpy as np
import pytest

from aggregator.strategies.base import place_assignment
from crypto.seal.replay import ReplayWatermark
from edge_client.models.checkpoints import BadCheckpointError, open_checkpoint
from edge_client.models.states import ModelState
from edge_client.models.store import FOLDER, stored_certificate
from edge_client.run import held_models
from edge_client.run.beginning import resume_run
from edge_client.run.held_models import CertifiedStates, check_segments, length_of, needed_states, segment_of
from edge_client.storage.state import DeviceState
from shoal.errors import (
    ForkedHistoryError,
    IntegrityError,
    KeyMismatchError,
    MissingStateError,
    NotEnrolledError,
    UntrustedError,
)
from shoal.membership.statements import check_claims, read_claims, signers_needed
from shoal.protocol.codec import decode_prefix
from shoal.protocol.documents import Capabilities, SegmentSpec
from shoal.protocol.messages import SHARED_MODEL
from shoal.protocol.states import (
    SealedCheckpoints,
    StateCertificate,
    StateId,
    mean_number,
)
from tests.helpers.plans import run_plan
from tests.helpers.round_runs import LENGTH, NAMES, ONE, TRAIN, Scene, changed, origins, statements, to_round


def damage(scene, models, at, factor=2.0):
    """Replace a state that a device holds by another vector, with a digest that fits it."""
    held = models.states.held[at]
    theta = held.theta * np.float32(factor)
    bad = ModelState.of(at, theta, run_id=scene.plan.run_id, digest_key=held.digest_key)
    models.states = models.states.with_states([bad])


def rotate(scene):
    """Let the owner draw newer keys and all devices take them; return their version's number."""
    owner = scene.parties.owner
    owner.rotate()
    for name, member in scene.parties.members.items():
        member.adopt(owner.roster_bytes)
        member.take_grant(scene.parties.grant(name))
    return owner.roster.keys_since


def test_device_adds_the_mean_of_each_round(scene, models):
    """It fetches that mean alone; in an even round its states are stored, and the keys of the rounds applied are erased."""
    steps, device = to_round(scene, models, 3), models["dev-1"]
    announced = scene.announcement(4, steps=steps)
    assert list(device.locate(announced, TRAIN)) == [scene.label(mean_number(0, 3))]
    theta = scene.serve(device, announced)[0]
    assert np.abs(theta - (origins()[0] + 3)).max() < 1e-5
    assert list(device.states.held) == [StateId(0, 3)]
    assert device.locate(announced, TRAIN) == {}, "announced again, after a reconnection for example"
    member = scene.parties.members["dev-1"]
    _, resumed = resume_run(DeviceState(member.directory).load_run(), member, ReplayWatermark())
    assert resumed.states.digests() == device.states.digests()
    assert not resumed._store.has_keys(3)
    assert resumed._store.pending.keys() == {4, 5}, "they are needed for the updates and means of two rounds"


def test_odd_rounds_are_made_again(scene, models):
    """After a restart in an odd round a device knows its transcript, and applies the means of two rounds to the same bits."""
    steps = to_round(scene, models, 3)
    device, member = models["dev-1"], scene.parties.members["dev-1"]
    announced, again = scene.announcement(4, steps=steps), scene.parties.members["dev-2"]
    mark = ReplayWatermark(run=scene.plan.run, round=3, transcript=device.head.transcript)
    _, resumed = resume_run(DeviceState(member.directory).load_run(), member, mark)
    assert resumed.states.held.keys() == {StateId(0, 1)}
    assert resumed.head == device.head
    assert resumed.locate(announced, TRAIN).keys() == {scene.label(mean_number(0, r)) for r in (2, 3)}
    assert scene.serve(resumed, announced)[0].tobytes() == scene.serve(device, announced)[0].tobytes()
    for known, error in ((ReplayWatermark(), MissingStateError), (mark, ForkedHistoryError)):
        _, resumed = resume_run(DeviceState(again.directory).load_run(), again, known)
        with pytest.raises(error):
            resumed.locate(changed(announced, transcript=b"x" * 32), TRAIN)


def test_restart_makes_unstored_states_again(scene, models):
    """A restart before the states are stored makes them again."""
    steps = to_round(scene, models, 2)
    device, announced = models["dev-1"], scene.announcement(3, steps=steps)
    for label, transfer in device.locate(announced, TRAIN).items():
        device.take(label, transfer, memoryview(scene.transfers[label, transfer]))
    theta = device.thetas(announced, TRAIN)[0]
    member = scene.parties.members["dev-1"]
    _, resumed = resume_run(DeviceState(member.directory).load_run(), member, ReplayWatermark())
    assert resumed.states.held.keys() == {StateId(0, 1)}
    assert scene.serve(resumed, announced)[0].tobytes() == theta.tobytes()
    assert resumed.context(announced, TRAIN).key_id == device.context(announced, TRAIN).key_id


def test_missed_rounds_take_a_checkpoint(scene, models):
    """A device that missed more takes a checkpoint and the means after it."""
    to_round(scene, models, 2)
    both = {name: models[name] for name in ("dev-1", "dev-2")}
    steps = (scene.step(1, {0: ONE}), scene.step(2, {0: ONE}))
    for round_ in range(3, 7):
        for held in both.values():
            scene.serve(held, scene.announcement(round_, steps=steps))
        steps = (*steps, scene.step(round_, {0: ONE}))[-2:]
    ref = scene.checkpoint("dev-1", both["dev-1"], (0, 5), 6)
    signed = statements(scene, models, 6, tuple(both))
    announced = scene.announcement(7, steps=steps, checkpoints=(ref,), statements=signed)
    needed = models["dev-3"].locate(announced, TRAIN)
    assert needed.keys() == {ref.label, scene.label(mean_number(0, 6))}
    theta = scene.serve(models["dev-3"], announced)[0]
    for held in both.values():
        assert scene.serve(held, announced)[0].tobytes() == theta.tobytes()


def test_thinly_signed_checkpoint_is_left(scene, models):
    """Without a checkpoint that enough devices have signed the device lacks the state."""
    steps = to_round(scene, models, 6, names=("dev-1", "dev-2"))
    ref = scene.checkpoint("dev-1", models["dev-1"], (0, 5), 6)
    without = scene.announcement(7, steps=steps, statements=statements(scene, models, 6, ("dev-1", "dev-2")))
    with pytest.raises(MissingStateError, match="states 6 of model 0 can't be made"):
        models["dev-3"].locate(without, TRAIN)
    for signed in ((), statements(scene, models, 6, ("dev-1",)), (b"junk",)):
        announced = scene.announcement(7, steps=steps, checkpoints=(ref,), statements=signed)
        with pytest.raises(MissingStateError):
            models["dev-3"].locate(announced, TRAIN)


def test_erased_round_keys_make_it_no_help(scene, models):
    """The device was in step after that round, and has lost its states since."""
    steps = to_round(scene, models, 6)
    ref = scene.checkpoint("dev-1", models["dev-1"], (0, 5), 6)
    signed = statements(scene, models, 6)
    steps = (*steps, scene.step(7, {0: ONE}), scene.step(8, {0: ONE}))[-2:]
    lost = models["dev-3"]
    lost._store.commit(lost.states.keep(()), applied=7)
    lost.states = lost.states.keep(())
    with pytest.raises(MissingStateError):
        lost.locate(scene.announcement(9, steps=steps, checkpoints=(ref,), statements=signed), TRAIN)


def test_damaged_state_heals_by_certificate(scene, models):
    """A device with a damaged state finds out from a certificate and heals."""
    steps = to_round(scene, models, 5)
    wrong, bad = models["dev-3"], scene.announcement(6, steps=steps)
    damage(scene, wrong, StateId(0, 4))
    for each in models.values():
        scene.serve(each, bad)
    assert wrong.states.digests() != models["dev-1"].states.digests()
    ref = scene.checkpoint("dev-1", models["dev-1"], (0, 5), 6)
    signed = statements(scene, models, 6, ("dev-1", "dev-2"))
    steps = (*steps, scene.step(6, {0: ONE}))[-2:]
    announced = scene.announcement(7, steps=steps, checkpoints=(ref,), statements=signed)
    assert ref.label in wrong.locate(announced, TRAIN)
    theta = scene.serve(wrong, announced)[0]
    assert theta.tobytes() == scene.serve(models["dev-1"], announced)[0].tobytes()


def test_wrong_state_skips_the_round(scene, models):
    """Its predecessor was damaged and had no certificate."""
    steps = to_round(scene, models, 5)
    wrong = models["dev-3"]
    damage(scene, wrong, StateId(0, 4))
    for name in ("dev-1", "dev-2"):
        scene.serve(models[name], scene.announcement(6, steps=steps))
    ref = scene.checkpoint("dev-1", models["dev-1"], (0, 5), 6)
    signed = statements(scene, models, 6, ("dev-1", "dev-2"))
    announced = scene.announcement(6, steps=steps, checkpoints=(ref,), statements=signed)
    with pytest.raises(MissingStateError, match="differ from those of the other devices"):
        scene.serve(wrong, announced)
    assert StateId(0, 5) not in wrong.states.held
    theta = scene.serve(wrong, announced)[0]
    assert theta.tobytes() == models["dev-1"].states.held[StateId(0, 5)].theta.tobytes()


def test_unneeded_wrong_state_is_dropped(tmp_path):
    """Model 0 comes from a checkpoint in the same round, so that the device compares its states twice."""
    scene = Scene(tmp_path, *NAMES, algorithm="ifca", settings={"k": "2"}, start=origins(2))
    models = {name: scene.device(name) for name in NAMES}
    both = dataclasses.replace(TRAIN, candidates=(0, 1))
    at = {0: (0, 0), 1: (1, 0)}
    for held in models.values():
        scene.serve(held, scene.announcement(1, states=at), both)
    refs = tuple(scene.checkpoint("dev-1", models["dev-1"], state, 1) for state in at.values())
    announced = scene.announcement(2, states=at, checkpoints=refs, statements=statements(scene, models, 1))
    device = models["dev-3"]
    damage(scene, device, StateId(1, 0))
    device.states = device.states.keep([StateId(1, 0)])
    assert scene.serve(device, announced)[0].tobytes() == origins(2)[0].tobytes()
    assert device.states.held.keys() == {StateId(0, 0)}


# -- the transfers --


def mean_of(scene, models, **changes):
    """Return a device, and the label, transfer and bytes of the mean of round 1 with a changed step."""
    scene.serve(models["dev-1"], scene.announcement(1))
    step = scene.step(1, {0: ONE}, **changes)
    ((label, transfer),) = models["dev-1"].locate(scene.announcement(2, steps=(step,)), TRAIN).items()
    return label, transfer, scene.transfers[label, transfer]


@pytest.mark.parametrize(
    "tail",
    [b"", b"\0" * 3, b"\0" * 4 * (LENGTH - 1), b"\xff" * 4 * LENGTH, b"\x7f" * 4 * LENGTH],
    ids=["empty", "odd", "short", "nan", "huge"],
)
def test_unfit_mean_is_refused(scene, models, tail):
    """A mean of another length or with an impossible norm is refused."""
    label, transfer, plain = mean_of(scene, models)
    with pytest.raises(UntrustedError):
        models["dev-1"].take(label, transfer, memoryview(plain[: -4 * LENGTH] + tail))


def test_mean_of_another_place_is_refused(scene, models):
    """A mean under another mask or of another round is refused."""
    label, transfer, plain = mean_of(scene, models, key_id=b"k" * 16)
    ref = scene.step(2, {0: ONE}).means[0]
    other = scene.transfers[ref.label, ref.transfer]
    for mean, error, message in ((plain, KeyMismatchError, None), (other, UntrustedError, "is not the announced one")):
        with pytest.raises(error, match=message):
            models["dev-1"].take(label, transfer, memoryview(mean))


def early_mean(scene, models):
    """Return a device, the step of round 1 that is not announced yet, the label and transfer of its mean, and the mean."""
    scene.serve(models["dev-1"], scene.announcement(1))
    step = scene.step(1, {0: ONE})
    (ref,) = step.means
    return models["dev-1"], step, ref, scene.transfers[ref.label, ref.transfer]


def test_mean_before_announcement_is_used(scene, models):
    """A mean that arrives before its announcement is used."""
    device, step, ref, mean = early_mean(scene, models)
    assert not device.take(ref.label, ref.transfer, memoryview(mean))
    announced = scene.announcement(2, steps=(step,))
    assert device.locate(announced, TRAIN) == {ref.label: ref.transfer}
    assert device.arrived() == {ref.label: ref.transfer}
    assert np.abs(device.thetas(announced, TRAIN)[0] - (origins()[0] + 1)).max() < 1e-5


def test_early_other_transfer_is_forgotten(scene, models):
    """An early transfer that is not the announced one is forgotten."""
    device, _, ref, _ = early_mean(scene, models)
    assert not device.take(ref.label, ref.transfer, memoryview(b"anything"))
    device.locate(scene.announcement(2, steps=(scene.step(1, {0: ONE}),)), TRAIN)
    assert device.arrived() == {}
    device.drop(ref.label)


@pytest.mark.parametrize(
    ("end", "error"), [(0, IntegrityError), (9, IntegrityError), (-4, UntrustedError)], ids=["empty", "head", "short"]
)
def test_early_damaged_mean_is_refused_later(scene, models, end, error):
    """An early mean that is damaged is refused once it is announced."""
    device, step, ref, whole = early_mean(scene, models)
    assert not device.take(ref.label, ref.transfer, memoryview(whole[:end]))
    device.locate(scene.announcement(2, steps=(step,)), TRAIN)
    with pytest.raises(error):
        device.arrived()
    assert device.take(ref.label, ref.transfer, memoryview(whole))
    assert device.arrived() == {ref.label: ref.transfer}


def test_what_has_arrived_stays(scene, models):
    """When the round is announced again; after the round a mean that is sent again is ignored: its keys are erased."""
    device, steps = models["dev-1"], to_round(scene, models, 1)
    announced = scene.announcement(2, steps=steps)
    ((label, transfer),) = device.locate(announced, TRAIN).items()
    assert device.arrived() == {}
    device.take(label, transfer, memoryview(scene.transfers[label, transfer]))
    assert device.locate(announced, TRAIN) == device.arrived() == {label: transfer}
    device.drop(label)
    assert device.arrived() == {}
    scene.serve(device, announced)
    assert not device.take(label, transfer, memoryview(scene.transfers[label, transfer]))
    assert device.locate(announced, TRAIN) == device.arrived() == {}


def test_unusable_checkpoint_is_missing(scene, models):
    """A checkpoint that can't be used makes its state a missing one."""
    steps = to_round(scene, models, 6, names=("dev-1", "dev-2"))
    ref = scene.checkpoint("dev-1", models["dev-1"], (0, 5), 6)
    signed = statements(scene, models, 6, ("dev-1", "dev-2"))
    device, honest = models["dev-3"], scene.transfers[ref.label, ref.transfer]
    assert ref.label in device.locate(scene.announcement(7, steps=steps, checkpoints=(ref,), statements=signed), TRAIN)
    older = scene.checkpoint("dev-1", models["dev-1"], (0, 5), 5)
    damage(scene, models["dev-1"], StateId(0, 5))
    false = scene.checkpoint("dev-1", models["dev-1"], (0, 5), 6)
    for sealed, by in (
        (honest[:-1] + bytes([honest[-1] ^ 1]), ""),
        (b"", ""),
        # An honest one, which the aggregator repeats in place of another.
        (scene.transfers[older.label, older.transfer], ""),
        (scene.transfers[false.label, false.transfer], "dev-1"),
    ):
        reason = f"a checkpoint by {by or 'the aggregator'} is of no use"
        with pytest.raises(BadCheckpointError, match=reason) as caught:
            device.take(ref.label, ref.transfer, memoryview(sealed))
        assert caught.value.sealed_by == by
    assert device.take(ref.label, ref.transfer, memoryview(honest))


def test_labels_ahead_are_the_coming_means(scene, models):
    """Labels ahead are those of the coming means."""
    assert models["dev-1"].labels_ahead(scene.announcement(3), TRAIN) == (scene.label(mean_number(0, 3)),)
    step = scene.step(3, {0: ONE})
    assert step.means[0].label == scene.label(mean_number(0, 3))


# -- the job's context --


def test_statement_and_checkpoints_go_along(scene, models):
    """The statement names all states, and the upload carries the checkpoints asked for, of models that the device holds."""
    order = dataclasses.replace(TRAIN, seal=(0, 1))
    device, announced = models["dev-1"], scene.announcement(1, states={0: (0, 0)}, assignment=TRAIN)
    scene.serve(device, announced)
    context = device.context(announced, order)
    identity = scene.parties.members["dev-1"].identity
    head, body = decode_prefix(b"".join(context.attachment(identity)), SealedCheckpoints)
    assert (head.models, sum(head.sizes)) == ((0,), len(body))
    for held in models.values():
        scene.serve(held, announced)
    state, task = open_checkpoint(
        body,
        StateCertificate(statements(scene, models, 1)),
        wanted=StateId(0, 0),
        keys=scene.keys(1),
        roster=scene.parties.members["dev-2"].roster,
        length=LENGTH,
        signers=2,
        most_task_bytes=1 << 20,
    )
    assert state.theta.tobytes() == origins()[0].tobytes()
    assert len(task) > 100
    assert device.context(announced, TRAIN).attachment(identity) == []
    device._store.commit(device.states, applied=1)
    assert not device._store.has_keys(1)
    assert context.key_id == context.derive_mask().key_id, "a job masks with the round's keys, erased or not"


def test_next_mask_is_derived_ahead(scene, models, monkeypatch):
    """The next rounds mask is derived ahead of time."""
    device, announced = models["dev-1"], scene.announcement(1)
    scene.serve(device, announced)
    device.next_mask(announced)()
    derived = []
    monkeypatch.setattr(held_models, "derive", lambda *a: derived.append(a))
    following = scene.announcement(2, states={0: (0, 0)})
    scene.serve(device, following)
    context = device.context(following, TRAIN)
    assert context.derive_mask().key_id == context.key_id
    assert derived == []


def test_nothing_needless_is_prepared(tmp_path, monkeypatch):
    """No mask is derived ahead for the final round, for a device that may sit out, or of many coordinates."""
    scene = Scene(tmp_path / "all", "dev-1", rounds=3)
    device = scene.device("dev-1")
    assert device.next_mask(scene.announcement(2)) is not None
    assert device.next_mask(scene.announcement(3)) is None
    part = Scene(tmp_path / "part", "dev-1", participation=0.5)
    resting = part.device("dev-1")
    assert resting.next_mask(part.announcement(1)) is None
    assert resting.labels_ahead(part.announcement(3), TRAIN) == ()
    monkeypatch.setattr(held_models, "MOST_AHEAD", scene.plan.length - 1)
    assert device.next_mask(scene.announcement(2)) is None


# -- key versions --


def test_newer_version_erases_the_older(scene, models):
    """A newer key version continues the run and erases the older one."""
    number = scene.parties.owner.roster.sequence + 1
    announced = scene.announcement(2, states={0: (0, 0)}, key_version=number)
    with pytest.raises(NotEnrolledError):
        models["dev-1"].locate(announced, TRAIN)
    assert rotate(scene) == number
    found = [scene.serve(held, announced)[0].tobytes() for held in models.values()]
    assert len(set(found)) == 1
    assert len({held.context(announced, TRAIN).key_id for held in models.values()}) == 1
    assert scene.parties.members["dev-1"].grant.keys_since == number
    device, later = models["dev-2"], scene.announcement(3, states={0: (0, 0)}, key_version=number)
    assert device.next_mask(announced) is not None
    scene.serve(device, later)
    with pytest.raises(UntrustedError, match="a round under keys of roster"):
        models["dev-1"].locate(scene.announcement(3, states={0: (0, 0)}), TRAIN)


def test_mean_of_older_version_is_applied(scene, models):
    """A mean of the version before is still applied."""
    steps = to_round(scene, models, 1)
    announced = scene.announcement(2, steps=steps, key_version=rotate(scene))
    thetas = [scene.serve(held, announced)[0] for held in models.values()]
    assert np.abs(thetas[0] - (origins()[0] + 1)).max() < 1e-5
    assert len({theta.tobytes() for theta in thetas}) == 1


def test_unknown_versions_mean_asks_for_help(scene, models):
    """It was away while that version was in use; were it to decline for another reason, it would be asked again and again."""
    scene.serve(models["dev-1"], scene.announcement(1))
    step = scene.step(1, {0: ONE}, key_id=b"k" * 16)
    announced = scene.announcement(2, steps=(step,), key_version=rotate(scene))
    ((label, transfer),) = models["dev-1"].locate(announced, TRAIN).items()
    with pytest.raises(MissingStateError, match="never had the keys"):
        models["dev-1"].take(label, transfer, memoryview(scene.transfers[label, transfer]))


def test_the_states_that_an_assignment_needs(scene):
    """Where models are added up a device needs all of them."""
    held = scene.announcement(4, states={0: (0, 3), 2: (0, 1), SHARED_MODEL: (SHARED_MODEL, 3)}).held
    both = dataclasses.replace(TRAIN, candidates=(0, 2))
    assert needed_states(held, both, scene.plan) == {StateId(0, 3), StateId(0, 1), StateId(SHARED_MODEL, 3)}
    assert needed_states(scene.announcement(4).held, TRAIN, scene.plan) == {StateId(0, 3)}
    adding = dataclasses.replace(scene.plan, capabilities=Capabilities(scale=True))
    held = scene.announcement(4, states={0: (0, 3), 1: (1, 2), 5: (1, 1)}).held
    assert needed_states(held, TRAIN, adding) == {StateId(0, 3), StateId(1, 2)}
    place = place_assignment(0, (5,))
    assert needed_states(held, place, adding) == {StateId(0, 3), StateId(1, 2), StateId(1, 1)}


def test_models_to_compare_with_are_fetched(scene, models):
    """Models to compare with are fetched and given to the job."""
    order = dataclasses.replace(TRAIN, compare=(0, 1))
    first = scene.announcement(1, states={0: (0, 0), 1: (0, 0)})
    scene.serve(models["dev-1"], first, order)
    assert len(models["dev-1"].labels_ahead(first, order)) == 2
    start = {0: ((1.0, 0, 0),), 1: ((1.0, 0, 0),)}
    announced = scene.announcement(
        2, states={0: (0, 1), 1: (1, 1)}, steps=(scene.step(1, {0: ONE, 1: 3 * ONE}, terms=start),)
    )
    assert needed_states(announced.held, order, scene.plan) == {StateId(0, 1), StateId(1, 1)}
    thetas = scene.serve(models["dev-1"], announced, order)
    assert list(thetas) == [0, 1]
    assert np.abs(thetas[1] - thetas[0] - 2).max() < 1e-5


# -- pure parts --


def test_common_digest_must_be_certified(scene, models, monkeypatch):
    """A digest is believed if enough devices have signed it, which is verified where a state is lacking or contradicted."""
    to_round(scene, models, 3)
    checked = []
    monkeypatch.setattr(held_models, "check_claims", lambda *a, **k: checked.append(a) or check_claims(*a, **k))

    def certified(signed, own):
        claims = tuple(read_claims(signed))
        return CertifiedStates((ref,), claims, own, scene.plan, scene.parties.members["dev-1"].roster)

    at, ref = StateId(0, 2), scene.checkpoint("dev-1", models["dev-1"], (0, 2), 3)
    digest, signed = models["dev-1"].states.held[at].digest, statements(scene, models, 3)
    found = certified(signed, {})
    assert found.contradicted({at: digest}) == set() == found.contradicted({})
    assert checked == []
    assert found.contradicted({at: b"another"}) == {at}
    assert found == {at: digest}
    assert len(found) == len(checked) == 1
    one = certified(signed[:1], {})
    assert one.contradicted({at: b"another"}) == set()
    with pytest.raises(KeyError):
        one[at]
    assert len(checked) == 2
    assert certified(signed, {at: b"own"}) == {at: digest}
    assert certified(signed[:1], {at: b"own"}) == certified((), {}) == {}


def test_follower_verifies_no_signature(scene, models, monkeypatch):
    """A device that follows keeps the newest certificate and verifies no signature."""
    steps = to_round(scene, models, 4)
    device, member = models["dev-1"], scene.parties.members["dev-1"]
    verified = []
    monkeypatch.setattr("crypto.seal.identity.check_document", lambda *_: verified.append(1))
    monkeypatch.setattr("shoal.membership.statements.check_document", lambda *_: verified.append(1))
    signed = statements(scene, models, 4)
    scene.serve(device, scene.announcement(5, steps=steps, statements=signed))
    steps = (*steps, scene.step(5, {0: ONE}))[-2:]
    announced = scene.announcement(6, steps=steps)
    scene.serve(device, announced)
    kept = stored_certificate(member.directory / FOLDER).statements
    assert set(kept) < set(signed)
    assert len(kept) == signers_needed(scene.plan.recipe.min_contributors, member.roster.active_count)
    assert verified == []
    scene.serve(device, changed(announced, statements=signed[:1]))
    assert stored_certificate(member.directory / FOLDER).statements == kept, "one statement certifies nothing"


def test_segments_have_their_own_lengths(scene):
    """Shared and own segments have their own lengths."""
    plan = run_plan("ifca", segments=(SegmentSpec("shared", 40), SegmentSpec("cluster", 9)))
    held = scene.announcement(4, states={1: (1, 3), SHARED_MODEL: (SHARED_MODEL, 3)}).held
    assert (segment_of(held, SHARED_MODEL), segment_of(held, 1)) == ("shared", "cluster")
    assert [length_of(plan, held, StateId(*at)) for at in ((1, 0), (1, 3), (SHARED_MODEL, 3))] == [49, 9, 40]
    whole = scene.announcement(4).held
    assert segment_of(whole, 1) == ""
    assert length_of(plan, whole, StateId(1, 3)) == 49


def test_state_no_longer_offered_is_made(tmp_path):
    """IFCA begins another start in the next round, and may return to this one much later."""
    scene = Scene(tmp_path, "dev-1", algorithm="ifca", settings={"k": "1", "restarts": "2", "restart_rounds": "2"})
    device = scene.device("dev-1")
    scene.serve(device, scene.announcement(1, states={0: (0, 0)}))
    step = scene.step(1, {0: ONE})
    step = dataclasses.replace(step, step=dataclasses.replace(step.step, open=(StateId(0, 1), StateId(1, 0))))
    order = dataclasses.replace(TRAIN, candidates=(1,))
    scene.serve(device, scene.announcement(2, states={1: (1, 0)}, steps=(step,)), order)
    assert set(device.states.held) == {StateId(0, 1), StateId(1, 0)}


def test_shared_segment_alone_is_no_model(scene):
    """No model is made of the shared segment and another."""
    shared, whole = {SHARED_MODEL: (SHARED_MODEL, 1), 1: (2, 1)}, {SHARED_MODEL: (0, 0), 1: (1, 0)}
    for states in (shared, whole):
        check_segments(scene.announcement(2, states=states).held)
    for states in ({**shared, 1: (SHARED_MODEL, 1)}, {**shared, SHARED_MODEL: (1, 1)}):
        with pytest.raises(UntrustedError, match="is announced with state 1 of model"):
            check_segments(scene.announcement(2, states=states).held)
    mixed = scene.step(2, {1: None}, terms={1: ((0.5, 1, 1), (0.5, SHARED_MODEL, 1))})
    announced = scene.announcement(3, states=shared, steps=(mixed,))
    with pytest.raises(UntrustedError, match=f"model 1 is announced with state 1 of model {SHARED_MODEL}"):
        check_segments(announced.held)
    check_segments(scene.announcement(3, states={1: (1, 2)}, steps=(mixed,)).held)


def test_infinite_step_changes_nothing(scene, models):
    """A step that gives a model that is not finite changes nothing."""
    device = models["dev-1"]
    scene.serve(device, scene.announcement(1))
    damage(scene, device, StateId(0, 0), factor=1e36)
    before = device.states
    step = scene.step(1, {0: ONE}, terms={0: ((1e6, 0, 0),)})
    with pytest.raises(IntegrityError, match="NaN or infinite"):
        scene.serve(device, scene.announcement(2, steps=(step,)))
    assert device.states is before
