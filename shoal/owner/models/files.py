"""Files of a finished run's models: for each model an ONNX file and its parameters by name, and models.json.

A model of devices' own training code has its flat vector (.npy) in place of ONNX; its layout is in models.json.

The parameters are a .npz archive: one float32 array for each parameter, under torch's name and in torch's shape. It contains
no pickle. models.json is removed first and written last, so a folder without it is incomplete.

Example: `torch.nn.Module.load_state_dict` takes the second file after
``{name: torch.from_numpy(value) for name, value in numpy.load("model-0.npz").items()}``.
"""

from __future__ import annotations

import hashlib
import io
import json
import re
import zipfile
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from edge_client.answers.inference import export
from edge_client.learning.statistics import scale_of_state
from edge_client.models.states import ModelState
from edge_client.models.store import CERTIFICATE_LENGTH_BYTES, StateFile
from edge_client.run.held_models import assembled
from shoal import limits
from shoal.errors import ConfigError, IntegrityError, ShoalError, TaskError, UntrustedError, WireError
from shoal.membership.statements import check_claims, read_claims, signers_needed
from shoal.owner.keys.outputs import check_output
from shoal.owner.keys.run_list import signed_plans
from shoal.protocol.codec import decode_prefix
from shoal.protocol.messages import FOR_ALL
from shoal.protocol.states import Offer, RoundModels, StateId, read_certificate
from shoal.util.files import (
    named,
    private_directory,
    read_limited,
    read_private,
    remove_unfinished,
    write_atomic,
    write_failed,
)

if TYPE_CHECKING:
    from pathlib import Path

    from edge_client.storage.scales import Scale
    from shoal.owner.keys.directory import FleetDirectory
    from shoal.owner.models.final_round import FinalModel, FinishedRun, OpenedState
    from shoal.protocol.documents import RunPlan
    from shoal.task.bundle import TaskBundle
    from shoal.task.manifest import TaskManifest
    from shoal.types import Float32Vector

LIST_FILE: Final = "models.json"
FORMAT: Final = 1
FORMS: Final = ("onnx", "vector", "state")
"""Kinds of a model's files; the flat vector stands in for ONNX where devices train with code of their own."""
CERTIFIED_HINT: Final = "write it again on a device: shoal-edge export DIR FILE --certified"
SAME_TASK_HINT: Final = "give the task that their run was signed with; compiled again it is another task"
MAX_CERTIFIED: Final = 64
"""Most states in a device's file: the models of one round."""
_OURS: Final = re.compile(r"\.?(model-\d+\.(onnx|npz|npy)|models\.json)(\.[0-9a-f]+\.\d+\.new)?")
"""The files of an output, and their temporary names."""


def state_dict(manifest: TaskManifest, theta: Float32Vector) -> dict[str, np.ndarray]:
    """Return the parameters of a model by torch's names, as views of ``theta`` (d + p,)."""
    found, at = {}, 0
    for parameter in manifest.parameters:
        found[parameter.name] = theta[at : at + parameter.length].reshape(parameter.shape)
        at += parameter.length
    return found


def npz_bytes(arrays: dict[str, np.ndarray]) -> bytes:
    """Return a .npz archive of float32 arrays, which is the same for the same values.

    Unlike `numpy.savez` it takes arrays of any name.
    """
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_STORED) as archive:
        for name, values in arrays.items():
            entry = io.BytesIO()
            np.lib.format.write_array(entry, np.asarray(values, "<f4", order="C"), allow_pickle=False)
            archive.writestr(zipfile.ZipInfo(f"{name}.npy"), entry.getvalue())
    return out.getvalue()


def check_folder(owner: Path, folder: Path, *, force: bool) -> None:
    """Check that the models may be written to ``folder``, before anything is fetched.

    Raises:
        ConfigError: it is inside the owner's directory, holds other files, or holds models and ``force`` is false.
    """
    ours = _ours(folder)
    check_output(owner, folder, ours=ours, last=LIST_FILE)
    if ours and not force:
        raise ConfigError(
            f"{folder} holds models already, such as {ours[0]}", hint="give another folder, or --force to replace them"
        )


def write_models(run: FinishedRun, owner: Path, folder: Path, *, force: bool = False) -> dict[str, Any]:
    """Write the models of a run, and return the contents of models.json.

    Args:
        run: the models.
        owner: the owner's directory.
        folder: made with mode 0700 if it is missing.
        force: replace the models of an earlier call.

    Raises:
        ConfigError: as `check_folder`, or a file can't be written.
        TaskError: a model does not fit its task or is not finite.
    """
    check_folder(owner, folder, force=force)
    private_directory(folder)
    before = _ours(folder)
    try:
        (folder / LIST_FILE).unlink(missing_ok=True)
    except OSError as error:
        raise write_failed(folder / LIST_FILE, error) from error
    models = [_write(run, model, folder) for model in run.models]
    document = _document(run, models)
    named = set(files_of(models))
    for name in {name for name in before if not name.startswith(".")} - named - {LIST_FILE}:
        (folder / name).unlink(missing_ok=True)
    remove_unfinished(folder)
    write_atomic(folder / LIST_FILE, f"{json.dumps(document, indent=2, allow_nan=False)}\n".encode())
    return document


def files_of(models: list[dict[str, Any]]) -> list[str]:
    """Return the names of the files of models, as models.json lists them."""
    return [model[form]["file"] for model in models for form in FORMS if form in model]


def read_models(folder: Path, bundle: TaskBundle) -> dict[int, Float32Vector]:
    """Return the models in a folder that `write_models` has written, without private parameters: model -> (d,) float32.

    Args:
        folder: with models.json.
        bundle: the task that the models are of.

    Raises:
        ConfigError: the folder holds no complete list of models.
        TaskError: the models are of another task.
        IntegrityError: a file is not the one that is listed.
    """
    path = folder / LIST_FILE
    try:
        document = json.loads(read_private(path))
        entries = {int(e["model"]): (str(e["state"]["file"]), str(e["state"]["sha256"])) for e in document["models"]}
        digest = document["task"]["digest"]
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise ConfigError(f"{path} is no list of models", hint="shoal-fleet models get writes one") from error
    if digest != bundle.digest.hex():
        raise TaskError(f"the models in {folder} are of another task", hint=SAME_TASK_HINT)
    return {model: _read_state(folder, name, sha256, bundle) for model, (name, sha256) in sorted(entries.items())}


def models_of(run: FinishedRun, bundle: TaskBundle) -> dict[int, Float32Vector]:
    """Return the models of a finished run, as `read_models` would after `write_models`.

    Raises:
        TaskError: the models are of another task.
    """
    if run.plan.task_digest != bundle.digest:
        raise TaskError(f"the models of run {run.plan.run} are of another task", hint=SAME_TASK_HINT)
    return {model.model: model.theta[: bundle.manifest.federated_length] for model in run.models}


def read_certified(
    file: Path, bundle: TaskBundle, fleet: FleetDirectory
) -> tuple[RunPlan, int, dict[int, Float32Vector]]:
    """Read what `shoal-edge export --certified` wrote; return the run's plan, the newest state's round, and the models.

    The models are those that `read_models` would return.

    Args:
        file: from a device, which is not trusted: its models count if devices of the roster have signed their digests.
        bundle: the task.
        fleet: the owner's directory, with the signed run.

    Raises:
        ConfigError: the owner has signed no such run, or the file is too large.
        TaskError: the models are of another task.
        UntrustedError: too few devices of the roster have signed its models.
        IntegrityError: the file is damaged, or holds no such models.
    """
    most = limits.MAX_CERTIFICATE_BYTES + MAX_CERTIFIED * (
        limits.SEALED_HEAD_BYTES + 4 * bundle.manifest.federated_length
    )
    newest: dict[int, ModelState] = {}
    plan: RunPlan | None = None
    reason: ShoalError = IntegrityError(f"{file} holds no certified models", hint=CERTIFIED_HINT)
    with named(file, CERTIFIED_HINT):
        data = memoryview(read_limited(file, most))
        states = CERTIFICATE_LENGTH_BYTES + int.from_bytes(data[:CERTIFICATE_LENGTH_BYTES], "little")
        claims = tuple(read_claims(read_certificate(data[CERTIFICATE_LENGTH_BYTES:states]).statements))
        rest = data[states:]
        for _ in range(MAX_CERTIFIED):
            if not rest:
                break
            head, rest = decode_prefix(rest, StateFile)
            values, rest = rest[: 4 * head.length], rest[4 * head.length :]
            if len(values) != 4 * head.length:
                raise WireError("it is cut short")
            plan = plan or _plan_of(head.run_id, fleet, bundle)
            theta = np.frombuffer(values, "<f4").astype(np.float32)
            at = StateId(head.model, head.round)
            state = ModelState.of(at, theta, run_id=plan.run_id, digest_key=head.digest_key)
            members = fleet.roster.only(plan.recipe.only)
            needed = signers_needed(plan.recipe.min_contributors, members.active_count)
            try:
                check_claims(claims, state.held, fleet=plan.fleet, run_id=plan.run_id, roster=members, needed=needed)
            except UntrustedError as error:  # statements name states too that only few devices have signed
                reason = error
                continue
            newest[at.model] = max(state, newest.get(at.model, state), key=lambda s: s.id)
        if rest:
            raise WireError(f"it holds too many states, over {MAX_CERTIFIED}")
        if plan is None or not newest:
            raise reason
        held = RoundModels(0, tuple(Offer(model, state.id) for model, state in sorted(newest.items())))
        thetas = {state.id: state.theta for state in newest.values()}
        found = {m: assembled(plan, held, m, thetas) for m in sorted(newest) if m not in FOR_ALL}
        if not found or not all(len(t) == plan.length and np.isfinite(t).all() for t in found.values()):
            raise IntegrityError(f"{file} does not hold the task's parameters", hint=CERTIFIED_HINT)
    return plan, max(s.id.round for s in newest.values()), found


def _plan_of(run_id: bytes, fleet: FleetDirectory, bundle: TaskBundle) -> RunPlan:
    plan = next((p for p in signed_plans(fleet, lambda _: None, turns=True) if p.run_id == run_id), None)
    if plan is None:
        raise ConfigError("its run is none of the owner's signed runs", hint="take the folder runs from a backup")
    if plan.task_digest != bundle.digest:
        raise TaskError("its models are of another task", hint="give the task that their run was signed with")
    return plan


def _read_state(folder: Path, name: str, sha256: str, bundle: TaskBundle) -> Float32Vector:
    """Return the federated parameters of a model's archive, (d,) float32."""
    path = folder / name
    data = read_private(path) if _OURS.fullmatch(name) else b""
    if hashlib.sha256(data).hexdigest() != sha256:
        raise IntegrityError(f"{path} is not the file that {LIST_FILE} lists", hint="fetch the models again")
    length = bundle.manifest.federated_length
    try:
        with np.load(io.BytesIO(data), allow_pickle=False) as found:
            parts = [np.asarray(found[p.name], np.float32).reshape(-1) for p in bundle.manifest.parameters]
        theta = np.concatenate(parts)[:length]
    except (ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
        raise IntegrityError(f"{path} is damaged", hint="fetch the models again") from error
    if len(theta) != length or not np.isfinite(theta).all():
        raise IntegrityError(f"{path} does not hold the task's parameters", hint="fetch the models again")
    return theta


def _ours(folder: Path) -> tuple[str, ...]:
    try:
        return tuple(sorted(entry.name for entry in folder.iterdir() if _OURS.fullmatch(entry.name)))
    except OSError:
        return ()  # `check_output` reports all but a missing folder


def scale_of(run: FinishedRun, model: int) -> Scale | None:
    """Return the scale by which a model's devices standardised their samples; None if they have none in common.

    Raises:
        IntegrityError: its statistics are not finite.
    """
    data = run.bundle.manifest.data
    if data.standardise != "federated" or model not in run.statistics:
        return None
    return scale_of_state(run.statistics[model], data, run.plan)


def _write(run: FinishedRun, model: FinalModel, folder: Path) -> dict[str, Any]:
    """Write the two files of a model, and return its entry in models.json."""
    scale = scale_of(run, model.model)
    own = run.bundle.manifest.trainer is not None
    form, suffix = ("vector", "npy") if own else ("onnx", "onnx")
    whole, state = folder / f"model-{model.model}.{suffix}", folder / f"model-{model.model}.npz"
    if own:
        vector = io.BytesIO()
        np.lib.format.write_array(vector, np.asarray(model.theta, "<f4"), allow_pickle=False)
        write_atomic(whole, vector.getvalue())
    else:
        export(run.bundle, model.theta, whole, scale)
    write_atomic(state, npz_bytes(state_dict(run.bundle.manifest, model.theta)))
    return {
        "model": model.model,
        form: _described(whole),
        "state": _described(state),
        **_certified(model.own),
        "parents": list(model.parents),
        "devices": None if model.devices is None else list(model.devices),
        "contributors": model.contributors,
        "means": None if scale is None else list(scale.means),
        "deviations": None if scale is None else list(scale.deviations),
    }


def _described(path: Path) -> dict[str, Any]:
    data = read_private(path)
    return {"file": path.name, "bytes": len(data), "sha256": hashlib.sha256(data).hexdigest()}


def _certified(state: OpenedState) -> dict[str, Any]:
    at = state.state.id
    return {
        "made_in": {"model": at.model, "round": at.round},
        "state_digest": state.state.digest.hex(),
        "sealed_by": state.sealed_by,
        "sealed_in": state.sealed_in,
        "certified_by": list(state.certified_by),
    }


def _document(run: FinishedRun, models: list[dict[str, Any]]) -> dict[str, Any]:
    plan, manifest = run.plan, run.bundle.manifest
    return {
        "format": FORMAT,
        "fleet": plan.fleet,
        "run": plan.run,
        "run_id": plan.run_id.hex(),
        "algorithm": plan.recipe.algorithm,
        "mode": plan.recipe.mode,
        "rounds": plan.recipe.rounds,
        "final_round": run.round,
        "key_version": run.key_version,
        "min_contributors": plan.recipe.min_contributors,
        "task": {"name": manifest.name, "kind": manifest.kind, "digest": plan.task_digest.hex()},
        "parameters": [{"name": p.name, "shape": list(p.shape), "segment": p.segment} for p in manifest.parameters],
        "private_coordinates": manifest.private_length,
        "data": {
            "features": list(manifest.data.features),
            "labels": list(manifest.data.labels),
            "standardise": manifest.data.standardise,
        },
        "complete": not run.missing,
        "models": models,
        "shared": None if run.shared is None else _certified(run.shared),
        "missing": [{"model": model, "reason": reason} for model, reason in sorted(run.missing.items())],
    }
