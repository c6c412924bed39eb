"""Jobs for a device's assignments, made from its samples, the run's graphs and the models received."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING

from edge_client.learning.data import Dataset, DataSplits, split
from edge_client.learning.model import OrtModel
from edge_client.learning.update import Finished, TrainingContext, carry_out
from edge_client.models.private_values import PrivateValues, initial_values, joined
from edge_client.storage.finished_models import UNMEASURED, FinishedModels, Validation, measured
from shoal.errors import IntegrityError, ShoalError
from shoal.membership.roster import aggregator_of

if TYPE_CHECKING:
    from edge_client.followed_run import Run
    from edge_client.learning.model import Backend
    from edge_client.learning.worker import Job
    from edge_client.membership import DeviceMembership
    from edge_client.run.held_models import HeldModels
    from edge_client.storage.residual import Residual
    from shoal.protocol.messages import Announcement, Assignment
    from shoal.task.bundle import TaskBundle
    from shoal.task.manifest import TaskManifest
    from shoal.types import Float32Vector

LOG = logging.getLogger("shoal.edge")


class JobFactory:
    """Makes the jobs of one device; holds its samples and the graphs of the current run."""

    def __init__(
        self,
        membership: DeviceMembership,
        load_data: Callable[[TaskManifest], Dataset],
        *,
        threads: int,
        backend: Callable[[TaskBundle, int], Backend] = OrtModel,
    ) -> None:
        """Create the factory for one device.

        Args:
            membership: the device's keys and fleet.
            load_data: returns its samples in a task's shapes.
            threads: threads for ONNX Runtime.
            backend: makes the backend of a task, given the task and the number of threads.
        """
        self._make_backend = backend
        self._membership = membership
        self._load_data = load_data
        self._threads = threads
        self._workshop: Callable[..., TrainingContext] | None = None
        self._shares: tuple[bytes, DataSplits] | None = None
        self._private: PrivateValues | None = None

    def follow(self, run: Run) -> int:
        """Set up for a run; return the number of samples to train on.

        Raises:
            DataError: the samples do not fit the task.
            TaskError: the task's private values are not finite.
        """
        digest = run.plan.task_digest
        initial = initial_values(run.bundle)
        # Read the samples once per task, not per run.
        if self._shares is None or self._shares[0] != digest:
            self._shares = (digest, split(self._load_data(run.bundle.manifest), split_seed(self._membership)))
        shares, member = self._shares[1], self._membership
        private = PrivateValues(member.directory, run.plan.run_id, initial)
        self._workshop = partial(
            TrainingContext,
            run=run,
            identity=member.identity,
            aggregator=aggregator_of(member.roster),
            backend=self._make_backend(run.bundle, self._threads),
            shares=shares,
        )
        self._private = private
        return len(shares.train)

    def shares_of(self, task_digest: bytes) -> DataSplits | None:
        """Return the samples that the current run's jobs have; None if the run has another task."""
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
        assert self._workshop is not None
        assert self._private is not None
        private = self._private.at(announcement.round)
        shop = self._workshop(round=models.context(announcement, assignment), private=private, residual=residual)
        carry = self._finish if announcement.finished else carry_out
        return lambda cancelled: carry(shop, announcement, assignment, thetas, cancelled)

    def keep_private(
        self, announcement: Announcement, result: Finished, thetas: Mapping[int, Float32Vector]
    ) -> Mapping[int, Float32Vector]:
        """Make the private coordinates durable that a job has trained, and return its models with them.

        Args:
            announcement: the round.
            result: the job's.
            thetas: the job's models, (d,) float32 by id.

        Returns:
            the models with the device's newest private coordinates, (d + p,) float32 by id.

        Raises:
            ConfigError: the file can't be written; the values from before the round stay.
        """
        assert self._private is not None
        if result.private is not None:
            self._private.keep(announcement.round, result.private)
        return {model: joined(theta, self._private.newest) for model, theta in thetas.items()}

    def _finish(
        self,
        shop: TrainingContext,
        announcement: Announcement,
        assignment: Assignment,
        thetas: Mapping[int, Float32Vector],
        cancelled: Callable[[], bool],
    ) -> Finished:
        """Carry out the assignment of a final round, and measure its model on the validation share.

        Earlier finished models of the same task are measured again: the samples may have changed since, and only figures of
        the same samples can be compared.
        """
        done = carry_out(shop, announcement, assignment, thetas, cancelled)
        found = {announcement.run_id: _validation(shop, joined(thetas[done.model], shop.private))}
        store = FinishedModels(self._membership.directory)
        try:
            earlier = [m for m in store.models() if m.task == shop.plan.task_digest and m.run_id not in found]
        except IntegrityError:
            earlier = []  # `FinishedModels.add` replaces the damaged list, and warns
        for model in earlier:
            try:
                found[model.run_id] = _validation(shop, store.load(model, model.own).theta)
            except ShoalError as error:
                LOG.warning("a finished model can't be used", extra={"kv": {"run": model.run, "reason": error}})
                found[model.run_id] = UNMEASURED
        return dataclasses.replace(done, validation=found)


def split_seed(membership: DeviceMembership) -> bytes:
    """Return the seed by which a device splits its samples: a restart, or another run, does not change the shares."""
    return f"{membership.fleet}/{membership.name}".encode()


def _validation(shop: TrainingContext, theta: Float32Vector) -> Validation:
    share = shop.shares.validation
    score = shop.backend.score(theta, share.x, share.y)
    regression = shop.run.bundle.manifest.kind == "regression"
    return measured(score.mean_loss, score.correct, score.count, len(share), regression=regression)
