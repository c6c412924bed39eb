"""The trained models of finished runs: `shoal-fleet models list`, `models get` and `models rollback`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.errors import NotReadyError, UsageError
from shoal.owner.cli.pairs import Directory
from shoal.owner.cli.runs import answer
from shoal.owner.keys.settings import settings_of
from shoal.owner.keys.unlock import open_fleet
from shoal.protocol.requests import RequestAction
from shoal.util.console import counted, note, say_result
from shoal.util.options import AsJson

if TYPE_CHECKING:
    from shoal.owner.models.reader import ModelReader
    from shoal.protocol.documents import RunPlan

app = typer.Typer(help="List, fetch and choose the trained models of finished runs.", no_args_is_help=True)


@app.command("list")
def list_(
    directory: Directory,
    json: AsJson = False,
) -> None:
    """List the signed runs, and the models of the one that the broker holds.

    The broker holds the models of a finished run until the next run begins.
    """
    from shoal.owner.keys.run_list import signed_plans
    from shoal.owner.models.reader import read_models

    fleet = open_fleet(directory)
    reader = read_models(fleet, settings_of(directory).silence, note, run=None)
    try:
        reader.last_round()
    except NotReadyError as error:
        note(str(error))
    _note_histories(reader)
    plans = signed_plans(fleet, lambda _complaint: None, turns=True)
    told = [(plan.turn, _run(plan, reader)) for plan in plans]
    # Of a standing order the first run, and the one whose models are there.
    runs = [run for turn, run in told if not turn or run["state"] != "absent"]
    answering = _answering(reader)
    if not runs:
        note("no run is signed yet")
    say_result(
        {"runs": runs, "histories": reader.histories(), "answering": answering},
        *(line for run in runs for line in _lines(run)),
        *(
            f"{counted(len(devices), 'online device')} with "
            f"{'no finished model yet' if number == '0' else f'the model of run {number}'}"
            for number, devices in answering.items()
        ),
        as_json=json,
    )


def _lines(run: dict[str, Any]) -> list[str]:
    head = (
        f"run {run['run']}: {run['algorithm']}, {counted(run['rounds'], 'round')}; {_WORDS[run['state']].format(**run)}"
    )
    models = [
        f"  model {model['model']}: state of round {model['round']}{'' if model['sealed'] else ', not certified'}"
        for model in run["models"]
    ]
    return [head, *models]


def _answering(reader: ModelReader) -> dict[str, list[str]]:
    """Return run -> the online devices that answer with its finished model, the newest run first; "0" for none yet."""
    found: dict[int, list[str]] = {}
    for device, run in sorted(reader.answers.items()):
        found.setdefault(run, []).append(device)
    return {str(run): found[run] for run in sorted(found, reverse=True)}


def _note_histories(reader: ModelReader) -> None:
    for line in reader.histories():
        note(f"warning: {line}; the aggregator was restored from a backup or cheats, or a device lies")


_WORDS = {
    "ready": "models at the broker",
    "running": "in round {round}",
    "waiting": "finishing: its models are not certified yet",
    "absent": "not at the broker",
}


def _run(plan: RunPlan, reader: ModelReader) -> dict[str, Any]:
    """Return the fields of a run; its models are those that the broker holds."""
    from shoal.protocol.messages import FOR_ALL

    data = {
        "run": plan.run,
        "run_id": plan.run_id.hex(),
        "algorithm": plan.recipe.algorithm,
        "rounds": plan.recipe.rounds,
    }
    last = reader.last
    if last is None or last.plan.run_id != plan.run_id:
        return {**data, "state": "absent", "round": None, "models": []}
    at = last.announcement.round
    try:
        sealed = set(last.wanted())
    except NotReadyError:
        return {**data, "state": "waiting" if last.announcement.finished else "running", "round": at, "models": []}
    offers = [offer for offer in last.held.offers if offer.model not in FOR_ALL]
    models = [{"model": o.model, "round": o.at.round, "sealed": o.at in sealed} for o in offers]
    return {**data, "state": "ready", "round": at, "models": models}


@app.command()
def get(
    directory: Directory,
    out: Annotated[Path, typer.Option(help="Folder to write to.", file_okay=False)],
    run: Annotated[
        int | None, typer.Argument(help="Number of the run; default: the one that the broker holds.", min=1)
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the models in the folder.")] = False,
    json: AsJson = False,
) -> None:
    """Fetch the models of a finished run: each as an ONNX file and as parameters by name (.npz), listed in models.json.

    Devices have sealed the models in the final round, and at least --min-contributors devices have signed each.
    """
    from edge_client.learning.statistics import scale_doubt
    from shoal.owner.models.files import LIST_FILE, check_folder, files_of, scale_of, write_models
    from shoal.owner.models.reader import read_models

    fleet = open_fleet(directory)
    check_folder(fleet.path, out, force=force)
    reader = read_models(fleet, settings_of(directory).silence, note, run or 0)
    _note_histories(reader)
    found = reader.finished_run()
    written = write_models(found, fleet.path, out, force=force)
    # Key versions never go back, so no run will need an older one.
    fleet.forget_versions_before(found.key_version)
    for doubt in reader.doubts():
        note(f"warning: {doubt}")
    for model, reason in sorted(found.missing.items()):
        note(f"warning: model {model} is missing: {reason}")
    for doubt in sorted({scale_doubt(scale_of(found, model.model)) for model in found.models} - {""}):
        note(f"warning: {doubt}")
    if private := written["private_coordinates"]:
        names = ", ".join(p["name"] for p in written["parameters"] if p["segment"] == "private")
        note(
            f"{counted(private, 'private coordinate')} ({names}) have the task's initial values: each device has its own"
        )
    files = (*files_of(written["models"]), LIST_FILE)
    say_result({"folder": str(out), **written}, *(str(out / file) for file in files), as_json=json)


@app.command()
def rollback(
    directory: Directory,
    run: Annotated[int | None, typer.Argument(help="Number of the run whose models are to answer.", min=1)] = None,
    newest: Annotated[
        bool, typer.Option("--newest", help="End a rollback: each device follows its own rule again.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Let all devices answer with the finished model of an earlier run, until a later run finishes.

    No model is sent: a device stores the last three runs' models, and takes the one that you name. A device that is off takes it
    when it connects; one that has no model of that run keeps its own. A run that is under way goes on. `models list` shows which
    run's model each online device answers with. `run start --from FOLDER` begins a new run with models that you have fetched.
    """
    from shoal.owner.console.asking import sign_choice

    if (run is None) is not newest:
        raise UsageError("give the number of a run, or --newest", hint="shoal-fleet models list shows the runs")
    fleet = open_fleet(directory)
    signed = sign_choice(fleet, run or 0, note)
    known = answer(fleet, RequestAction.CHOOSE, package=signed).runs
    rule = (
        "follow their own rule again" if newest else f"answer with the model of run {run}, until a later run finishes"
    )
    say_result(
        {"run": run, "newest": newest, "finished": known[0].phase == "finished" if known else None},
        f"the aggregator tells all devices to {rule}",
        as_json=json,
    )
    note("devices that are off take it when they connect: shoal-fleet models list shows the effect")
    if not newest:
        note(f"devices store the models of their last three runs: one without a model of run {run} keeps its own")
