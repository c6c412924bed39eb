"""Predict with the device's models, or write one as an ONNX file: the best finished model, or that of the current run.

Of a finished run, the model of the device's personal choice answers unless a node or the ensemble is asked for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, TypeAlias

import numpy as np
from numpy.typing import NDArray

from edge_client import export as exporting
from edge_client.learning.data import load, load_inputs
from edge_client.learning.evaluation import ClassFigures, ErrorFigures, of_classes, of_numbers
from edge_client.learning.finish_rule import CLUSTER, node_name, node_of
from edge_client.learning.model import Backend
from edge_client.learning.reading import AS_FOUND, Reading
from edge_client.learning.standardisation import scale_for, standardised
from edge_client.learning.trainer.choice import device_model
from edge_client.membership import DeviceMembership
from edge_client.run.beginning import stored_run
from edge_client.storage.finished_models import FinishedModel, FinishedModels
from edge_client.storage.scales import Scale, Scales
from edge_client.storage.state import DeviceState, OwnModel
from shoal.errors import ConfigError, IntegrityError
from shoal.task.bundle import TaskBundle

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
        backend: makes what computes the answers, given the task and the number of threads.
    """

    bundle: TaskBundle = field(repr=False)
    models: tuple[OwnModel, ...] = field(repr=False)
    live: bool
    choice: str = CLUSTER
    trained: OwnModel | None = field(default=None, repr=False)
    scale: Scale | None = field(default=None, repr=False)
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
        outputs = self.outputs(load_inputs(source, self.bundle.manifest, reading), node=node, ensemble=ensemble)
        return outputs if self.bundle.manifest.kind == "regression" else classes(outputs)

    def probabilities(
        self, source: Path, *, node: int | None = None, ensemble: bool = False, reading: Reading = AS_FOUND
    ) -> NDArray[np.float64]:
        """Return the probability of each class for each sample, (n, ..., classes); the classes' sum is 1.

        Raises:
            ConfigError: the task has no classes; otherwise as `outputs`.
        """
        if self.bundle.manifest.kind == "regression":
            raise ConfigError("a regression model has no probabilities", hint="leave --probabilities away")
        return softmax(self.outputs(load_inputs(source, self.bundle.manifest, reading), node=node, ensemble=ensemble))

    def evaluate(
        self, source: Path, *, node: int | None = None, ensemble: bool = False, reading: Reading = AS_FOUND
    ) -> ClassFigures | ErrorFigures:
        """Return the figures of the answers for samples with labels; arguments and errors as for `predict`."""
        manifest = self.bundle.manifest
        samples = load(source, manifest, reading)
        outputs = self.outputs(samples.x, node=node, ensemble=ensemble)
        if manifest.kind == "regression":
            return of_numbers(outputs, samples.y)
        return of_classes(classes(outputs), samples.y, manifest.label.limit)

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


def classes(outputs: NDArray[Any]) -> NDArray[np.int64]:
    """Return the class of the largest output, (n, ...)."""
    found: NDArray[np.int64] = outputs.argmax(axis=-1)
    return found


def softmax(outputs: NDArray[Any]) -> NDArray[np.float64]:
    """Return the probabilities that logits (..., classes) stand for, in float64."""
    logits = outputs.astype(np.float64)
    powers = np.exp(logits - logits.max(axis=-1, keepdims=True))
    probabilities: NDArray[np.float64] = powers / powers.sum(axis=-1, keepdims=True)
    return probabilities


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
    store = FinishedModels(directory)
    found = None if live else store.answering()
    if found is not None:
        finished, bundle, models = found
        choice, trained = _personal(store, finished, models[-1])
        scale = scale_for(bundle.manifest, Scales(directory), finished.run_id)
        return Chosen(bundle, models, live=False, choice=choice, trained=trained, scale=scale, backend=backend)
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


def _personal(store: FinishedModels, finished: FinishedModel, own: OwnModel) -> tuple[str, OwnModel | None]:
    """Return the name of the device's choice after a run, and its model if the device trained it.

    Raises:
        IntegrityError: the choice is damaged, or of another task.
    """
    found = store.personal(finished)
    if found is None:
        return CLUSTER, None
    choice, body = found
    if not choice.length:
        return choice.choice, None
    if choice.length != len(own.theta):
        raise IntegrityError(
            f"the personal model of run {own.run} has {choice.length} coordinates, not {len(own.theta)}",
            hint="choose again with: shoal-edge personalise",
        )
    return choice.choice, replace(own, theta=np.frombuffer(body, "<f4").astype(np.float32))


def predict(
    directory: Path, source: Path, *, node: int | None = None, ensemble: bool = False, live: bool = False
) -> NDArray[Any]:
    """Return one answer for each sample: the class for classification, the task's outputs for regression.

    Args:
        directory: the device's.
        source: samples in any format that training takes; labels may be there and are ignored.
        node: answer with the model of this node of cfl's tree, which must be on the device's path; None means the model of
            the device's personal choice.
        ensemble: answer with the average of the outputs of all models on the path (cfl section V-C).
        live: as in `choose`.

    Raises:
        ConfigError: the device does not hold the node's model, or both a node and the ensemble are asked for.
    """
    return choose(directory, live=live).predict(source, node=node, ensemble=ensemble)


def export(directory: Path, output: Path, *, node: int | None = None, live: bool = False) -> OwnModel:
    """Write the model of ``node``, by default of the device's personal choice, as a self-contained ONNX file; return it."""
    chosen = choose(directory, live=live)
    model = chosen.at(node)
    exporting.export(chosen.bundle, model.theta, output, chosen.scale)
    return model
