"""A device's status, finished models and figures, as `shoal-edge` prints them: one document, and the same as lines of text."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any, Final

from crypto.seal.identity import fingerprint
from edge_client.membership import DeviceMembership
from edge_client.reporting import SILENT_S
from edge_client.storage.finished_models import FinishedModels
from edge_client.storage.state import ON_MODEL_FILE, DeviceState, load_json
from shoal.address import in_words
from shoal.errors import ConfigError, IntegrityError, NotReadyError, reason_of
from shoal.limits import LOW_DISK_BYTES
from shoal.membership.roster import expiry_of
from shoal.util.console import counted, second
from shoal.util.files import free_bytes, in_use

MOST_SHOWN: Final = 12
"""Most classes for which `evaluate` prints a table; `--json` has it for more."""
LABELS: Final = {
    "rounds": "rounds taken part in",
    "round": "last round taken part in",
    "certificate_days": "days left of the broker's certificate",
}
"""Labels of the figures whose names are not clear enough."""


def status(directory: Path, *, check: bool) -> dict[str, Any]:
    """Return whether the device in ``directory`` is running and connected, its stage and its figures.

    Raises:
        NotReadyError: ``check`` is set, and the program does not run, is not connected or has shown no life for SILENT_S.
    """
    member, files = DeviceMembership(directory), DeviceState(directory)
    figures = files.load_status() or {}
    liveness = _liveness(files, figures, in_words(member.broker))
    if check:
        _require_health(liveness, files.alive_at_s())
    return {
        "device": member.name,
        "fleet": member.fleet,
        "fingerprint": fingerprint(member.identity.member),
        "roster": member.roster.sequence,
        "disk_free_bytes": free_bytes(files.directory),
        **liveness,
        **figures,
        **_personal(directory),
        **({"on_model": told} if (told := load_json(directory / ON_MODEL_FILE)) else {}),
        **({"roster_expired": expiry_of(member.roster)} if member.expired else {}),
        **_disk_error(files),
        **({} if member.listed else {"stage": "revoked"}),
    }


def _liveness(files: DeviceState, figures: dict[str, Any], broker: str) -> dict[str, Any]:
    """Return whether the device's program runs and is connected, and take the connection out of the figures.

    A killed program leaves its status file: without a running program its stage is ``stopped``, whatever the file says.
    """
    running, alive_at_s = in_use(files.directory), files.alive_at_s()
    found = figures.pop("connection", None)
    connection = found if isinstance(found, dict) else {}
    since = connection.get("since") if running else None if alive_at_s is None else second(alive_at_s)
    if not running:
        figures.pop("clock", None)
        figures.pop("order", None)
    if not running and "stage" in figures:
        figures["last_stage"], figures["stage"] = figures["stage"], "stopped"
    lost = {"disconnected_because": connection["reason"]} if running and connection.get("reason") else {}
    expires_at_s = connection.get("certificate_expires_at_s")
    days = {"certificate_days": (expires_at_s - int(time.time())) // 86400} if isinstance(expires_at_s, int) else {}
    return {
        "running": running,
        "connected": running and connection.get("connected") is True,
        "broker": connection.get("broker") or broker,
        "since": since,
        **lost,
        **days,
    }


def _require_health(liveness: dict[str, Any], alive_at_s: int | None) -> None:
    """Check a device's liveness, as `_liveness` returns it; raises as `status`."""
    if not liveness["running"]:
        raise NotReadyError("the device's program does not run", hint="shoal-edge run DIRECTORY --data SOURCE")
    if not liveness["connected"]:
        reason = liveness.get("disconnected_because", "it has not answered yet")
        raise NotReadyError(f"not connected to {liveness['broker']}: {reason}", hint="shoal-edge doctor DIRECTORY")
    if alive_at_s is not None and time.time() - alive_at_s > SILENT_S:
        raise NotReadyError(
            f"no sign of life since {second(alive_at_s)}", hint="a suspended program or a full disk: read its log"
        )


def _personal(directory: Path) -> dict[str, Any]:
    """Return the device's choice after the run whose model answers; an empty dict before the first."""
    store = FinishedModels(directory)
    try:
        model = store.standing().answers
        found = None if model is None else store.personal(model)
    except (ConfigError, IntegrityError) as error:
        return {"personal": {"error": reason_of(error), "hint": error.hint}}
    if model is None or found is None:
        return {}
    return {"personal": {"run": model.run, **found[0].document()}}


def _disk_error(files: DeviceState) -> dict[str, str]:
    """Return the error if the disk is full or has failed, since the status file can't be written then; else an empty dict."""
    trouble = files.load_trouble()
    if trouble is not None:
        return {"stage": "stopped", "stopped_at": trouble["at"], "error": trouble["error"], "hint": trouble["hint"]}
    free = free_bytes(files.directory)
    if free >= LOW_DISK_BYTES:
        return {}
    return {
        "error": f"the disk is full: {free} bytes are free in {files.directory}",
        "hint": "free some space, then start the device again",
    }


def status_lines(data: dict[str, Any]) -> list[str]:
    """Return a status as text: one line for each figure, and one for each run that has ended."""
    return [line for name, value in data.items() for line in _lines(name, value, data)]


def _lines(name: str, value: Any, data: dict[str, Any]) -> list[str]:
    """Return one figure of a status as text."""
    match name, value:
        case "running", _:
            return [_liveness_line(data)]
        case "connected" | "broker" | "since", _:
            return []
        case "order", _:
            return [str(value)]
        case "session", dict():
            return [f"waits for: {_readable(waits)}"] if (waits := value.get("waits_for")) else []
        case "personal", dict():
            return [f"personal model: {personal_line(value)}"]
        case "on_model", dict():
            how = f"failed: {value['error']}; hint: {value.get('hint')}" if value.get("error") else "has run"
            return [f"program for new models, run {value.get('run')} at {value.get('at')}: {how}"]
        case "refused", dict():
            hint = [f"  hint: {value['hint']}"] if value.get("hint") else []
            return [f"can't do run {value.get('run')}: {value.get('reason')}", *hint]
        case "left_out", dict():
            return [f"warning: {value.get('words')}"]
        case "warnings", list():
            return [f"warning: {doubt}" for doubt in value]
        case "ended", dict():
            return [f"ended run {run}: {_ended(figures)}" for run, figures in value.items()]
    return [f"{_label(name)}: {_readable(value)}"]


def _ended(figures: Any) -> str:
    """Return the figures of a run that has ended."""
    pairs = figures.items() if isinstance(figures, dict) else ()
    return ", ".join(f"{_label(k)} {_readable(v)}" for k, v in pairs if k not in ("run", "finished", "warnings"))


def _liveness_line(data: dict[str, Any]) -> str:
    """Return whether the device's program runs and is connected as a line of text."""
    since = f" since {data['since']}" if data["since"] else ""
    if not data["running"]:
        return f"not running{since}"
    return f"running, {'' if data['connected'] else 'not '}connected to {data['broker']}{since}"


def personal_line(personal: dict[str, Any]) -> str:
    """Return a device's choice as a line of text."""
    if "error" in personal:
        return f"{personal['error']} ({personal['hint']})"
    by_hand = ", as asked" if personal["by_hand"] else ""
    losses = [f"{choice_name(n)} {_readable(v)}" for n, v in personal["losses"].items()]
    how = f", cross-validated in {personal['folds']} parts" if personal["folds"] else " of the validation share"
    return (
        f"{choice_name(personal['choice'])} of run {personal['run']}{by_hand}; losses on "
        f"{counted(personal['samples'], 'sample')}{how}: {', '.join(losses)}; took {personal['took_s']:.3g} s"
    )


def choice_name(choice: str) -> str:
    """Return the name of a candidate for people."""
    if choice.isdecimal():
        return f"{counted(int(choice), 'local epoch')} on top"
    return {"cluster": "the cluster's model", "alone": "trained alone"}.get(choice, choice.replace("-", " "))


def _label(name: str) -> str:
    """Return the label of a figure, given its name in the JSON."""
    return LABELS.get(name, name.replace("_", " "))


def _readable(value: Any) -> str:
    if isinstance(value, list):
        return " ".join(map(_readable, value))
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def model_line(model: dict[str, Any]) -> str:
    """Return a finished model as a line of text."""
    figures = [(name, model[f"validation_{name}"]) for name in ("accuracy", "loss")]
    fit = [f"{name} {value:.4g}" for name, value in figures if value is not None]
    samples = counted(model["validation_samples"], "sample")
    parts = [
        f"run {model['run']}",
        f"finished {model['finished_at']}",
        f"{model['algorithm']}, cluster {model['cluster']}",
        f"validation {', '.join([*fit, samples])}",
    ]
    if model["answers"]:
        by = "chosen by the owner" if model["chosen_by_owner"] else "pinned by rollback"
        parts.append(f"answers, {by}" if model["pinned"] else "answers")
    return "; ".join(parts)


def evaluation_lines(document: dict[str, Any]) -> list[str]:
    """Return the figures of `evaluate` as text; a table of confusion for up to MOST_SHOWN classes."""
    samples = counted(document["samples"], "sample")
    if "accuracy" not in document:
        mean = document["mean_label"]
        return [
            f"mean squared error {document['mean_squared_error']:.4g} on {samples}; of the mean label "
            f"{mean['mean_squared_error']:.4g}",
            f"mean absolute error {document['mean_absolute_error']:.4g}; of the mean label {mean['mean_absolute_error']:.4g}",
        ]
    majority = document["majority"]
    lines = [
        f"accuracy {document['accuracy']:.1%} on {samples}; the most common label, {majority['label']}, alone "
        f"{majority['accuracy']:.1%}"
    ]
    table = document["confusion"]
    if table is None or len(table) > MOST_SHOWN:
        return lines
    names = document["labels"] or [str(i) for i in range(len(table))]
    width = max(map(len, [*names, *(str(n) for row in table for n in row)]))
    lines.append(" ".join(["true \\ predicted".ljust(max(width, 16)), *(name.rjust(width) for name in names)]))
    for name, row in zip(names, table, strict=True):
        lines.append(" ".join([name.ljust(max(width, 16)), *(str(n).rjust(width) for n in row)]))
    return lines
