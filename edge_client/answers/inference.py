"""Predict with the device's models, or write one as an ONNX file: the best finished model, or that of the current run.

Of a finished run, the model of the device's personal choice answers unless a node or the ensemble is asked for.

`export` writes a trained model as one ordinary ONNX file, which can be used without Shoal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edge_client.answers.loaded_model import answers_of, probabilities_of
from edge_client.learning.data import load, load_inputs
from edge_client.learning.evaluation import ClassFigures, ErrorFigures, of_classes, of_numbers
from edge_client.learning.finish_rule import CLUSTER, node_name, node_of
from edge_client.learning.model import Backend
from edge_client.learning.reading import AS_FOUND, Reading
from edge_client.learning.standardisation import LARGEST, scale_for, standardised
from edge_client.learning.trainer.model import device_model
from edge_client.membership import DeviceMembership
from edge_client.run.beginning import stored_run
from edge_client.storage.finished_models import FinishedModels
from edge_client.storage.scales import Scale, Scales
from edge_client.storage.state import DeviceState, OwnModel
from shoal.errors import ConfigError, IntegrityError, TaskError
from shoal.task.bundle import TaskBundle
from shoal.task.onnx_graph import add_metadata, add_softmax, bind_input, standardise_input
from shoal.util.files import write_atomic

if TYPE_CHECKING:
    from shoal.types import Float32Vector

MakeBackend: TypeAlias = Callable[[TaskBundle, int], Backend]
ENSEMBLE: Final = "ensemble"
"""Named in place of a candidate if all models on the device's path answer together."""


@dataclass(frozen=True, slots=True)
class Chosen:
    """The models that answer, with their task.

    Attributes:
        bundle: the task.
        models: one run's, of one round: from the root of cfl's tree to the device's own.
        live: whether they are of the current run rather than a finished one.
        choice: name of the device's personal choice; see `edge_client.learning.finish_rule`.
        trained: the chosen model, if it is one that the device trained after the run.
        scale: by which samples are standardised; None if the task does not.
        figures: of the run, and of the chosen model's fit to the validation share; empty for the current run.
        backend: makes what computes the answers, given the task and the number of threads.
    """

    bundle: TaskBundle = field(repr=False)
    models: tuple[OwnModel, ...] = field(repr=False)
    live: bool
    choice: str = CLUSTER
    trained: OwnModel | None = field(default=None, repr=False)
    scale: Scale | None = field(default=None, repr=False)
    figures: Mapping[str, Any] = field(default_factory=dict, repr=False)
    backend: MakeBackend = field(default=device_model, repr=False)

    @property
    def own(self) -> OwnModel:
        """The model of the device's own cluster."""
        return self.models[-1]

    def at(self, node: int | None) -> OwnModel:
        """Return the model of a node, by default that of the personal choice.

        Raises:
            ConfigError: the device does not hold it.
        """
        if node is None and self.trained is not None:
            return self.trained
        wanted = node_of(self.choice) if node is None else node
        found = next((model for model in reversed(self.models) if wanted in (None, model.cluster)), None)
        if found is None:
            raise ConfigError(
                f"this device has no model of node {wanted}, but of {', '.join(str(m.cluster) for m in self.models)}",
                hint="a cfl run with the setting path=on leaves every model from the device's cluster to the root",
            )
        return found

    def outputs(self, x: NDArray[Any], *, node: int | None = None, ensemble: bool = False) -> NDArray[np.float32]:
        """Return the outputs for samples in the units of the data: logits, or numbers for regression.

        Args:
            x: (n, *input shape), the task's dtype.
            node: as for `predict`.
            ensemble: return the mean over all models on the path.

        Raises:
            ConfigError: the device does not hold the node's model, or both a node and the ensemble are asked for.
        """
        if ensemble and node is not None:
            raise ConfigError("one node or the ensemble of all, not both", hint="leave --node or --ensemble away")
        models = self.models if ensemble else (self.at(node),)
        backend = self.backend(self.bundle, 1)
        if self.scale is not None:
            x = standardised(x, self.scale)
        total = backend.predict(models[0].theta, x)
        for model in models[1:]:
            total = total + backend.predict(model.theta, x)
        return total / np.float32(len(models))

    def predict(
        self, source: Path, *, node: int | None = None, ensemble: bool = False, reading: Reading = AS_FOUND
    ) -> NDArray[Any]:
        """Return one answer for each sample; see `predict`."""
        manifest = self.bundle.manifest
        return answers_of(
            self.outputs(load_inputs(source, manifest, reading), node=node, ensemble=ensemble), manifest.kind
        )

    def probabilities(
        self, source: Path, *, node: int | None = None, ensemble: bool = False, reading: Reading = AS_FOUND
    ) -> NDArray[np.float64]:
        """Return the probability of each class for each sample, (n, ..., classes); the classes' sum is 1.

        Raises:
            ConfigError: the task has no classes; otherwise as `outputs`.
        """
        manifest = self.bundle.manifest
        outputs = self.outputs(load_inputs(source, manifest, reading), node=node, ensemble=ensemble)
        return probabilities_of(outputs, manifest.kind)

    def evaluate(self, source: Path, reading: Reading = AS_FOUND) -> ClassFigures | ErrorFigures:
        """Return the figures of the answers for samples with labels; errors as for `predict`."""
        manifest = self.bundle.manifest
        samples = load(source, manifest, reading)
        outputs = self.outputs(samples.x)
        if manifest.kind == "regression":
            return of_numbers(outputs, samples.y)
        return of_classes(answers_of(outputs, manifest.kind), samples.y, manifest.label.limit)

    def export(self, output: Path, *, node: int | None = None) -> OwnModel:
        """Write the model of ``node``, by default of the personal choice, as a self-contained ONNX file; return it.

        Raises:
            TaskError: the task has no ONNX form.
            ConfigError: the device does not hold the node's model, or the file can't be written.
        """
        model = self.at(node)
        export(self.bundle, model.theta, output, self.scale, self.facts(node))
        return model

    def facts(self, node: int | None = None) -> dict[str, Any]:
        """Return what tells a model from others: its run and round, and its fit to the validation share if that is known."""
        figures = self.figures if node is None else {}
        return {**figures, "run_id": self.own.run_id.hex(), **self.document(node)}

    def document(self, node: int | None = None, *, ensemble: bool = False) -> dict[str, Any]:
        """Return the run, round, cluster and candidate of the model that answers, for JSON output."""
        model = self.own if ensemble else self.at(node)
        choice = self.choice
        if ensemble:
            choice = ENSEMBLE
        elif node is not None:
            choice = CLUSTER if node == self.own.cluster else node_name(node)
        return {
            "run": model.run,
            "round": model.round,
            "cluster": model.cluster,
            "live": self.live,
            "choice": choice,
        }


def choose(directory: Path, *, live: bool = False, backend: MakeBackend = device_model) -> Chosen:
    """Return the models that answer.

    Args:
        directory: the device's.
        live: take the model of the current run. Otherwise it is taken only while no run has finished.
        backend: as in `Chosen`.

    Raises:
        IntegrityError: there is no model yet, or a file is damaged.
    """
    membership = DeviceMembership(directory)
    found = None if live else in_use(directory)
    if found is not None:
        return replace(found, backend=backend)
    files = DeviceState(directory)
    model = files.load_model()
    package = files.load_run()
    if package is None:
        raise IntegrityError(f"{directory} holds no run", hint="let the device take part in one")
    run = stored_run(package, membership)
    if run.plan.run_id != model.run_id:
        raise IntegrityError(
            f"the model is of run {model.run}, the task of run {run.plan.run}",
            hint="let the device finish a round of the new run",
        )
    scale = scale_for(run.bundle.manifest, Scales(directory), model.run_id)
    return Chosen(run.bundle, (model,), live=True, scale=scale, backend=backend)


def in_use(directory: Path) -> Chosen | None:
    """Return the finished models of the run that answers; None before the first run has finished.

    Raises:
        IntegrityError: a file is damaged, or the personal choice is of another task.
    """
    store = FinishedModels(directory)
    found = store.answering()
    if found is None:
        return None
    finished, bundle, models = found
    scale = scale_for(bundle.manifest, Scales(directory), finished.run_id)
    chosen = Chosen(bundle, models, live=False, scale=scale, figures=finished.document())
    personal = store.personal(finished)
    if personal is None or personal[0].choice == CLUSTER:
        return chosen
    choice, body = personal
    loss = {fit.name: fit.loss for fit in choice.fits}.get(choice.choice)
    fit = {"validation_loss": loss, "validation_accuracy": None, "validation_samples": choice.samples}
    chosen = replace(chosen, choice=choice.choice, figures={**chosen.figures, **fit})
    if not choice.length:
        return chosen
    if choice.length != len(chosen.own.theta):
        raise IntegrityError(
            f"the personal model of run {finished.run} has {choice.length} coordinates, not {len(chosen.own.theta)}",
            hint="choose again with: shoal-edge personalise",
        )
    return replace(chosen, trained=replace(chosen.own, theta=np.frombuffer(body, "<f4").astype(np.float32)))


OUTPUTS: Final = "outputs"
PROBABILITIES: Final = "probabilities"


def export(
    bundle: TaskBundle,
    theta: Float32Vector,
    path: Path,
    scale: Scale | None = None,
    facts: Mapping[str, Any] | None = None,
) -> None:
    """Write `onnx_pieces` to a file, replaced atomically.

    Raises:
        TaskError: as `onnx_pieces`.
        ConfigError: the file can't be written.
    """
    write_atomic(path, *onnx_pieces(bundle, theta, scale, facts or {}))


def onnx_pieces(
    bundle: TaskBundle, theta: Float32Vector, scale: Scale | None, facts: Mapping[str, Any]
) -> tuple[bytes, memoryview]:
    """Return predict.onnx with ``theta`` as a constant, which comes last: head and body of the file.

    It takes ``x`` alone and returns ``outputs``, and ``probabilities`` if the task has classes. `facts_of` and ``facts`` are its
    metadata, as texts: names stand one in a line, and None is left out.

    Args:
        bundle: the task.
        theta: shape (d,), float32, the model.
        scale: standardises ``x`` inside the file; None if the task does not standardise.
        facts: numbers, texts, or tuples of names.

    Raises:
        TaskError: theta does not fit the task or is not finite, or the task has no graphs.
    """
    if bundle.manifest.trainer is not None:
        raise TaskError(
            "a model of own training code has no ONNX form", hint="shoal-fleet models get writes its parameters by name"
        )
    if theta.shape != (bundle.length,) or theta.dtype != np.float32:
        raise TaskError(f"the model must be a float32 vector of {bundle.length} coordinates, not {theta.shape}")
    if not np.isfinite(theta).all():
        raise TaskError("the model holds numbers that are not finite")
    graph = bundle.predict
    if bundle.manifest.kind != "regression":
        graph = add_softmax(graph, OUTPUTS, PROBABILITIES)
    if scale is not None:
        shape = bundle.manifest.input.shape
        graph = standardise_input(graph, "x", scale.means, scale.deviations, shape, largest=LARGEST)
    known = {**facts_of(bundle), **facts}
    texts = {name: "\n".join(v) if isinstance(v, tuple) else str(v) for name, v in known.items() if v is not None}
    values = np.ascontiguousarray(theta, dtype="<f4")
    return bind_input(add_metadata(graph, texts), "theta", bundle.length), values.view(np.uint8).data


def facts_of(bundle: TaskBundle) -> dict[str, Any]:
    """Return what a program has to know of a task: its name and kind, and the names of values and classes, in order."""
    manifest = bundle.manifest
    return {
        "task": manifest.name,
        "kind": manifest.kind,
        "features": manifest.data.features,
        "labels": manifest.data.labels,
    }
