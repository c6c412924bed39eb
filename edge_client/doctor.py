"""`shoal-edge doctor`: the health checks of a device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from edge_client.learning.executor import trial
from edge_client.learning.executor.choice import NUMPY, choose
from edge_client.learning.reading import Reading
from edge_client.membership import REVOKED_HINT, DeviceMembership
from edge_client.storage.pending_upload import PENDING_FILES
from edge_client.storage.state import DeviceState
from shoal.errors import ShoalError, TaskError
from shoal.membership.doctor import local_checks, membership_checks
from shoal.util.console import Check, checked, ok
from shoal.util.files import in_use
from shoal.util.telemetry import import_onnxruntime
from shoal.version import versions

if TYPE_CHECKING:
    from pathlib import Path

    from edge_client.config import EdgeConfig
    from edge_client.learning.data import DataSplits
    from edge_client.models.round_context import Run
    from shoal.task.manifest import TaskManifest


def diagnose(config: EdgeConfig, *, with_data: bool, task: str = "") -> list[Check]:
    """Return the checks of a device; its program may be running.

    Args:
        config: the device's settings.
        with_data: whether its samples are to be checked.
        task: a task's directory or its task.toml, or the name of the followed run's task; empty for that one.
    """
    directory = config.dir
    try:
        member = DeviceMembership(directory)
    except ShoalError as error:
        return [Check("membership", "failure", str(error), error.hint), *local_checks(directory)]
    files = DeviceState(directory)
    return [
        _membership(member),
        *local_checks(directory),
        *membership_checks(member, member.name, config),
        _service(files),
        _clock(files),
        checked("state", lambda: _state(files, member)),
        checked("data", lambda: _data(config.data if with_data else None, files, member, config.reading, task)),
        ok("versions", versions()),
        checked("executor", lambda: _executor(config, files, member)),
    ]


def _membership(member: DeviceMembership) -> Check:
    if not member.listed:
        return Check("membership", "failure", f"{member.name} is not in the fleet any more", REVOKED_HINT)
    return ok("membership", f"{member.name} of fleet {member.fleet}")


def _service(files: DeviceState) -> Check:
    trouble = files.load_trouble()
    if trouble is not None:
        return Check("service", "failure", f"stopped at {trouble['at']}: {trouble['error']}", trouble["hint"])
    if not in_use(files.directory):
        return Check("service", "warning", "not running", "start it: shoal-edge run DIR --data FILE")
    connection = (files.load_status() or {}).get("connection")
    if isinstance(connection, dict) and connection.get("connected") is False:
        lost = f"running, not connected to {connection.get('broker')} since {connection.get('since')}"
        return Check("service", "warning", lost, "start the broker, or mend the network between")
    return ok("service", "running")


def _clock(files: DeviceState) -> Check:
    """Return what the running device has found out about its clock."""
    said = (files.load_status() or {}).get("clock") if in_use(files.directory) else None
    if not isinstance(said, str):
        return ok("clock", "not known to be wrong")
    detail, _, advice = said.partition("; ")
    return Check("clock", "failure", f"this machine's clock is {detail}", advice)


def _state(files: DeviceState, member: DeviceMembership) -> Check:
    """Read the stored upload, run and models.

    Raises:
        IntegrityError: one of them is damaged.
    """
    from edge_client.storage.finished_models import FinishedModels

    if any((files.directory / name).exists() for name in PENDING_FILES):
        files.pending.load()
    run = _run(files, member)
    finished = len(FinishedModels(files.directory).standing().models)
    following = "no run yet" if run is None else f"run {run.plan.run}"
    return ok("state", f"readable: {following}, finished models: {finished}")


def _run(files: DeviceState, member: DeviceMembership) -> Run | None:
    """Return the newest run that the device knows: one that it could not do, or else the one that it follows."""
    from edge_client.run.beginning import stored_run

    package = files.load_refused() or files.load_run()
    return None if package is None else stored_run(package, member)


def _data(source: Path | None, files: DeviceState, member: DeviceMembership, reading: Reading, task: str) -> Check:
    """Try the samples on a task: the one that is named, or that of the run which the device knows.

    Raises:
        DataError: they can't be read, or do not fit the task.
        TaskError: there is no task of that name.
        IntegrityError: the stored run is damaged.
    """
    from edge_client.dry_run import dry_run
    from edge_client.learning.data import files_of, split
    from edge_client.run.jobs import split_seed

    if source is None:
        return Check("data", "warning", "not checked", "give --data FILE as for `shoal-edge run`")
    run = _run(files, member)
    if run is None and not task:
        return ok("data", f"{source}: files: {len(files_of(source))}; no task yet to compare them with (--task)")
    manifest, followed = _manifest(task, run)
    found = dry_run(source, manifest, reading)
    damaged = [f"{found.left_out}; mend or remove them"] if found.left_out.count else []
    doubts = [*damaged, *found.doubts]
    if followed is not None:
        doubts += _doubts_of_model(files, followed, split(found.dataset, split_seed(member)))
    if doubts:
        said, _, hint = doubts[0].rpartition("; ")
        more = f" (and {len(doubts) - 1} more)" if len(doubts) > 1 else ""
        return Check("data", "warning", f"{source}: {said}{more}", hint)
    whose = f"task {manifest.name}" if followed is None else f"task of run {followed.plan.run}"
    return ok("data", f"{source}: {len(found.dataset)} samples, which fit the {whose}")


def _manifest(task: str, run: Run | None) -> tuple[TaskManifest, Run | None]:
    """Return the manifest to compare with, and the run whose task it is; None if it is of a file.

    Raises:
        TaskError: there is neither such a file nor a run of a task of that name.
    """
    from pathlib import Path

    from shoal.task.bundle import read_manifest

    if run is not None and task in ("", run.bundle.manifest.name):
        return run.bundle.manifest, run
    if not Path(task).exists():
        raise TaskError(
            f"there is no task file {task}, and this device follows no run of a task of that name",
            hint="give the task.toml that `shoal-fleet task compile` wrote",
        )
    return read_manifest(Path(task)), None


def _doubts_of_model(files: DeviceState, run: Run, shares: DataSplits) -> list[str]:
    """Return the doubt about the finished model that answers, if it is of the run's task and no better than a guess."""
    from edge_client.learning.data_doubts import model_doubt
    from edge_client.storage.finished_models import FinishedModels

    doubt = model_doubt(FinishedModels(files.directory).standing().answers, run.plan.task_digest, shares.validation.y)
    return [doubt] if doubt else []


def _executor(config: EdgeConfig, files: DeviceState, member: DeviceMembership) -> Check:
    """Try the executor that `shoal-edge run` would take: ONNX Runtime in a child process, numpy with the run's graphs.

    For a task that names a trainer it is own training code, which begins and is compared with the task.

    Raises:
        TrainerError: the task needs a trainer, and this device has none or another, or it fails.
        ConfigError: the setting is not valid, or asks for an executor that is not installed.
        TaskError: numpy lacks an operator of the run's task.
        IntegrityError: the stored run is damaged.
    """
    run = _run(files, member)
    if run is not None and run.bundle.manifest.trainer is not None:
        from edge_client.learning.trainer.model import TrainerModel

        TrainerModel(run.bundle, config.own_trainer).begin()
        return ok("executor", f"{config.trainer}, which is the trainer that the task of run {run.plan.run} names")
    if choose(config.executor) == NUMPY:
        return _numpy(run)
    # In a child first: on a processor that it does not support, loading it would end this program.
    fault = trial.failure()
    if fault:
        return Check("executor", "failure", fault, trial.HINT)
    return ok("executor", f"ONNX Runtime {import_onnxruntime().__version__}")


def _numpy(run: Run | None) -> Check:
    import numpy as np

    from edge_client.learning.model import NumpyModel

    if run is None:
        return ok("executor", f"numpy {np.__version__}, for tasks without convolutions; no task yet to try it on")
    NumpyModel(run.bundle)
    return ok("executor", f"numpy {np.__version__}, which has all operators of the task of run {run.plan.run}")
