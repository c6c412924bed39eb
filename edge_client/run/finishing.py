"""The personal finish of runs that have ended: when a device does it, and where the result goes.

A device does it once after a run, in a thread of the lowest priority, while no round needs the device and until the next run
is announced. It reads the finished model's files and writes one file, and it sends nothing. A finish that was cut off begins
again at the next start.

`personalise` is `shoal-edge personalise`: it does the personal finish of the model that answers again, now and in this process.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from edge_client.config import EdgeConfig, ditto_weight
from edge_client.learning.data import DataSplits, load, split, split_growing
from edge_client.learning.finish import Chosen, Ended, finish
from edge_client.learning.finish_rule import CLUSTER, node_name, node_of
from edge_client.learning.standardisation import prepared, scale_for
from edge_client.learning.trainer.model import make_model
from edge_client.learning.worker import LOWEST_PRIORITY, Worker
from edge_client.membership import DeviceMembership
from edge_client.models.fresh_start import draw
from edge_client.run.beginning import start_figures
from edge_client.run.jobs import JobFactory, split_seed
from edge_client.run.policy import owners_plan
from edge_client.storage.finished_models import (
    CHOICE_VERSION,
    CandidateFit,
    FinishedModel,
    FinishedModels,
    PersonalChoice,
)
from edge_client.storage.scales import Scales
from shoal.errors import ConfigError, IntegrityError, ShoalError, reason_of
from shoal.protocol.codec import decode
from shoal.protocol.documents import RunPackage

if TYPE_CHECKING:
    from edge_client.learning.model import Backend
    from edge_client.models.round_context import Run
    from shoal.task.bundle import TaskBundle

LOG = logging.getLogger("shoal.edge")


def ended_run(
    store: FinishedModels, model: FinishedModel, bundle: TaskBundle, membership: DeviceMembership, weight: float
) -> Ended:
    """Return what a personal finish of a run needs, from the files that the run left.

    Args:
        store: the device's finished models.
        model: the run's.
        bundle: its task.
        membership: the device's.
        weight: of Ditto's proximal term; 0 leaves that candidate out.

    Raises:
        ConfigError: the run left too little.
        IntegrityError: a file is damaged, or the plan is not the owner's.
    """
    stored = store.start_of(model)
    try:
        plan, start = owners_plan(stored, membership), start_figures(decode(stored, RunPackage))
    except ShoalError as error:
        raise IntegrityError(f"the plan of run {model.run} is damaged: {error}") from error
    return Ended(
        plan=plan,
        device=membership.name,
        round=model.round,
        own=store.load(model, model.own).theta,
        above={node_name(node.cluster): store.load(model, node).theta for node in model.above},
        fresh=None if start is None else partial(draw, start, bundle.manifest.lengths, plan.seed),
        weight=weight,
    )


def save(store: FinishedModels, model: FinishedModel, done: Chosen, *, took_s: float, at_s: int) -> PersonalChoice:
    """Store the result of a personal finish, log it, and return it.

    Raises:
        StorageError: the disk is full, or would be.
    """
    trained = done.choice != CLUSTER and node_of(done.choice) is None
    choice = PersonalChoice(
        version=CHOICE_VERSION,
        run_id=model.run_id,
        choice=done.choice,
        by_hand=False,
        fits=tuple(CandidateFit(name, loss if math.isfinite(loss) else None) for name, loss in done.losses.items()),
        samples=done.samples,
        folds=done.folds,
        took_s=took_s,
        made_at_s=at_s,
        length=len(done.theta) if trained else 0,
    )
    store.save_personal(choice, done.theta if trained else None)
    losses = " ".join(f"{name}={loss:.4f}" for name, loss in done.losses.items())
    facts = {"run": model.run, "choice": done.choice, "losses": losses, "took_s": round(took_s, 2)}
    LOG.info("personal finish done", extra={"kv": facts})
    return choice


class Finisher:
    """Does the personal finish of one device's runs in a worker of its own.

    Args:
        membership: the device's.
        worker: runs the finish and nothing else; None turns the finish off.
        jobs: has the device's samples.
        backend: makes the backend of a task, given the task and the number of threads.
        hand_back: runs a callback from the worker on the driver's own thread.
        clock_s: returns unix seconds.
        weight: of Ditto's proximal term; 0 leaves that candidate out.
    """

    def __init__(
        self,
        membership: DeviceMembership,
        worker: Worker | None,
        jobs: JobFactory,
        *,
        backend: Callable[[TaskBundle, int], Backend],
        hand_back: Callable[[Callable[[], None]], None],
        clock_s: Callable[[], float],
        weight: float = 0.0,
    ) -> None:
        self._membership = membership
        self._worker = worker
        self._jobs = jobs
        self._make_backend = backend
        self._hand_back = hand_back
        self._clock_s = clock_s
        self._weight = weight
        self._store = FinishedModels(membership.directory)
        self._due: tuple[Run, FinishedModel] | None = None
        self._running = False

    def is_pending(self, *, idle: bool) -> bool:
        """Whether a finish is under way, or begins with the next `keep_up`; ``idle`` as for that."""
        return self._running or (self._due is not None and idle)

    def follow(self, run: Run) -> None:
        """Look whether the run in force has ended on this device, and still needs its finish."""
        self.cancel()
        self._due = None
        if self._worker is None:
            return
        model = self._store.of_run(run.plan.run_id)
        if model is None:
            return
        try:
            if self._store.personal(model) is None:
                self._due = run, model
        except IntegrityError as error:
            LOG.warning("a personal choice is lost", extra={"kv": {"run": model.run, "reason": error}})
            self._due = run, model

    def give_way(self, *, idle: bool) -> None:
        """Stop the finish under way if the device is not idle any more; call it after every change of its session."""
        if self._running and not idle:
            self.cancel()
            LOG.info("personal finish stopped: the fleet needs this device")

    def keep_up(self, *, idle: bool) -> None:
        """Begin the finish that is due if the device is idle: see `edge_client.protocol.session.DeviceSession.idle`."""
        if self._due is None or self._running or self._worker is None or not idle:
            return
        run, model = self._due
        shares = self._jobs.shares_of(run.plan.task_digest)
        if shares is None:
            return
        self._running = True
        LOG.info("personal finish begins", extra={"kv": {"run": model.run}})
        begun_s = time.monotonic()

        def done(result: Chosen | ShoalError) -> None:
            self._hand_back(lambda: self._ended(model, result, time.monotonic() - begun_s))

        self._worker.submit(self._job(run, model, shares), done)

    def _job(self, run: Run, model: FinishedModel, shares: DataSplits) -> Callable[[Callable[[], bool]], Chosen]:
        def job(cancelled: Callable[[], bool]) -> Chosen:
            # A backend of its own, made in this thread: threads that it starts have this thread's priority.
            backend = self._make_backend(run.bundle, 1)
            return finish(
                ended_run(self._store, model, run.bundle, self._membership, self._weight), shares, backend, cancelled
            )

        return job

    def _ended(self, model: FinishedModel, result: Chosen | ShoalError, took_s: float) -> None:
        if not self._running or self._due is None or self._due[1] != model:
            return  # cancelled while the result was on its way
        self._running, self._due = False, None
        try:
            if isinstance(result, ShoalError):
                raise result
            save(self._store, model, result, took_s=took_s, at_s=int(self._clock_s()))
        except ShoalError as error:
            facts: Mapping[str, Any] = {"run": model.run, "reason": reason_of(error), "hint": error.hint}
            LOG.warning("personal finish failed: the cluster's model stays in use", extra={"kv": facts})

    def cancel(self) -> None:
        """Stop the finish under way; it stays due."""
        if self._running and self._worker is not None:
            self._worker.cancel()
        self._running = False

    def close(self) -> None:
        """Stop the worker."""
        if self._worker is not None:
            self._worker.close()


def personalise(config: EdgeConfig) -> tuple[FinishedModel, PersonalChoice]:
    """Choose again after the run whose model answers, and return that run and the choice.

    `shoal-edge run` may be running meanwhile: this takes the lowest priority, and the choice is one file.

    Raises:
        ConfigError: no run has finished on the device, or the run left too little.
        IntegrityError: a file is damaged.
        DataError: the samples are missing or do not fit the task.
        TaskError: the cluster's model can't be scored, or the executor lacks an operator of the task.
        StorageError: the disk is full, or would be.
    """
    membership, store = DeviceMembership(config.dir), FinishedModels(config.dir)
    model = answering(store)
    bundle = store.task(model)
    os.setpriority(os.PRIO_PROCESS, 0, LOWEST_PRIORITY)
    begun_s = time.monotonic()
    ended = ended_run(store, model, bundle, membership, ditto_weight(config.personal))
    scale = scale_for(bundle.manifest, Scales(config.dir), model.run_id)
    cut = split_growing if config.watch else split
    shares = prepared(cut(load(config.data, bundle.manifest, config.reading), split_seed(membership)), scale)
    done = finish(ended, shares, make_model(config.executor, config.own_trainer)(bundle, config.threads), lambda: False)
    return model, save(store, model, done, took_s=time.monotonic() - begun_s, at_s=int(time.time()))


def answering(store: FinishedModels) -> FinishedModel:
    """Return the finished model that answers.

    Raises:
        ConfigError: no run has finished on the device.
        IntegrityError: the list is damaged.
    """
    model = store.standing().answers
    if model is None:
        raise ConfigError("this device has no finished model yet", hint="let it take part in a run until that ends")
    return model


def back_to_cluster(store: FinishedModels) -> tuple[FinishedModel, PersonalChoice]:
    """Let the cluster's model answer again after the run whose model answers; return that run and the choice.

    Raises:
        ConfigError: no run has finished on the device, or it has not chosen yet.
        IntegrityError: a file is damaged.
        StorageError: the disk is full, or would be.
    """
    model = answering(store)
    found = store.personal(model)
    if found is None:
        raise ConfigError(
            f"this device has not made a choice after run {model.run}: the cluster's model is in use",
            hint="`shoal-edge run --personal off` never makes one",
        )
    choice = found[0].of_cluster()
    store.save_personal(choice, None)
    return model, choice
