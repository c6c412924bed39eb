"""Carry out one assignment: score, choose, train, mask, seal.

The clear update does not leave the device.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from crypto.mask.masking import mask
from crypto.seal.envelope import SealedMessage, seal_message_to_member, seal_to_member
from crypto.seal.identity import Identity
from crypto.sums.codes import hidden_codes
from crypto.sums.looks import hidden_sketch
from crypto.sums.ring import SEED_BYTES, add_pad, numbers_in
from edge_client.learning import scoring, training
from edge_client.learning.data import Dataset, DataSplits, permutation
from edge_client.learning.feedback import Encoded, encode_update, with_residual
from edge_client.learning.model import Backend
from edge_client.learning.norm_noise import noise_factor
from edge_client.models.private_values import joined
from edge_client.models.round_context import RoundContext, Run
from edge_client.models.sum_codes import update_codes
from edge_client.storage.finished_models import Validation
from edge_client.storage.pending_upload import Residual
from edge_client.storage.scales import Scale
from shoal.limits import MAX_MARGIN
from shoal.protocol.channels import PART, UPLOAD
from shoal.protocol.codec import encode
from shoal.protocol.documents import Member, RunPlan
from shoal.protocol.messages import FULL_PERCENT, Announcement, Assignment, Phase, Share, Upload
from shoal.protocol.precision.seeds import upload_seed
from shoal.protocol.recipe import LocalTraining
from shoal.protocol.shards import UploadPart, borders, part_bytes
from shoal.protocol.sums import Figures, KeeperShare, precision_in, share_head
from shoal.types import Float32Vector

MARGIN_CLIP: Final = MAX_MARGIN
MARGIN_DECIMALS: Final = 4
LOSS_DECIMALS: Final = 4
NORM_DECIMALS: Final = 4


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingContext:
    """Keys, data and backend of a device in one round.

    Attributes:
        run: the run.
        round: the keys and statements of the assignment's round.
        private: the device's private coordinates as the round begins, (p,) float32; p is 0 for most tasks.
        residual: that of the device's last upload, if it may be added to this one.
        shares: the device's samples.
        scales: of those models of the round that have another than the shares; scaled: the samples in these scales.
    """

    run: Run
    identity: Identity
    aggregator: Member
    backend: Backend
    shares: DataSplits
    round: RoundContext
    private: Float32Vector = field(default_factory=lambda: np.empty(0, np.float32))
    residual: Residual | None = None
    scales: Mapping[int, Scale] = field(default_factory=dict)
    scaled: Mapping[int, DataSplits] = field(default_factory=dict)

    def samples_for(self, model: int) -> DataSplits:
        """Return the device's samples in the scale of a model."""
        return self.scaled.get(model, self.shares)

    @property
    def plan(self) -> RunPlan:
        """The owner's plan."""
        return self.run.plan


@dataclass(frozen=True, slots=True)
class Finished:
    """The result of an assignment.

    Attributes:
        pieces: the sealed upload: the message to the aggregator, then a part to each worker of the plan.
        model: the chosen candidate; loss: its loss, before rounding; correct, tested: on the test share, if asked for.
        norm: of the update as sent; 0 without one.
        validation: in a final round, the fit of the chosen model, and of earlier finished models of the same task, to the
            validation share, by run id.
        private: the private coordinates that were trained beside the uploaded update, (p,) float32, which stay here; None if
            no update is uploaded.
        doubts: about the finished model, in a final round; one sentence each.
        residual: the rounding error of the uploaded update; None without error feedback.
    """

    pieces: Sequence[SealedMessage]
    model: int
    loss: float
    correct: int
    tested: int
    norm: float = 0.0
    validation: Mapping[bytes, Validation] = field(default_factory=dict)
    private: Float32Vector | None = field(default=None, repr=False)
    doubts: tuple[str, ...] = ()
    residual: Residual | None = None


def carry_out(
    context: TrainingContext,
    announcement: Announcement,
    assignment: Assignment,
    models: Mapping[int, Float32Vector],
    cancelled: Callable[[], bool],
) -> Finished:
    """Carry ``assignment`` out and return the sealed upload.

    Args:
        context: data, backend and keys.
        announcement: the round.
        assignment: this device's part.
        models: theta (d,), float32, of each of the assignment's models, without private coordinates.
        cancelled: called between steps of training.

    Raises:
        Cancelled: the result is no longer needed.
        TaskError: the model or the data can't be used.
    """
    federated = models
    models = {model: joined(theta, context.private) for model, theta in federated.items()}
    chosen, loss = assignment.candidates[0], 0.0
    margins: tuple[float, ...] = ()
    offered = assignment.scored
    if len(offered) > 1 or not assignment.trains:
        losses = _losses(context, assignment, {c: models[c] for c in offered})
        # The choice would be the sign of a margin, which only the keeper may know.
        best = 0 if assignment.margins and context.plan.keeper is not None else scoring.choose(losses)
        chosen, loss = offered[best], float(losses[best])
        if assignment.margins:
            margins = reported_margins(losses, squared=is_real(context.shares.train.y))
    theta = models[chosen]
    correct = tested = 0
    if assignment.evaluate:
        test = context.samples_for(chosen).test
        score = context.backend.score(theta, test.x, test.y)
        correct, tested = score.correct, score.count
    body: list[bytes | memoryview] = []
    pad = _pad(context.plan)
    norm, model_norm, nearest, beside = 0.0, 0.0, 0, NOTHING
    private: Float32Vector | None = None
    left: Float32Vector | None = None
    if assignment.trains:
        result = _train(context, announcement.round, assignment.phase, theta, chosen, cancelled)
        if len(offered) == 1:  # a single candidate was not scored before
            loss = result.mean_loss
        delta = result.delta
        if assignment.phase == Phase.ADAPT:
            margins = _adapted(context, announcement.round, assignment, models, delta, cancelled)
        if assignment.train:
            private = context.private + delta[len(federated[chosen]) :]
        # All that is reported from here on is of the federated coordinates alone.
        theta, delta = federated[chosen], delta[: len(federated[chosen])]
        if context.plan.recipe.norm_noise:
            delta = delta * np.float32(noise_factor(context.plan.recipe.norm_noise))
        if assignment.norm:
            model_norm = round(float(np.linalg.norm(theta + delta)), NORM_DECIMALS)
        if assignment.compare:
            # With its noise: this is the update that the mean of the nearest model's devices includes.
            find = scoring.nearest_direction if assignment.phase == Phase.PLACE else scoring.nearest_model
            nearest = find(chosen, delta, assignment.compare, federated)
        if assignment.train:
            sent = with_residual(delta, context.residual, chosen, assignment.phase)
            norm = float(np.linalg.norm(sent))
            encoded, beside = _encoded(context, sent, announcement, assignment.phase, pad, chosen)
            body, left = [encoded.body], encoded.residual
            del sent, encoded
        del result, delta  # a large update is freed before it is sealed
    pieces = sealed_upload(
        context,
        announcement,
        assignment,
        chosen,
        body,
        loss=round(loss, LOSS_DECIMALS),
        margins=margins,
        correct=correct,
        tested=tested,
        model_norm=model_norm,
        nearest=nearest,
        norm=norm,
        pad=pad,
        beside=beside,
    )
    at, transfer = announcement, pieces[0].transfer_id
    residual = (
        left if left is None else Residual.of(left, run_id=at.run_id, round_=at.round, model=chosen, transfer=transfer)
    )
    return Finished(pieces, chosen, loss, correct, tested, norm=norm, private=private, residual=residual)


def _adapted(
    context: TrainingContext,
    round_: int,
    assignment: Assignment,
    models: Mapping[int, Float32Vector],
    delta: Float32Vector,
    cancelled: Callable[[], bool],
) -> tuple[float, ...]:
    """Return the `trial_margins` of two models (d + p,), of which training has changed the first by ``delta``."""
    first, *others = assignment.candidates
    trained = {first: models[first] + delta}
    for c in others:
        trained[c] = models[c] + _train(context, round_, assignment.phase, models[c], c, cancelled).delta
    shares = {c: share_of(context.samples_for(c), assignment.share) for c in trained}
    before = [scoring.sample_losses(models[c], share, context.backend, cancelled) for c, share in shares.items()]
    return trial_margins(before, _losses(context, assignment, trained), shares[first].y)


def _losses(
    context: TrainingContext, assignment: Assignment, models: Mapping[int, Float32Vector]
) -> NDArray[np.float64]:
    """Return the mean losses of models (d + p,) on the order's share, each in its scale: (k,), float64."""
    shares = {c: share_of(context.samples_for(c), assignment.share) for c in models}
    return np.concatenate([scoring.score([theta], shares[c], context.backend) for c, theta in models.items()])


def report_statistics(
    context: TrainingContext, announcement: Announcement, assignment: Assignment, vector: Float32Vector
) -> Finished:
    """Return the upload of the device's statistics ``vector``, (d,) float32, masked like an update."""
    if context.plan.recipe.norm_noise:
        vector = vector * np.float32(noise_factor(context.plan.recipe.norm_noise))
    pad = _pad(context.plan)
    model, norm = assignment.candidates[0], float(np.linalg.norm(vector))
    encoded, beside = _encoded(context, vector, announcement, assignment.phase, pad, model)
    sealed = sealed_upload(context, announcement, assignment, model, [encoded.body], pad=pad, beside=beside, norm=norm)
    return Finished(sealed, model, 0.0, 0, 0)


def _train(
    context: TrainingContext,
    round_: int,
    phase: Phase,
    theta: Float32Vector,
    model: int,
    cancelled: Callable[[], bool],
) -> training.TrainResult:
    """Train theta (d + p,), a ``model`` of the round, on the device's data: every model of the round sees the same batches."""
    order = BatchOrder(context.plan, context.identity.name, round_)
    recipe = local_training(context.plan, phase)
    return training.train(
        theta, context.samples_for(model).train, recipe, context.backend, order, round_ - 1, cancelled
    )


def _pad(plan: RunPlan) -> bytes:
    """Return the seed of the pad on one update, drawn for it; zeros in a run without a keeper, which pads nothing."""
    return bytes(SEED_BYTES) if plan.keeper is None else os.urandom(SEED_BYTES)


class Beside(NamedTuple):
    """What goes with a padded update: see the fields of Upload."""

    sketch: bytes = b""
    checks: tuple[int, ...] = ()


NOTHING: Final = Beside()


def _encoded(
    context: TrainingContext, update: Float32Vector, announcement: Announcement, phase: Phase, pad: bytes, model: int
) -> tuple[Encoded, Beside]:
    plan, unit = context.plan, announcement.unit
    if plan.keeper is not None:
        mask_key = context.round.derive_mask()
        masked = update if mask_key is None else mask(update, mask_key).values
        words = numbers_in(plan, unit, masked)
        checks = hidden_codes(update_codes(words, context.round.keys, plan, model, unit), pad)
        add_pad(words, pad)
        sketch = hidden_sketch(masked, pad).astype("<u4", copy=False).tobytes() if plan.looks else b""
        sent = words.astype("<u2" if unit else "<u4", copy=False)
        return Encoded(sent.data.cast("B"), masked, None), Beside(sketch, checks)
    seed = upload_seed(context.plan.run_id, announcement.round, phase, context.identity.name)
    cuts = borders(len(update), len(context.plan.workers))
    return encode_update(update, context.round.derive_mask(), context.plan.recipe.precision_up, seed, cuts), NOTHING


def sealed_upload(
    context: TrainingContext,
    announcement: Announcement,
    assignment: Assignment,
    model: int,
    body: list[bytes | memoryview],
    *,
    loss: float = 0.0,
    margins: tuple[float, ...] = (),
    correct: int = 0,
    tested: int = 0,
    model_norm: float = 0.0,
    nearest: int = 0,
    norm: float = 0.0,
    pad: bytes = bytes(SEED_BYTES),
    beside: Beside = NOTHING,
) -> list[SealedMessage]:
    """Return an upload, sealed and signed; see `seal_pieces`.

    Args:
        context: keys and plan.
        announcement: the round.
        assignment: this device's part in it.
        model: the chosen candidate.
        body: the masked update, in the plan's precision, or nothing; emptied.
        loss: see Upload.
        margins: see Upload.
        correct: see Upload.
        tested: see Upload.
        model_norm: see Upload.
        nearest: see Upload.
        norm: of the update, for the keeper.
        pad: seed of the pad on the update, in a run with a keeper.
        beside: what goes with a padded update.
    """
    attached = context.round.attachment(context.identity)
    samples, hits, tries = reported_counts(context.plan, len(context.shares.train), correct, tested)
    upload = Upload(
        fleet=context.plan.fleet,
        run=context.plan.run,
        run_id=context.plan.run_id,
        round=announcement.round,
        phase=assignment.phase,
        nonce=announcement.nonce,
        device=context.identity.name,
        recipient=context.aggregator.seal_key,
        task_digest=context.plan.task_digest,
        mode=context.plan.recipe.mode,
        key_id=context.round.key_id,
        model=model,
        samples=samples,
        loss=loss,
        margins=margins,
        correct=hits,
        tested=tries,
        length=context.plan.length if body else 0,
        model_norm=model_norm,
        attached=sum(map(len, attached)),
        key_version=context.round.keys.key_version,
        statement=context.round.statement,
        nearest=nearest,
        precision=precision_in(context.plan, announcement.unit),
        sketch=beside.sketch,
        checks=beside.checks,
    )
    if context.plan.keeper is not None:
        upload = _with_share(context, upload, context.plan.keeper, norm, pad, announcement.unit)
    return seal_pieces(context.identity, context.plan, context.aggregator, upload, body, attached)


def _with_share(
    context: TrainingContext, upload: Upload, keeper: Member, norm: float, pad: bytes, unit: float
) -> Upload:
    """Return an upload whose figures are sealed to the keeper, with the seed of its pad."""
    share = KeeperShare(
        fleet=upload.fleet,
        run_id=upload.run_id,
        round=upload.round,
        phase=upload.phase,
        nonce=upload.nonce,
        device=upload.device,
        recipient=keeper.seal_key,
        model=upload.model,
        length=upload.length,
        pad=pad,
        figures=Figures(
            loss=upload.loss,
            correct=upload.correct,
            tested=upload.tested,
            norm=round(norm, NORM_DECIMALS),
            margins=upload.margins,
        ),
        unit=unit,
    )
    head = share_head(upload.fleet, upload.device, keeper.name)
    sealed = seal_to_member(context.identity, keeper.seal_key, head, encode(share))
    return replace(upload, share=sealed, loss=0.0, margins=(), correct=0, tested=0, samples=0)


def seal_pieces(
    identity: Identity,
    plan: RunPlan,
    aggregator: Member,
    upload: Upload,
    body: list[bytes | memoryview],
    attached: list[bytes | memoryview],
) -> list[SealedMessage]:
    """Return the sealed and signed messages of one upload: to the aggregator, then a part to each worker of the plan.

    Args:
        identity: the device's.
        plan: of the run; without workers there is one message, which holds the update.
        aggregator: receives the header.
        upload: the header, without the digests of parts, which are added.
        body: the masked update, in the plan's precision, or nothing; emptied.
        attached: what follows the update, in pieces; emptied.
    """
    cut = [part for update in body for part in _cut(plan, update)]
    parts = [_sealed_part(identity, plan, upload, worker, part) for worker, part in enumerate(cut)]
    upload = replace(upload, parts=tuple(part.signed for part in parts))
    content = [*([] if parts else body), *attached]
    body.clear()
    attached.clear()
    head = UPLOAD.head(plan.fleet, identity.name, aggregator.name)
    header = seal_message_to_member(identity, aggregator.seal_key, head, encode(upload), content)
    return [header, *parts]


def _cut(plan: RunPlan, body: bytes | memoryview) -> list[memoryview]:
    """Return the parts of an encoded update, one for each worker of the plan; none if it travels in one piece."""
    view, found, at = memoryview(body), [], 0
    for worker in range(len(plan.workers)):
        size = part_bytes(plan, worker)
        found.append(view[at : at + size])
        at += size
    return found


def _sealed_part(identity: Identity, plan: RunPlan, upload: Upload, worker: int, part: memoryview) -> SealedMessage:
    """Return one part of an update, sealed to its worker and signed."""
    member = plan.workers[worker]
    header = UploadPart(
        fleet=upload.fleet,
        run_id=upload.run_id,
        round=upload.round,
        phase=upload.phase,
        nonce=upload.nonce,
        device=upload.device,
        recipient=member.seal_key,
        worker=worker,
    )
    head = PART.head(upload.fleet, upload.device, member.name)
    return seal_message_to_member(identity, member.seal_key, head, encode(header), part)


def share_of(shares: DataSplits, share: int) -> Dataset:
    """Return the share of the device's data that an assignment names."""
    return {Share.TRAIN: shares.train, Share.VALIDATION: shares.validation, Share.TEST: shares.test}[Share(share)]


def local_training(plan: RunPlan, phase: int = Phase.TRAIN) -> LocalTraining:
    """Return the plan's settings for local training in a phase."""
    return plan.pretrain if phase in (Phase.PRETRAIN, Phase.PLACE) else plan.local


def is_real(labels: NDArray[Any]) -> bool:
    """Whether labels are numbers to predict, not classes."""
    return labels.dtype.kind == "f"


def reported_margins(losses: NDArray[np.float64], *, squared: bool) -> tuple[float, ...]:
    """Return each candidate's loss less the first's, clipped and rounded: enough to vote, little about the data.

    Squared errors have the unit of the targets, so their margin is the logarithm of their ratio: 0.1 is a tenth more or less.

    Args:
        losses: shape (k,), float64, mean losses of the candidates.
        squared: whether they are squared errors; the losses of a task's own function that are below 0 are not.
    """
    if squared and not (losses < 0).any():
        losses = np.log(np.maximum(losses, np.finfo(np.float64).tiny))
    differences = np.clip(np.nan_to_num(losses - losses[0], nan=MARGIN_CLIP), -MARGIN_CLIP, MARGIN_CLIP)
    return tuple(round(float(v), MARGIN_DECIMALS) for v in differences)


def trial_margins(
    before: Sequence[NDArray[np.float64]], after: NDArray[np.float64], labels: NDArray[Any]
) -> tuple[float, ...]:
    """Return the three figures of `Upload.margins` in a trial: how much worse the second of two candidates is.

    Under label skew a model gains on some labels what it loses on others, so the third figure gives each label the same weight,
    and the first is the lesser of that and the mean over samples, both before training. Without one label to each sample both
    are 0. The second is the lesser of the means over samples before and after training.

    Args:
        before: losses of the same n samples, shape (n,), float64, for either candidate.
        after: mean losses of the trained candidates, shape (2,), float64.
        labels: of the samples, shape (n, ...).
    """
    squared = is_real(labels)
    plain = reported_margins(np.array([losses.mean() for losses in before]), squared=squared)[1]
    one_each = labels.ndim == 1 and labels.dtype.kind in "iu"
    of_label = [labels == label for label in np.unique(labels)] if one_each else []
    means = np.array([[losses[o].mean() for o in of_label] for losses in before]).mean(1) if of_label else np.zeros(2)
    even = reported_margins(means, squared=False)[1]
    return (min(plain, even) if of_label else 0.0, min(plain, reported_margins(after, squared=squared)[1]), even)


def reported_counts(plan: RunPlan, samples: int, correct: int, tested: int) -> tuple[int, int, int]:
    """Return (samples, correct, tested) for the upload: the true numbers if the plan weights by samples.

    A device with more than ``max_samples`` reports that many and trains on all of them.
    Under ``weighting=uniform`` the aggregator does not need the number of samples. The device reports one, and its test
    results in percent, since the size of the test share would reveal the number of samples.
    """
    if plan.recipe.weighting != "uniform":
        return min(samples, plan.recipe.max_samples), correct, tested
    return 1, round(FULL_PERCENT * correct / tested) if tested else 0, FULL_PERCENT if tested else 0


class BatchOrder:
    """The sample orders of one round: repeatable after a restart, different on every device, the same on every platform.

    numpy does not guarantee stable streams of its generators, and importing them takes 2 MB.
    """

    def __init__(self, plan: RunPlan, device: str, round_: int) -> None:
        self._seed = f"{plan.seed}/{device}/{round_}"
        self._epoch = 0

    def permutation(self, n: int, /) -> NDArray[np.int64]:
        """Return the next epoch's order of n samples, shape (n,), int64."""
        self._epoch += 1
        return permutation(n, f"{self._seed}/{self._epoch}".encode())
