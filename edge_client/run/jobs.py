"""Jobs for a device's assignments, made from its samples, the run's graphs and the models received."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from edge_client.learning.data import Dataset, DataSplits, FilesSeen, Watch, split, split_growing
from edge_client.learning.data_doubts import doubts, model_doubt, no_better_doubt
from edge_client.learning.evaluation import majority_share
from edge_client.learning.reading import NONE_LEFT_OUT, LeftOut
from edge_client.learning.standardisation import local_scale, prepared, rescaled, scale_for
from edge_client.learning.statistics import scale_doubt, scale_of_state, statistics_of
from edge_client.learning.trainer.model import device_model
from edge_client.learning.update import Finished, TrainingContext, carry_out, report_statistics
from edge_client.models.private_values import PrivateValues, initial_values, joined
from edge_client.storage.finished_models import UNMEASURED, FinishedModel, FinishedModels, Validation, measured
from edge_client.storage.scales import Scale, Scales
from shoal.errors import DataError, IntegrityError, ShoalError, UntrustedError
from shoal.membership.roster import aggregator_of
from shoal.protocol.messages import Announcement, Assignment, Phase

if TYPE_CHECKING:
    from edge_client.learning.model import Backend
    from edge_client.learning.worker import Job
    from edge_client.membership import DeviceMembership
    from edge_client.models.round_context import Run
    from edge_client.run.held_models import HeldModels
    from edge_client.storage.pending_upload import Residual
    from shoal.task.bundle import TaskBundle
    from shoal.task.manifest import TaskManifest
    from shoal.types import Float32Vector

LOG = logging.getLogger("shoal.edge")


class JobFactory:
    """Makes the jobs of one device; holds its samples and the graphs of the current run.

    Attributes:
        doubts: about the samples, one sentence each.
        left_out: the damaged samples that are not among them.
        private: the device's private values, as they are stored with its next upload; empty if there are none.
    """

    def __init__(
        self,
        membership: DeviceMembership,
        load_data: Callable[[TaskManifest], Dataset],
        *,
        threads: int,
        backend: Callable[[TaskBundle, int], Backend] = device_model,
        watch: Watch | None = None,
        private: bytes = b"",
    ) -> None:
        """Create the factory for one device.

        Args:
            membership: the device's keys and fleet.
            load_data: returns its samples in a task's shapes.
            threads: threads of the executor.
            backend: makes the backend of a task, given the task and the number of threads.
            watch: returns the data files as they are, to read them again when they have changed; None reads them once.
            private: the private values that were stored with the last upload before a restart.
        """
        self._watch = watch
        self._split = split if watch is None else split_growing
        self._seen: FilesSeen | None = None
        self._read_again: tuple[Run, DataSplits | None, DataSplits | None, FilesSeen, LeftOut] | None = None
        self._make_backend = backend
        self._membership = membership
        self._load_data = load_data
        self._threads = threads
        self._context_of: Callable[..., TrainingContext] | None = None
        self._shares: tuple[bytes, DataSplits] | None = None
        self.doubts: tuple[str, ...] = ()
        self.left_out = NONE_LEFT_OUT
        self._scale: Scale | None = None
        self._raw: DataSplits | None = None
        self._run: Run | None = None
        self._scales = Scales(membership.directory)
        self._took: tuple[Run, Scale] | None = None
        self.private = private
        self._private: PrivateValues | None = None

    def follow(self, run: Run) -> int:
        """Set up for a run; return the number of samples to train on.

        Raises:
            DataError: the samples do not fit the task.
            TaskError: the task's private values are not finite, or the executor lacks an operator of its graphs.
        """
        digest = run.plan.task_digest
        initial = initial_values(run.bundle)
        self._adopt()
        # Read the samples once per task, not per run, unless each run has a scale of its own.
        if self._shares is None or self._shares[0] != digest or self._needs_own_units(run):
            self._seen = None if self._watch is None else self._watch()
            found = self._load_data(run.bundle.manifest)
            samples = self._split(found, split_seed(self._membership))
            self.left_out = found.left_out
            self.doubts = doubts(found, run.bundle.manifest)
            self._scale = self._begin_scale(run, samples)
            self._doubt(self._scale)
            self._raw = samples if run.bundle.manifest.data.standardise == "federated" else None
            self._shares = (digest, prepared(samples, self._scale))
        elif self._scale is not None and self._scale.run_id != run.plan.run_id:
            self._scale = dataclasses.replace(self._scale, run_id=run.plan.run_id)
            self._keep_scale(self._scale)
        shares, member = self._shares[1], self._membership
        private = PrivateValues(run.plan.run_id, initial, self.private)
        self._context_of = partial(
            TrainingContext,
            run=run,
            identity=member.identity,
            aggregator=aggregator_of(member.roster),
            backend=self._make_backend(run.bundle, self._threads),
            shares=shares,
        )
        self._private = private
        self._run = run
        return len(shares.train)

    def _begin_scale(self, run: Run, samples: DataSplits) -> Scale | None:
        """Return the scale of a run that begins or is resumed; None if its task does not standardise."""
        manifest, run_id = run.bundle.manifest, run.plan.run_id
        if manifest.data.standardise == "off":
            return None
        try:
            stored = self._scales.load(run_id)
        except IntegrityError as error:
            LOG.warning("a run's scale is lost, and made again", extra={"kv": {"run": run.plan.run, "reason": error}})
            stored = None
        if stored is not None and len(stored.means) == manifest.width:
            return stored
        if manifest.data.standardise == "federated":
            return None  # until the fleet's statistics arrive
        scale = local_scale(samples.train.x, run_id)
        self._keep_scale(scale)
        return scale

    def has_grown(self, per_cent: int) -> bool:
        """Whether the data files have grown by so much since they were read last; never without a watch over them."""
        if self._watch is None or self._seen is None:
            return False
        try:
            return self._watch().total_bytes * 100 >= self._seen.total_bytes * (100 + per_cent)
        except DataError:
            return False  # the next run says what is wrong with them

    def doubts_model(self, model: FinishedModel | None) -> bool:
        """Whether a finished model is right no more often than the most common label, by the samples that have been read."""
        shares = self._shares
        return shares is not None and bool(model_doubt(model, shares[0], shares[1].validation.y))

    def _doubt(self, scale: Scale | None) -> None:
        doubt = scale_doubt(scale)
        self.doubts += (doubt,) if doubt else ()

    def _needs_own_units(self, run: Run) -> bool:
        """Whether the samples held are in another run's scale, from which the run's can't follow."""
        how = run.bundle.manifest.data.standardise
        own = how == "federated" or (how != "off" and self._watch is not None)
        return own and not self._has_scale_of(run)

    def _adopt(self) -> None:
        """Take the samples that a job has read again, and the scale of the model that it has chosen in the end."""
        self._adopt_samples()
        took, self._took = self._took, None
        if took is not None and took[0] is self._run:
            self._use_scale(took[1])

    def _adopt_samples(self) -> None:
        found, self._read_again = self._read_again, None
        if found is None or found[0] is not self._run or self._shares is None or self._context_of is None:
            return
        _, splits, raw, self._seen, left_out = found
        if splits is not None:
            self.left_out = left_out
            self._raw = None if self._raw is None else raw
            self._shares = (self._shares[0], splits)
            self._context_of = partial(self._context_of, shares=splits)

    def _with_new_samples(self, context: TrainingContext, run: Run, seen: FilesSeen) -> TrainingContext:
        """Return the context with the samples as the files have them now; runs in the worker's thread.

        Files that are being written, or have grown too large, leave the samples as they are.
        """
        splits: DataSplits | None = None
        samples: DataSplits | None = None
        scaled: dict[int, DataSplits] = {}
        left_out = NONE_LEFT_OUT
        try:
            seen.check_size()
            found = self._load_data(run.bundle.manifest)
            left_out = found.left_out
            samples = self._split(found, split_seed(self._membership))
            splits = prepared(samples, self._scale)
            scaled = {m: prepared(samples, scale) for m, scale in context.scales.items()}
        except DataError as error:
            facts = {"reason": error, "hint": error.hint}
            LOG.warning("the data have changed and can't be read: the samples before stay in use", extra={"kv": facts})
        self._read_again = (run, splits, samples, seen, left_out)
        if splits is None:
            return context
        LOG.info("data read again", extra={"kv": {"samples": len(splits.train)}})
        return dataclasses.replace(context, shares=splits, scaled=scaled)

    def _has_scale_of(self, run: Run) -> bool:
        return self._scale is not None and self._scale.run_id == run.plan.run_id

    def _lacks_scale(self, run: Run) -> bool:
        """Whether the samples still are in their own units, though the task standardises by the fleet's figures."""
        return run.bundle.manifest.data.standardise == "federated" and not self._has_scale_of(run)

    def _scales_of(
        self, run: Run, announcement: Announcement, assignment: Assignment, models: HeldModels
    ) -> list[Scale]:
        """Return the scales of an order's models; none if the task has no such scales, or the round offers none anew.

        Raises:
            IntegrityError: they have not, or they are not finite.
        """
        data, found = run.bundle.manifest.data, []
        if data.standardise != "federated":
            return []
        for model in assignment.models:
            held = models.statistics(announcement, model)
            if held is None and not self._lacks_scale(run):
                return []
            if held is None:
                raise IntegrityError("the fleet's statistics, by which the task standardises, are not in this round")
            found.append(scale_of_state(held, data, run.plan))
        return found

    def _use_scale(self, scale: Scale) -> None:
        """Standardise the samples by the statistics of the fleet or of the device's cluster."""
        if scale == self._scale or self._shares is None or self._raw is None:
            return
        if self._scale is None or scale.doubted != self._scale.doubted:
            self._doubt(scale)
        self._keep_scale(scale)
        self._scale, self._shares = scale, (self._shares[0], prepared(self._raw, scale))
        assert self._context_of is not None
        self._context_of = partial(self._context_of, shares=self._shares[1])

    def _statistics(self, run: Run, before: Float32Vector) -> Float32Vector:
        """Return how the device's statistics differ from those ``before``, (d,) float32.

        Raises:
            DataError: a feature has no value.
        """
        manifest = run.bundle.manifest
        assert self._raw is not None
        return statistics_of(self._raw.train.x, manifest.data, manifest.federated_length) - before

    def _keep_scale(self, scale: Scale) -> None:
        """Store a run's scale, and remove those that no finished model needs."""
        self._scales.save(scale)
        try:
            finished = {model.run_id for model in FinishedModels(self._membership.directory).models()}
        except IntegrityError:
            return  # the end of a run replaces the damaged list
        self._scales.keep_only(frozenset(finished | {scale.run_id}))

    def shares_of(self, task_digest: bytes) -> DataSplits | None:
        """Return the samples that the current run's jobs have; None if the run has another task, or no scale yet."""
        self._adopt()
        if self._run is not None and self._lacks_scale(self._run):
            return None
        return None if self._shares is None or self._shares[0] != task_digest else self._shares[1]

    def job(
        self,
        announcement: Announcement,
        assignment: Assignment,
        thetas: Mapping[int, Float32Vector],
        models: HeldModels,
        residual: Residual | None = None,
    ) -> Job:
        """Return the job of an assignment; ``thetas`` are (d,) float32 by model id, from ``models``.

        ``residual`` is that of the device's last upload, if it may be added.
        """
        assert self._context_of is not None
        assert self._private is not None
        self._adopt()
        assert self._run is not None
        run, manifest = self._run, self._run.bundle.manifest
        private = self._private.at(announcement.round)
        if assignment.phase == Phase.STATISTICS:
            if manifest.data.standardise != "federated":
                raise UntrustedError("an order for statistics, which the task does not need")
            context = self._context_of(round=models.context(announcement, assignment), private=private)
            before = thetas[assignment.candidates[0]]
            return lambda _cancelled: report_statistics(
                context, announcement, assignment, self._statistics(run, before)
            )
        scales = self._scales_of(run, announcement, assignment, models)
        for scale in scales[:1]:
            self._use_scale(scale)
        others = {m: s for m, s in zip(assignment.models, scales, strict=False) if s != self._scale}
        context = self._context_of(round=models.context(announcement, assignment), private=private, residual=residual)
        if self._raw is not None:
            scaled = {m: prepared(self._raw, scale) for m, scale in others.items()}
            context = dataclasses.replace(context, scales=others, scaled=scaled)
        carry = self._finish if announcement.finished else carry_out
        seen = self._changed()
        if seen is None:
            return lambda cancelled: carry(context, announcement, assignment, thetas, cancelled)
        return lambda cancelled: carry(
            self._with_new_samples(context, run, seen), announcement, assignment, thetas, cancelled
        )

    def _changed(self) -> FilesSeen | None:
        """Return the data files as they are, if they are watched and differ from those that were read."""
        if self._watch is None:
            return None
        try:
            seen = self._watch()
        except DataError as error:
            LOG.warning("the data can't be watched", extra={"kv": {"reason": error, "hint": error.hint}})
            return None
        return None if seen == self._seen else seen

    def keep_private(
        self, announcement: Announcement, result: Finished, thetas: Mapping[int, Float32Vector]
    ) -> Mapping[int, Float32Vector]:
        """Take the private coordinates that a job has trained, and return its models with them.

        Args:
            announcement: the round.
            result: the job's.
            thetas: the job's models, (d,) float32 by id.

        Returns:
            the models with the device's newest private coordinates, (d + p,) float32 by id.
        """
        assert self._private is not None
        if result.private is not None:
            self._private.keep(announcement.round, result.private)
            self.private = self._private.to_bytes()
        return {model: joined(theta, self._private.newest) for model, theta in thetas.items()}

    def _finish(
        self,
        context: TrainingContext,
        announcement: Announcement,
        assignment: Assignment,
        thetas: Mapping[int, Float32Vector],
        cancelled: Callable[[], bool],
    ) -> Finished:
        """Carry out the assignment of a final round, and measure its model on the validation share.

        Earlier finished models of the same task are measured again: the samples may have changed since, and only figures of
        the same samples can be compared.
        """
        done = carry_out(context, announcement, assignment, thetas, cancelled)
        theta = joined(thetas[done.model], context.private)
        if done.model in context.scales:
            self._took = context.run, context.scales[done.model]
            self._keep_scale(context.scales[done.model])
        found = {announcement.run_id: _validation(context, theta, context.samples_for(done.model).validation)}
        store = FinishedModels(self._membership.directory)
        for model in store.readable():
            if model.task != context.plan.task_digest or model.run_id in found:
                continue
            try:
                scale = scale_for(context.run.bundle.manifest, self._scales, model.run_id)
                share = rescaled(context.shares.validation, self._scale, scale)
                found[model.run_id] = _validation(context, store.load(model, model.own).theta, share)
            except ShoalError as error:
                LOG.warning("a finished model can't be used", extra={"kv": {"run": model.run, "reason": error}})
                found[model.run_id] = UNMEASURED
        return dataclasses.replace(done, validation=found, doubts=_doubts(context, found[announcement.run_id]))


def split_seed(membership: DeviceMembership) -> bytes:
    """Return the seed by which a device splits its samples: a restart, or another run, does not change the shares."""
    return f"{membership.fleet}/{membership.name}".encode()


def _doubts(context: TrainingContext, fit: Validation) -> tuple[str, ...]:
    """Return the doubts about a finished classifier, given its fit to the validation share."""
    if fit.accuracy is None or fit.loss is None:
        return ()
    doubt = no_better_doubt(fit.accuracy, majority_share(context.shares.validation.y))
    return (doubt,) if doubt else ()


def _validation(context: TrainingContext, theta: Float32Vector, share: Dataset) -> Validation:
    score = context.backend.score(theta, share.x, share.y)
    regression = context.run.bundle.manifest.kind == "regression"
    return measured(score.mean_loss, score.correct, score.count, len(share), regression=regression)
