"""The trained models of finished runs: `shoal-fleet models list` and `models get`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.owner.cli.options import AsJson, Ca, Cert, Directory, Key
from shoal.util.console import counted, note, say, say_json

if TYPE_CHECKING:
    from shoal.owner.models.reader import ModelReader
    from shoal.protocol.documents import RunPlan

app = typer.Typer(help="List and fetch the trained models of a finished run.", no_args_is_help=True)

Wait = Annotated[float, typer.Option(help="Seconds to wait for the broker's next message.", min=0.1, max=3600)]


@app.command("list")
def list_(
    directory: Directory,
    wait: Wait = 3.0,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    json: AsJson = False,
) -> None:
    """List the signed runs, and the models of the one that the broker holds.

    The broker holds the models of a finished run until the next run begins.
    """
    from shoal.errors import NotReadyError
    from shoal.owner.broker.address import Tls
    from shoal.owner.keys.run_list import signed_plans
    from shoal.owner.keys.unlock import open_fleet
    from shoal.owner.models.connection import read_models

    fleet = open_fleet(directory)
    reader = read_models(fleet, Tls(ca, cert, key), wait, note, run=None)
    try:
        reader.last_round()
    except NotReadyError as error:
        note(str(error))
    _note_histories(reader)
    runs = [_run(plan, reader) for plan in signed_plans(fleet, lambda _complaint: None)]
    if json:
        say_json({"runs": runs, "histories": reader.histories()})
        return
    if not runs:
        note("no run is signed yet")
    for run in runs:
        say(
            f"run {run['run']}: {run['algorithm']}, {counted(run['rounds'], 'round')}; {_WORDS[run['state']].format(**run)}"
        )
        for model in run["models"]:
            say(
                f"  model {model['model']}: state of round {model['round']}{'' if model['sealed'] else ', not certified'}"
            )


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
    from shoal.errors import NotReadyError
    from shoal.protocol.messages import FOR_ALL

    data = {"run": plan.run, "run_id": plan.run_id.hex(), "algorithm": plan.algorithm, "rounds": plan.rounds}
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
    wait: Wait = 10.0,
    ca: Ca = None,
    cert: Cert = None,
    key: Key = None,
    json: AsJson = False,
) -> None:
    """Fetch the models of a finished run: each as an ONNX file and as parameters by name (.npz), listed in models.json.

    Devices have sealed the models in the final round, and at least --min-contributors devices have signed each.
    """
    from shoal.owner.broker.address import Tls
    from shoal.owner.keys.unlock import open_fleet
    from shoal.owner.models.connection import read_models
    from shoal.owner.models.files import LIST_FILE, check_folder, write_models

    fleet = open_fleet(directory)
    check_folder(fleet.path, out, force=force)
    reader = read_models(fleet, Tls(ca, cert, key), wait, note, run or 0)
    _note_histories(reader)
    found = reader.finished_run()
    written = write_models(found, fleet.path, out, force=force)
    # Key versions never go back, so no run will need an older one.
    fleet.forget_versions_before(found.key_version)
    for model, reason in sorted(found.missing.items()):
        note(f"warning: model {model} is missing: {reason}")
    if private := written["private_coordinates"]:
        names = ", ".join(p["name"] for p in written["parameters"] if p["segment"] == "private")
        note(
            f"{counted(private, 'private coordinate')} ({names}) have the task's initial values: each device has its own"
        )
    if json:
        say_json({"folder": str(out), **written})
        return
    for model in written["models"]:
        say(str(out / model["onnx"]["file"]))
        say(str(out / model["state"]["file"]))
    say(str(out / LIST_FILE))
