"""The last finished models of a device, and the rule that picks the one that answers.

``finished/list.bin`` names the models. Each model and each task is a file named after its SHA-256. `FinishedModels.add` writes
the new files durably and then replaces the list in one rename, so that a power cut leaves the old list or the new one, each
with all of its files. Files that the list does not name are removed after each change and at the next start.

The newest model answers unless an older one of the same task does better on the device's validation share. For example, runs
1, 2 and 3 of one task end with accuracies of 0.91, 0.95 and 0.93: run 2's model answers. `rollback` overrides the rule until
a later run finishes: ``finished/rollback.bin`` names the chosen run and the newest one at that time, and counts only while
that run is still the newest. The owner's choice for the whole fleet (`choose`) is the same file, which also has the number of
the last one taken, so that the broker can't repeat it after a later `rollback` on the device. The serving program alone writes
the list, without a lock.

Each run in the list may have two more files. ``start-RUN_ID.bin`` has what a personal finish of the run needs besides the
models: the signed plan, and figures of the model that the run began with. ``personal-RUN_ID.bin`` is the result: the figures of
the choice, and the chosen model if the device trained it, so that a power cut, or a second program that chooses again at the
same time, leaves one choice whole.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from edge_client.checked_files import make_folder, read_checked, remove, verified, write_checked
from edge_client.storage.state import OwnModel, model_bytes, parse_model
from shoal.digests import sha256
from shoal.errors import ConfigError, IntegrityError, StorageError, UsageError
from shoal.limits import LOW_DISK_BYTES
from shoal.protocol.codec import U8, U16, U32, U64, Fixed16, Fixed32, encode, message
from shoal.types import DIGEST_BYTES, Float32Vector
from shoal.util.console import second
from shoal.util.files import exclusive, free_bytes, read_if_there, read_private, sync_directory, write_atomic

if TYPE_CHECKING:
    from shoal.protocol.documents import ModelChoice
    from shoal.task.bundle import TaskBundle

CHOICE_VERSION: Final = 1
_CLUSTER: Final = "cluster"


@message(79)
@dataclass(frozen=True, slots=True)
class CandidateFit:
    """A candidate's mean loss on the samples that were compared; None if it is not a finite number."""

    name: str
    loss: float | None


@message(80)
@dataclass(frozen=True, slots=True, kw_only=True)
class PersonalChoice:
    """The model that a device chose after a run.

    Attributes:
        version: `CHOICE_VERSION`.
        run_id: the run.
        choice: name of the chosen candidate; see `edge_client.learning.finish_rule`.
        by_hand: whether a person went back to the cluster's model, whatever the figures say.
        fits: the candidates that were compared, in order.
        samples, folds: see `edge_client.learning.finish.Chosen`.
        took_s: seconds that the finish took.
        made_at_s: unix seconds by the device's clock.
        length: coordinates of the model that follows, float32 little-endian; 0 if the choice is one of the run's own models.
    """

    version: U16
    run_id: Fixed16
    choice: str
    by_hand: bool
    fits: tuple[CandidateFit, ...]
    samples: U32
    folds: U8
    took_s: float
    made_at_s: U64
    length: U32

    def of_cluster(self) -> PersonalChoice:
        """Return the choice after a person has selected the cluster's model; the figures stay."""
        return replace(self, choice=_CLUSTER, by_hand=True, length=0)

    def document(self) -> dict[str, Any]:
        """Return the figures for JSON output."""
        return {
            "choice": self.choice,
            "by_hand": self.by_hand,
            "losses": {fit.name: fit.loss for fit in self.fits},
            "samples": self.samples,
            "folds": self.folds,
            "took_s": round(self.took_s, 3),
            "made_at": second(self.made_at_s),
        }


LOG = logging.getLogger("shoal.edge")
FINISHED_MODELS_KEPT: Final = 3
FOLDER: Final = "finished"
LIST_FILE: Final = "list.bin"
ROLLBACK_FILE: Final = "rollback.bin"
MODEL_FILES: Final = "model-*.bin"
TASK_FILES: Final = "task-*.bin"
START_FILES: Final = "start-*.bin"
PERSONAL_FILES: Final = "personal-*.bin"
LIST_VERSION: Final = 1
CHOICE_S: Final = 5.0
"""Longest wait for another program that writes a choice, in seconds; each needs milliseconds."""
READ_ATTEMPTS: Final = 3
"""Attempts to read the list and its files: a serving program may remove a model between the two reads."""

REMOVE_HINT: Final = "remove it; --live answers with the newest model in any case"


@message(66)
@dataclass(frozen=True, slots=True)
class Validation:
    """A model's fit to the validation share of its device.

    Attributes:
        loss: mean loss; None if it is not a finite number, or the model could not be measured.
        correct: labels predicted right.
        labels: labels seen; 0 for regression, which has no accuracy.
        samples: size of the share.
    """

    loss: float | None
    correct: U32
    labels: U32
    samples: U32

    @property
    def accuracy(self) -> float | None:
        """Share of labels predicted right, 0 to 1; None for regression."""
        return self.correct / self.labels if self.labels else None

    @property
    def rank(self) -> tuple[bool, float]:
        """A key that grows with quality: accuracy, or minus the loss for regression; unusable losses rank lowest."""
        if self.loss is None:
            return False, 0.0
        return True, -self.loss if self.accuracy is None else self.accuracy


UNMEASURED: Final = Validation(None, 0, 0, 0)


@message(67)
@dataclass(frozen=True, slots=True)
class FinishedNode:
    """One model of a finished run: its cluster and the SHA-256 of its file."""

    cluster: U16
    file: Fixed32


@message(68)
@dataclass(frozen=True, slots=True, kw_only=True)
class FinishedModel:
    """The model that a device ended a run with.

    Attributes:
        run, run_id, round, algorithm: the run and its final round.
        task: digest of the task; its file has the same SHA-256.
        finished_at_s: unix seconds by the device's clock.
        validation: its fit to the validation share as that was when the newest run of the same task finished.
        own: the model of the device's cluster.
        above: the models above it in cfl's tree, from the root; empty without the setting ``path``.
    """

    run: U32
    run_id: Fixed16
    round: U32
    algorithm: str
    task: Fixed32
    finished_at_s: U64
    validation: Validation
    own: FinishedNode
    above: tuple[FinishedNode, ...]

    def document(self) -> dict[str, Any]:
        """Return the figures for JSON output."""
        return {
            "run": self.run,
            "run_id": self.run_id.hex(),
            "round": self.round,
            "algorithm": self.algorithm,
            "cluster": self.own.cluster,
            "task_digest": self.task.hex(),
            "finished_at": second(self.finished_at_s),
            "validation_loss": self.validation.loss,
            "validation_accuracy": self.validation.accuracy,
            "validation_samples": self.validation.samples,
        }


@message(69)
@dataclass(frozen=True, slots=True)
class FinishedList:
    """The head of list.bin, oldest model first; its SHA-256 follows."""

    version: U16
    models: tuple[FinishedModel, ...]


@message(70)
@dataclass(frozen=True, slots=True)
class RollbackChoice:
    """The head of rollback.bin, whose SHA-256 follows: which model answers instead of the best.

    Attributes:
        run_id: the chosen run.
        newest: the run that finished last; the choice counts while no other has finished since. Zeros without a choice.
        sequence: number of the owner's last choice that the device took; 0 before the first.
        by_owner: whether that one chose the run.
    """

    run_id: Fixed16 = bytes(16)
    newest: Fixed16 = bytes(16)
    sequence: U64 = 0
    by_owner: bool = False


@dataclass(frozen=True, slots=True)
class Standing:
    """The finished models, oldest first, the one that answers, whether it was chosen, and whether by the owner."""

    models: tuple[FinishedModel, ...]
    answers: FinishedModel | None
    pinned: bool
    by_owner: bool = False

    def documents(self) -> list[dict[str, Any]]:
        """Return the models for JSON output, newest first."""
        return [
            {
                **m.document(),
                "answers": m is self.answers,
                "pinned": self.pinned and m is self.answers,
                "chosen_by_owner": self.by_owner and m is self.answers,
            }
            for m in reversed(self.models)
        ]


def best_of(models: Sequence[FinishedModel]) -> FinishedModel | None:
    """Return the newest model, or the best of its task if an older one fits the validation share better.

    Args:
        models: oldest first.
    """
    if not models:
        return None
    same = [m for m in models if m.task == models[-1].task]
    top = max(m.validation.rank for m in same)
    return next(m for m in reversed(same) if m.validation.rank == top)


def measured(mean_loss: float, correct: int, labels: int, samples: int, *, regression: bool) -> Validation:
    """Return the validation figures of a score; see `Validation` for the arguments."""
    loss = mean_loss if math.isfinite(mean_loss) else None
    return Validation(loss, 0, 0, samples) if regression else Validation(loss, correct, labels, samples)


class FinishedModels:
    """The finished models in one device's directory; all state is in the files."""

    def __init__(self, directory: Path) -> None:
        self._device = directory
        self._folder = directory / FOLDER

    def models(self) -> tuple[FinishedModel, ...]:
        """Return the finished models, oldest first.

        Raises:
            IntegrityError: the list is damaged, or of another version.
        """
        path = self._folder / LIST_FILE
        found = read_checked(path, FinishedList, REMOVE_HINT)
        if found is None:
            return ()
        finished, rest = found
        if len(rest) or finished.version != LIST_VERSION:
            raise IntegrityError(
                f"{path} has version {finished.version}, not {LIST_VERSION}",
                hint=f"use the shoal-edge that wrote it, or remove {self._folder} and let the device finish a run",
            )
        return finished.models

    def of_run(self, run_id: bytes) -> FinishedModel | None:
        """Return the final model of a run; None if it is not in the list, or the list is damaged."""
        return next((m for m in self.readable() if m.run_id == run_id), None)

    def standing(self) -> Standing:
        """Return the models, and the one that answers.

        Raises:
            IntegrityError: the list, or the choice of `rollback`, is damaged.
        """
        models = self.models()
        choice = self._choice()
        found = [m for m in models if m.run_id == choice.run_id and choice.newest == models[-1].run_id]
        if found:
            return Standing(models, found[0], pinned=True, by_owner=choice.by_owner)
        return Standing(models, best_of(models), pinned=False)

    def answering(self) -> tuple[FinishedModel, TaskBundle, tuple[OwnModel, ...]] | None:
        """Return the model that answers, its task, and its models from the root to its own; None before the first.

        Raises:
            IntegrityError: a file is damaged or missing.
        """
        for _ in range(READ_ATTEMPTS - 1):
            try:
                return self._answering()
            except ConfigError as error:
                if not isinstance(error.__cause__, FileNotFoundError):
                    raise
        return self._answering()

    def _answering(self) -> tuple[FinishedModel, TaskBundle, tuple[OwnModel, ...]] | None:
        model = self.standing().answers
        if model is None:
            return None
        return model, self.task(model), tuple(self.load(model, node) for node in (*model.above, model.own))

    def task(self, model: FinishedModel) -> TaskBundle:
        """Return the task of a finished model.

        Raises:
            IntegrityError: its file is damaged.
            ConfigError: its file is missing.
        """
        from shoal.task.bundle import TaskBundle

        return TaskBundle.from_bytes(self._read(TASK_FILES, model.task))

    def load(self, model: FinishedModel, node: FinishedNode) -> OwnModel:
        """Return one model of a finished run.

        Raises:
            IntegrityError: its file is damaged.
            ConfigError: its file is missing.
        """
        data = self._read(MODEL_FILES, node.file)
        loaded = parse_model(data, self._path(MODEL_FILES, node.file))
        if (loaded.run_id, loaded.cluster) != (model.run_id, node.cluster):
            raise IntegrityError(f"{self._path(MODEL_FILES, node.file)} is of another run or cluster")
        return loaded

    def add(
        self,
        own: OwnModel,
        above: Sequence[OwnModel],
        task: TaskBundle,
        *,
        algorithm: str,
        at_s: int,
        figures: Mapping[bytes, Validation],
        start: bytes = b"",
    ) -> None:
        """Add the model that a run ended with, durably, and remove the oldest beyond FINISHED_MODELS_KEPT.

        Args:
            own: the model of the device's cluster.
            above: the models above it in cfl's tree, from the root.
            task: the task of the run.
            algorithm: the algorithm of the run.
            at_s: end of the run, unix seconds.
            figures: fit to the validation share by run id, of this model and of earlier ones that were measured again.
            start: what `start_of` returns later.

        Raises:
            ConfigError: a file can't be written; the list stays as it was.
        """
        make_folder(self._folder)
        nodes = [self._write_model(model) for model in (*above, own)]
        self._write(TASK_FILES, task.digest, task.to_bytes())
        if start:
            write_atomic(self._path(START_FILES, own.run_id), start, sha256(start), sync_name=False)
        # One sync for all new names, before the list names them.
        sync_directory(self._folder)
        validation = figures.get(own.run_id, UNMEASURED)
        new = FinishedModel(
            run=own.run,
            run_id=own.run_id,
            round=own.round,
            algorithm=algorithm,
            task=task.digest,
            finished_at_s=at_s,
            validation=validation,
            own=nodes[-1],
            above=tuple(nodes[:-1]),
        )
        earlier = [
            replace(m, validation=figures.get(m.run_id, m.validation))
            for m in self.readable()
            if m.run_id != own.run_id
        ]
        models = (*earlier, new)[-FINISHED_MODELS_KEPT:]
        write_checked(self._folder / LIST_FILE, encode(FinishedList(LIST_VERSION, models)))
        self._remove_all_but(models)

    def start_of(self, model: FinishedModel) -> bytes:
        """Return what `add` was given as ``start``.

        Raises:
            ConfigError: the run left none on this device.
            IntegrityError: the file is damaged.
        """
        path = self._path(START_FILES, model.run_id)
        data = read_if_there(path)
        if data is None:
            raise ConfigError(
                f"this device has stored nothing to train from after run {model.run}",
                hint="the next run that ends on this device can be personalised",
            )
        return bytes(verified(path, data, REMOVE_HINT))

    def personal(self, model: FinishedModel) -> tuple[PersonalChoice, memoryview] | None:
        """Return the personal choice after a run with the bytes of its model, which may be none; None before the finish.

        Raises:
            IntegrityError: the file is damaged.
        """
        path = self._path(PERSONAL_FILES, model.run_id)
        hint = "choose again with: shoal-edge personalise, or remove the file"
        found = read_checked(path, PersonalChoice, hint)
        if found is None:
            return None
        choice, body = found
        if choice.version != CHOICE_VERSION:
            raise IntegrityError(f"{path} has version {choice.version}, not {CHOICE_VERSION}", hint=hint)
        if len(body) != 4 * choice.length:
            raise IntegrityError(f"{path} holds {len(body)} bytes where {choice.length} coordinates belong", hint=hint)
        return choice, body

    def save_personal(self, choice: PersonalChoice, theta: Float32Vector | None) -> None:
        """Store a personal choice durably, in place of an earlier one of its run.

        Args:
            choice: the choice.
            theta: its model, shape (d,), float32; None if it is one of the run's own models.

        Raises:
            StorageError: the disk is full, or would be; an earlier choice stays.
        """
        pieces = encode(choice), b"" if theta is None else theta.astype("<f4").tobytes()
        size = sum(map(len, pieces)) + DIGEST_BYTES
        free = free_bytes(self._device)
        if free < size + LOW_DISK_BYTES:
            raise StorageError(
                f"{free} bytes are free in {self._device}, too few for a personal model of {size} bytes",
                hint="free some space, then choose again with: shoal-edge personalise",
            )
        write_checked(self._path(PERSONAL_FILES, choice.run_id), *pieces)

    def tidy(self) -> None:
        """Remove files that the list does not name; with a damaged list all files stay until it is replaced."""
        try:
            models = self.models()
        except IntegrityError as error:
            LOG.warning("finished models can't be read", extra={"kv": {"reason": error}})
            return
        self._remove_all_but(models)

    def rollback(self, run: int | None) -> FinishedModel:
        """Let an earlier finished model answer until a later run finishes, and return it.

        Args:
            run: number of its run; None takes the one that finished before the one that answers now.

        Raises:
            UsageError: there is no model of that run.
            ConfigError: there is no earlier model, or the choice can't be written.
            IntegrityError: its file is damaged.
        """
        standing = self.standing()
        models, used = standing.models, standing.answers
        if used is None:
            raise ConfigError("this device has no finished model yet", hint="let it take part in a run until that ends")
        runs = f"{'run' if len(models) == 1 else 'runs'} {', '.join(str(m.run) for m in reversed(models))}"
        hint = f"give one of them: shoal-edge rollback {self._device} RUN"
        if run is None:
            before = models[: models.index(used)]
            if not before:
                raise ConfigError(
                    f"this device has no finished model older than run {used.run}'s: it has {runs}", hint=hint
                )
            chosen = before[-1]
        else:
            found = [m for m in models if m.run == run]
            if not found:
                raise UsageError(f"this device has no finished model of run {run}: it has {runs}", hint=hint)
            chosen = found[-1]
        self._check_files(chosen)
        with exclusive(self._folder, wait_s=CHOICE_S, hint="try again"):
            made = replace(self._choice(), run_id=chosen.run_id, newest=models[-1].run_id, by_owner=False)
            write_checked(self._folder / ROLLBACK_FILE, encode(made))
        # The serving program may have added a model between the two reads, which voids the choice.
        if self.standing().answers != chosen:
            raise ConfigError("a later run has just finished", hint="look at `shoal-edge models`, and roll back again")
        return chosen

    def choose(self, choice: ModelChoice) -> str | None:
        """Take the owner's choice for the fleet; return its effect in words, or None if it was taken before.

        Args:
            choice: authentic.

        Raises:
            ConfigError: it can't be written.
            IntegrityError: the list or the chosen model's file is damaged.
        """
        make_folder(self._folder)
        # Alone: the number of a choice that was taken must not be lost to a rollback at the same time.
        with exclusive(self._folder, wait_s=CHOICE_S, hint="try again"):
            before, models = self._choice(), self.models()
            if choice.sequence <= before.sequence:
                return None
            made = replace(before, sequence=choice.sequence, by_owner=False)
            chosen = next((m for m in models if m.run_id == choice.run_id), None)
            if not choice.run:
                made, effect = RollbackChoice(sequence=choice.sequence), "the device follows its own rule again"
            elif models and models[-1].run > choice.latest:
                effect = f"no effect: run {models[-1].run} has finished since"
            elif chosen is None:
                effect = f"no effect: this device has no finished model of run {choice.run}"
            else:
                self._check_files(chosen)
                made = RollbackChoice(chosen.run_id, models[-1].run_id, choice.sequence, by_owner=True)
                effect = f"run {choice.run}'s model answers until a later run finishes"
            write_checked(self._folder / ROLLBACK_FILE, encode(made))
            return effect

    def _choice(self) -> RollbackChoice:
        found = read_checked(self._folder / ROLLBACK_FILE, RollbackChoice, REMOVE_HINT)
        return RollbackChoice() if found is None else found[0]

    def _check_files(self, chosen: FinishedModel) -> None:
        """Read a model's files, since a damaged model must not be chosen.

        Raises:
            IntegrityError, ConfigError: they are damaged or missing.
        """
        for node in (*chosen.above, chosen.own):
            self._read(MODEL_FILES, node.file)
        self._read(TASK_FILES, chosen.task)

    def readable(self) -> tuple[FinishedModel, ...]:
        """Return the finished models, oldest first; none of a damaged list, which the end of the next run replaces."""
        try:
            return self.models()
        except IntegrityError as error:
            LOG.warning("the list of finished models is damaged, until a run ends", extra={"kv": {"reason": error}})
            return ()

    def _write_model(self, model: OwnModel) -> FinishedNode:
        head, body = model_bytes(model)
        digest = sha256(head, body)
        self._write(MODEL_FILES, digest, head, body)
        return FinishedNode(model.cluster, digest)

    def _write(self, pattern: str, digest: bytes, *pieces: bytes | memoryview) -> None:
        write_atomic(self._path(pattern, digest), *pieces, sync_name=False)

    def _read(self, pattern: str, digest: bytes) -> bytes:
        path = self._path(pattern, digest)
        data = read_private(path)
        if sha256(data) != digest:
            raise IntegrityError(
                f"{path} is damaged",
                hint="let another finished model answer with `shoal-edge rollback`, or the newest with --live",
            )
        return data

    def _path(self, pattern: str, name: bytes) -> Path:
        return self._folder / pattern.replace("*", name.hex())

    def _remove_all_but(self, models: Sequence[FinishedModel]) -> None:
        wanted = {self._path(TASK_FILES, m.task) for m in models}
        wanted |= {self._path(MODEL_FILES, node.file) for m in models for node in (*m.above, m.own)}
        wanted |= {self._path(pattern, m.run_id) for m in models for pattern in (START_FILES, PERSONAL_FILES)}
        for pattern in (MODEL_FILES, TASK_FILES, START_FILES, PERSONAL_FILES):
            for path in self._folder.glob(pattern):
                if path not in wanted:
                    remove(path)
