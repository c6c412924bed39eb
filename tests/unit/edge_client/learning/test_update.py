"""One assignment: scoring, the choice of a model, training, masking and the reported figures."""

import dataclasses

import numpy as np
import pytest

from aggregator.strategies.base import place_assignment
from crypto.mask.derivation import derive
from crypto.mask.masking import unmask
from crypto.mask.schedule import VersionKey
from crypto.seal.envelope import open_from_member, read_head
from crypto.seal.identity import Identity
from edge_client.learning.data import Dataset, split
from edge_client.learning.model import OrtModel
from edge_client.learning.scoring import score
from edge_client.learning.training import Cancelled, train
from edge_client.learning.update import (
    BatchOrder,
    TrainingContext,
    carry_out,
    local_training,
    reported_margins,
    share_of,
    trial_margins,
)
from edge_client.models.round_context import RoundContext, Run
from edge_client.models.states import ModelState
from shoal.protocol.codec import decode, decode_prefix
from shoal.protocol.documents import SegmentSpec
from shoal.protocol.messages import Announcement, Assignment, Phase, Share, Upload
from shoal.protocol.recipe import LocalTraining
from shoal.protocol.states import RoundModels, SealedCheckpoints, StateId
from shoal.types import MaskedVector
from tests.helpers.plans import altered, run_plan
from tests.helpers.tasks import CLASSES, INPUTS, samples

DEVICE, AGGREGATOR = Identity.generate("dev-1"), Identity.generate("aggregator")
D = INPUTS * CLASSES + CLASSES
MINI = LocalTraining(epochs=2, steps=0, batch_size=5, lr=0.3, lr_decay=0.9, momentum=0.0, clip=0.0, prox_mu=0.0)
RNG = np.random.default_rng(4)
MODELS = {m: RNG.standard_normal(D).astype(np.float32) for m in (3, 4, 5)}


@pytest.fixture(scope="module")
def context(logistic):
    bundle = logistic(INPUTS, CLASSES)
    plan = run_plan(
        task_digest=bundle.digest,
        segments=(SegmentSpec("cluster", D),),
        local=MINI,
        origins=1,
        max_models=9,
        rounds=9,
        key_version=3,
    )
    keys = VersionKey(plan.fleet, plan.key_version, bytes(range(32))).begin_run(plan.run_id, first_round=2).take()
    key = derive(keys.mask, keys.context_of(plan))
    round_ = RoundContext(
        keys=keys, derive_mask=lambda: key, key_id=key.key_id, statement=b"signed", to_seal={}, task=b"a task"
    )
    return TrainingContext(
        run=Run(plan=plan, bundle=bundle),
        identity=DEVICE,
        aggregator=AGGREGATOR.member,
        backend=OrtModel(bundle),
        shares=split(Dataset(*samples(40)), b"seed"),
        round=round_,
    )


def announcement(round_=2):
    return Announcement(
        fleet="demo",
        run=1,
        run_id=b"r" * 16,
        roster_sequence=3,
        round=round_,
        nonce=b"n" * 16,
        deadline_s=60.0,
        finished=False,
        assignments=(),
        assignment_of=(),
        held=RoundModels(3, ()),
    )


def assignment(*candidates, phase=Phase.TRAIN, share=Share.TRAIN, train=True, evaluate=False, margins=False):
    return Assignment(int(phase), candidates, int(share), train, evaluate, margins)


def do(context, order_, round_=2, models=MODELS, cancelled=lambda: False):
    """Return (Finished, Upload, clear vector or None)."""
    finished = carry_out(context, announcement(round_), order_, models, cancelled)
    data = finished.pieces[0].payload
    head, at = read_head(data)
    assert (head.fleet, head.purpose, head.sender, head.recipient) == ("demo", "upload", "dev-1", "aggregator")
    message, body = open_from_member(AGGREGATOR, data, head, at, DEVICE.member.sign_key)
    upload = decode(message, Upload)
    vector = None
    if upload.length:
        vector = unmask(MaskedVector(np.frombuffer(body, "<f4").copy(), upload.key_id), context.round.derive_mask())
    return finished, upload, vector


def losses(context, candidates, share):
    return score([MODELS[c] for c in candidates], share_of(context.shares, share), context.backend)


def test_best_candidate_is_trained_and_sent(context):
    """The best candidate is trained and its masked change sent; the models are not touched."""
    before = {m: v.copy() for m, v in MODELS.items()}
    finished, upload, vector = do(context, assignment(3, 4, 5))
    found = losses(context, (3, 4, 5), Share.TRAIN)
    best = (3, 4, 5)[int(np.argmin(found))]
    assert finished.model == upload.model == best
    assert upload.loss == round(float(found.min()), 4)
    batches = BatchOrder(context.plan, "dev-1", 2)
    expected = train(
        MODELS[best], context.shares.train, local_training(context.plan), context.backend, batches, 1, lambda: False
    )
    assert vector.tobytes() == expected.delta.tobytes()
    assert (upload.samples, upload.margins, upload.tested) == (len(context.shares.train), (), 0)
    np.testing.assert_equal(MODELS, before)


def test_upload_holds_all_that_binds_it(context):
    """Everything that binds an upload is in it; its body is the change permuted: the same numbers elsewhere."""
    finished, upload, vector = do(context, assignment(3))
    plan = context.plan
    assert (upload.fleet, upload.run, upload.run_id) == (plan.fleet, plan.run, plan.run_id)
    assert (upload.round, upload.nonce, upload.phase) == (2, b"n" * 16, Phase.TRAIN)
    assert (upload.device, upload.recipient) == ("dev-1", AGGREGATOR.member.seal_key)
    assert (upload.task_digest, upload.mode, upload.key_id) == (
        plan.task_digest,
        plan.recipe.mode,
        context.round.key_id,
    )
    assert (upload.key_version, upload.statement) == (3, b"signed")
    head, at = read_head(finished.pieces[0].payload)
    _, body = open_from_member(AGGREGATOR, finished.pieces[0].payload, head, at, DEVICE.member.sign_key)
    masked = np.frombuffer(body, "<f4")
    assert not np.array_equal(masked, vector)
    assert np.array_equal(np.sort(masked), np.sort(vector))


def test_single_candidate_is_not_scored(context):
    """Its loss is the mean loss during training."""
    _, upload, _ = do(context, assignment(4))
    batches = BatchOrder(context.plan, "dev-1", 2)
    expected = train(
        MODELS[4], context.shares.train, local_training(context.plan), context.backend, batches, 1, lambda: False
    )
    assert upload.loss == round(expected.mean_loss, 4)


@pytest.mark.parametrize("share", [Share.TRAIN, Share.VALIDATION, Share.TEST])
def test_scoring_reports_margins(context, share):
    """Scoring orders report margins on their share."""
    _, upload, vector = do(context, assignment(5, 3, phase=Phase.SCORE, share=share, train=False, margins=True))
    found = losses(context, (5, 3), share)
    assert vector is None
    assert upload.margins == (0.0, round(float(found[1] - found[0]), 4))
    assert upload.length == 0


def test_trial_trains_half_and_holds_control(context):
    """In a trial a device trains its halfs model and holds the control."""
    _, alone, expected = do(context, assignment(4))
    _, upload, vector = do(context, assignment(4, 3, phase=Phase.TRIAL))
    assert (upload.model, upload.loss, upload.margins) == (4, alone.loss, ())
    np.testing.assert_array_equal(vector, expected)


def test_adapting_compares_before_and_after(context):
    """The update is the first candidate's alone; margins are the lesser of those before and after training, on the share."""
    _, _, expected = do(context, assignment(5))
    _, upload, vector = do(context, assignment(5, 3, phase=Phase.ADAPT, share=Share.VALIDATION, margins=True))
    np.testing.assert_array_equal(vector, expected)
    trained = {}
    for model in (5, 3):
        batches = BatchOrder(context.plan, "dev-1", 2)
        recipe = local_training(context.plan)
        found = train(MODELS[model], context.shares.train, recipe, context.backend, batches, 1, lambda: False)
        trained[model] = MODELS[model] + found.delta
    own, control = (score([trained[m]], context.shares.validation, context.backend)[0] for m in (5, 3))
    assert upload.model == 5
    _, untrained, _ = do(
        context, assignment(5, 3, phase=Phase.SCORE, share=Share.VALIDATION, train=False, margins=True)
    )
    after, before = round(float(control - own), 4), untrained.margins[1]
    assert after != before
    assert upload.margins[1] == min(after, before)
    assert upload.margins[0] <= before


GAINS = np.array([0.2, 0.4, 0.6, -0.1])
"""Of the second model's loss on four samples, before training; after it there is none."""


BOTH, RARE = np.array([0.3, 0.3]), np.array([0, 0, 0, 1])


@pytest.mark.parametrize(
    ("before", "after", "labels", "margins"),
    [
        *(
            pytest.param([np.ones(4), 1.0 + GAINS], BOTH, labels, (untrained, 0.0, even), id=name)
            for name, labels, untrained, even in (
                ("balanced", np.array([0, 0, 1, 1]), 0.275, 0.275),
                ("a loss on the rare label", RARE, 0.15, 0.15),
                ("a gain on the rare label", np.array([1, 1, 0, 1]), 0.275, 0.3833),
                ("targets", RARE.astype(np.float32), 0.0, 0.0),
                ("sequences", np.zeros((4, 3), np.int64), 0.0, 0.0),
            )
        ),
        # An error of a quarter is the logarithm of 4 better, in any unit.
        *(
            pytest.param(
                [unit * np.array([1.0, 3.0]), unit * np.array([2.0, 6.0])],
                unit * np.array([1.0, 4.0]),
                np.zeros(2, np.float32),
                (0.0, 0.6931, 0.0),
                id=f"targets in units of {unit}",
            )
            for unit in (1e-4, 1.0, 1e4)
        ),
        pytest.param(
            [np.array([1.0, 1.5]), np.array([1.0, np.nan])],
            np.array([1.0, np.nan]),
            np.array([0, 1]),
            (5.0, 5.0, 5.0),
            id="a control that diverged",
        ),
    ],
)
def test_each_label_weighs_alike(before, after, labels, margins):
    """Before training each label has equal weight, in the first figure where that is less."""
    assert trial_margins(before, after, labels) == margins


@pytest.mark.parametrize(
    ("losses", "margins"),
    [
        *((unit * np.array([1.0, 4.0, 0.25]), (0.0, 1.3863, -1.3863)) for unit in (1e-4, 1.0, 1e4)),
        ([0.0, 1e-9, 0.0], (0.0, 5.0, 0.0)),
        ([1.0, np.inf, np.nan], (0.0, 5.0, 5.0)),
        # Likelihoods of the task's own loss.
        ([-2.0, -1.5], (0.0, 0.5)),
    ],
)
def test_margins_of_squared_errors(losses, margins):
    """They have no unit; errors of zero or infinity and losses below zero have margins too."""
    assert reported_margins(np.array(losses), squared=True) == margins


def test_margins_are_clipped_and_rounded(context):
    """Beyond the clip the vote is clear, and the exact figure would only reveal more of the data."""
    models = {0: np.zeros(D, np.float32), 1: MODELS[3] * 1000}
    for first, second in ((0, 1), (1, 0)):
        ask = assignment(first, second, phase=Phase.SCORE, train=False, margins=True)
        _, upload, _ = do(context, ask, models=models)
        assert upload.margins == (0.0, 5.0 if first == 0 else -5.0)


def test_report_counts_on_test_share_alone(context):
    finished, upload, _ = do(context, assignment(3, 4, phase=Phase.SCORE, train=False, evaluate=True))
    best = (3, 4)[int(np.argmin(losses(context, (3, 4), Share.TRAIN)))]
    expected = context.backend.score(MODELS[best], context.shares.test.x, context.shares.test.y)
    assert (upload.correct, upload.tested) == (expected.correct, len(context.shares.test))
    assert (finished.correct, finished.tested) == (upload.correct, upload.tested)


def test_ordered_checkpoints_follow_update(context):
    """The checkpoints that were asked for follow the update."""
    state = ModelState.of(StateId(0, 1), MODELS[3], run_id=context.plan.run_id, digest_key=bytes(32))
    sealing = dataclasses.replace(context, round=dataclasses.replace(context.round, to_seal={0: state}))
    for train_ in (True, False):
        finished = carry_out(sealing, announcement(), assignment(3, train=train_), MODELS, lambda: False)
        head, at = read_head(finished.pieces[0].payload)
        message, body = open_from_member(AGGREGATOR, finished.pieces[0].payload, head, at, DEVICE.member.sign_key)
        upload = decode(message, Upload)
        assert upload.length == (D if train_ else 0)
        attached = body[4 * upload.length :]
        assert len(attached) == upload.attached
        found, rest = decode_prefix(attached, SealedCheckpoints)
        assert (found.models, sum(found.sizes)) == ((0,), len(rest))


def vary(context, **changes):
    return dataclasses.replace(context, run=dataclasses.replace(context.run, plan=altered(context.plan, **changes)))


def test_blurred_update_keeps_its_direction(context):
    """The aggregator sees other norms; the mean of many is the true update's."""
    _, _, plain = do(context, assignment(3))
    true = plain.astype(np.float64)
    blurred = [do(vary(context, norm_noise=0.1), assignment(3))[2].astype(np.float64) for _ in range(12)]
    factors = np.array([b @ true / (true @ true) for b in blurred])
    for factor, found in zip(factors, blurred, strict=True):
        assert np.linalg.norm(found - factor * true) < 1e-6 * np.linalg.norm(true)
    assert len(set(factors.tolist())) == 12
    assert np.abs(factors - 1).max() <= 0.4
    assert np.abs(factors - 1).max() > 0.01
    assert abs(factors.mean() - 1) < 0.15


def test_nearest_compared_model_is_reported(context):
    """Measured with the update that is sent, so with its noise."""
    _, _, delta = do(context, assignment(3))
    models = {3: MODELS[3], 4: MODELS[3] + np.float32(0.9) * delta, 5: MODELS[3] + np.float32(0.3) * delta}
    assert do(context, dataclasses.replace(assignment(3), compare=(3, 4, 5)), models=models)[1].nearest == 4
    assert do(context, dataclasses.replace(assignment(3), compare=(3, 5)), models=models)[1].nearest == 5
    assert do(context, assignment(3), models=models)[1].nearest == 0
    _, upload, sent = do(
        vary(context, norm_noise=0.2), dataclasses.replace(assignment(3), compare=(3, 4)), models=models
    )
    apart = [np.linalg.norm(MODELS[3].astype(np.float64) + sent - models[m]) for m in (3, 4)]
    assert upload.nearest == (3, 4)[int(np.argmin(apart))]


def test_placed_device_sends_only_direction(context):
    """A device to be placed trains as for pretraining and sends only the direction."""
    long = dataclasses.replace(MINI, epochs=6)
    context = vary(context, pretrain=long)
    _, _, delta = do(context, dataclasses.replace(assignment(3), phase=Phase.PRETRAIN))
    _, _, shorter = do(context, assignment(3))
    assert not np.array_equal(delta, shorter)
    models = {3: MODELS[3], 4: MODELS[3] - delta, 5: MODELS[3] + 7 * delta}
    finished, upload, sent = do(context, place_assignment(3, (4, 5)), models=models)
    assert (upload.phase, upload.model, upload.nearest, upload.length, sent) == (Phase.PLACE, 3, 5, 0, None)
    assert upload.loss == pytest.approx(finished.loss, abs=1e-4)
    models[4], models[5] = models[5], models[4]
    assert do(context, place_assignment(3, (4, 5)), models=models)[1].nearest == 4


def test_a_uniform_run_asks_for_no_counts(context):
    """The upload shows the size of neither the training share nor the test share; the device's own figures are exact.

    Both are of the model before training.
    """
    true = context.backend.score(MODELS[3], context.shares.test.x, context.shares.test.y)
    assert do(context, assignment(3, evaluate=True))[1].correct == true.correct
    finished, upload, _ = do(vary(context, weighting="uniform"), assignment(3, evaluate=True))
    assert (upload.samples, upload.tested) == (1, 100)
    assert upload.correct == round(100 * true.correct / true.count)
    assert (finished.correct, finished.tested) == (true.correct, true.count)
    _, upload, _ = do(vary(context, weighting="uniform"), assignment(3))
    assert (upload.samples, upload.correct, upload.tested) == (1, 0, 0)


def test_cancelled_work_raises(context):
    with pytest.raises(Cancelled):
        do(context, assignment(3), cancelled=lambda: True)


def test_restart_repeats_order_of_batches(context):
    """The same after a restart, and in a run of the same seed, whose number and random id decide nothing; else another."""

    def assignments(plan=context.plan, device="dev-1", round_=2):
        stream = BatchOrder(plan, device, round_)
        return [stream.permutation(24).tolist() for _ in range(3)]

    first = assignments()
    assert first == assignments() == assignments(dataclasses.replace(context.plan, run=2, run_id=b"s" * 16))
    assert all(sorted(o) == list(range(24)) for o in first)
    others = [
        assignments(device="dev-2"),
        assignments(round_=3),
        assignments(plan=altered(context.plan, seed=8)),
    ]
    seen = [tuple(o) for stream in (first, *others) for o in stream]
    assert len(set(seen)) == len(seen)


def test_the_plan_decides_how_training_goes(context):
    local = LocalTraining(epochs=0, steps=7, batch_size=0, lr=0.5, lr_decay=0.9, momentum=0.1, clip=2.0, prox_mu=0.3)
    made = local_training(altered(context.plan, local=local))
    assert (made.epochs, made.steps, made.batch_size, made.lr) == (0, 7, 0, 0.5)
    assert (made.lr_decay, made.momentum, made.clip, made.prox_mu) == (0.9, 0.1, 2.0, 0.3)


def test_many_samples_report_the_plans_limit(context):
    """It still trains on all of them."""
    assert len(context.shares.train) > 5
    assert do(vary(context, max_samples=5), assignment(3))[1].samples == 5
    assert do(vary(context, max_samples=1000), assignment(3))[1].samples == len(context.shares.train)


# ------------------------------------------------------------------------------------------------------ private values

P = CLASSES
PRIVATE = np.arange(P, dtype=np.float32) / 4
SHORT = {model: theta[: D - P] for model, theta in MODELS.items()}
WHOLE = {model: np.concatenate((theta, PRIVATE)) for model, theta in SHORT.items()}


def private_shop(context, **changes):
    """Return the context of a run of the same task whose last P coordinates are private."""
    plan = altered(context.plan, segments=(SegmentSpec("cluster", D - P),), **changes)
    key = derive(context.round.keys.mask, context.round.keys.context_of(plan))
    round_ = dataclasses.replace(context.round, derive_mask=lambda: key, key_id=key.key_id)
    run = dataclasses.replace(context.run, plan=plan)
    return dataclasses.replace(context, run=run, round=round_, private=PRIVATE)


def trained_from(context, model):
    batches = BatchOrder(context.plan, "dev-1", 2)
    recipe = local_training(context.plan)
    return train(WHOLE[model], context.shares.train, recipe, context.backend, batches, 1, lambda: False)


def test_private_values_are_not_uploaded(context):
    """Private coordinates are scored and trained and not uploaded."""
    own = private_shop(context)
    finished, upload, vector = do(own, assignment(3, 4, 5, evaluate=True), models=SHORT)
    found = [own.backend.score(WHOLE[m], own.shares.train.x, own.shares.train.y).mean_loss for m in (3, 4, 5)]
    best = (3, 4, 5)[int(np.argmin(found))]
    assert (finished.model, upload.loss, upload.length) == (best, round(min(found), 4), D - P)
    expected = trained_from(own, best)
    assert vector.tobytes() == expected.delta[: D - P].tobytes()
    np.testing.assert_array_equal(finished.private, PRIVATE + expected.delta[D - P :])
    assert upload.correct == own.backend.score(WHOLE[best], own.shares.test.x, own.shares.test.y).correct


def test_norms_are_of_federated_coordinates(context):
    """Norms noise and distances are of the federated coordinates."""
    own = private_shop(context, norm_noise=0.1)
    order_ = dataclasses.replace(assignment(3), norm=True, compare=(3, 4))
    finished, upload, vector = do(own, order_, models=SHORT)
    expected = trained_from(own, 3).delta
    assert not np.allclose(vector, expected[: D - P])
    np.testing.assert_array_equal(finished.private, PRIVATE + expected[D - P :])
    assert upload.model_norm == pytest.approx(np.linalg.norm(SHORT[3] + vector), abs=1e-3)
    assert upload.nearest == 3


@pytest.mark.parametrize("order_", [assignment(3, train=False, phase=Phase.SCORE), place_assignment(3, (3, 4))])
def test_work_without_update_leaves_private(context, order_):
    """Work without an update leaves the private coordinates."""
    assert do(private_shop(context), order_, models=SHORT)[0].private is None


def test_other_candidates_leave_private(context):
    """The other candidates of a comparison leave the private coordinates."""
    own = private_shop(context)
    finished, _, _ = do(own, assignment(3, 4, phase=Phase.ADAPT, margins=True), models=SHORT)
    np.testing.assert_array_equal(finished.private, PRIVATE + trained_from(own, 3).delta[D - P :])
