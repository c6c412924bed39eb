"""`shoal-fleet`: the owner's program for keys, roster, tasks and runs."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal.errors import DataError, UsageError
from shoal.membership.grants import KEEPER_ROLE, WORKER_ROLE
from shoal.owner.cli import enrolment as admission_cli
from shoal.owner.cli import models as models_cli
from shoal.owner.cli import runs as runs_cli
from shoal.owner.cli import schedules as schedules_cli
from shoal.owner.cli import status as status_cli
from shoal.owner.cli import upkeep as upkeep_cli
from shoal.owner.cli.pairs import Directory, broker_users, data_words, pairs, private_words, whole
from shoal.owner.keys.unlock import ask, open_fleet
from shoal.owner.keys.vault import ROSTER_FILE, is_under_passphrase
from shoal.util.console import add_version, day, note, run_program, say, say_json, say_result, second, working
from shoal.util.options import AsJson, new_app

if TYPE_CHECKING:
    from shoal.owner.keys.directory import FleetDirectory

app = new_app(
    "Own a fleet: its keys, its roster, its tasks and its runs. Keep this machine's directory off the server.",
    epilog="How commands reach the broker is set once: in settings.toml in the owner's directory, or in the environment.",
)
task_app = typer.Typer(help="Compile models into tasks that devices train without torch.", no_args_is_help=True)
app.add_typer(task_app, name="task")
app.add_typer(models_cli.app, name="models")
app.add_typer(runs_cli.app, name="run")
app.add_typer(schedules_cli.app, name="schedule")

CardFile = Annotated[Path, typer.Argument(help="The card that init printed.", exists=True, dir_okay=False)]
Expected = Annotated[str, typer.Option(help="Refuse the card unless it has this fingerprint.")]


@app.command()
def init(
    directory: Directory,
    name: Annotated[str, typer.Option(help="The fleet's name: a-z, 0-9 and '-'.")],
    broker: Annotated[str, typer.Option(help="mqtt://host:port or mqtts://host:port.")],
    passphrase: Annotated[
        bool,
        typer.Option(
            "--passphrase",
            help="Encrypt owner key and secrets under a passphrase (Argon2id), asked for at the terminal or read from the "
            "private file that SHOAL_PASSPHRASE_FILE names.",
        ),
    ] = False,
    json: AsJson = False,
) -> None:
    """Make a fleet: the owner's key, the fleet's secrets, an empty roster."""
    from shoal.owner.keys.directory import FleetDirectory

    fleet = FleetDirectory.create(directory, name, broker, ask(twice=True) if passphrase else None)
    say_result(
        {"fleet": fleet.name, "owner": fleet.fingerprint, "broker": fleet.broker},
        f"owner {fleet.fingerprint}",
        as_json=json,
    )
    note("next: shoal-aggregator init DIR on the server, then shoal-fleet add-aggregator")


@app.command()
def show(directory: Directory, json: AsJson = False) -> None:
    """Print the owner's fingerprint, the roster with its expiry and members, the keepers, and each run with its mask mode."""
    from crypto.seal.identity import fingerprint
    from shoal.owner.keys.run_list import signed_plans, summary, summary_line

    fleet = open_fleet(directory)
    roster = fleet.roster
    runs = [summary(plan) for plan in signed_plans(fleet, note)]
    data = {
        "fleet": fleet.name,
        "owner": fleet.fingerprint,
        "broker": fleet.broker,
        "roster": roster.sequence,
        "expires": day(roster.expires_at_s),
        "expires_at": second(roster.expires_at_s),
        "expires_at_s": roster.expires_at_s,
        "aggregator": fingerprint(roster.aggregator) if roster.aggregator else None,
        "passphrase": is_under_passphrase(directory),
        "devices": admission_cli.listed_devices(roster),
        "runs": runs,
    }
    ends = "expired" if time.time() > roster.expires_at_s else "expires"
    devices = [
        f"{d.name} {fingerprint(d)}{' revoked' if d.name in roster.revoked else ''} {roster.labels_of(d.name)}".rstrip()
        for d in roster.devices
    ]
    say_result(
        data,
        f"fleet {data['fleet']}, roster {data['roster']}, {ends} {data['expires']}",
        f"owner {data['owner']}",
        f"aggregator {data['aggregator'] or '-'}",
        *devices,
        *(f"keeper {keeper.name} {fingerprint(keeper)}" for keeper in fleet.keepers),
        *map(summary_line, runs),
        as_json=json,
    )


@app.command("add-device")
def add_device(directory: Directory, card: CardFile, fingerprint: Expected = "", json: AsJson = False) -> None:
    """Add a device; prints the grant to carry back to it."""
    fleet = open_fleet(directory)
    keys_since = fleet.roster.keys_since
    grant = fleet.add_device(card.read_bytes(), fingerprint)
    _say_grant(grant, fleet, as_json=json)
    note(f"owner {fleet.fingerprint}")
    note(f"next: shoal-edge join DIR GRANT --owner {fleet.fingerprint}")
    if fleet.roster.keys_since > keys_since:
        drawn = admission_cli.drawn_for(fleet, 1)
        note(f"{drawn}: shoal-fleet publish {directory}, or carry roster.signed and grants/ to them")
    else:
        note(
            f"next: shoal-fleet publish {directory}, or hand {directory / 'roster.signed'} to the aggregator, into its directory"
        )
    broker_users(fleet, f"accepts {grant.stem}, unless --device named it before", published=False)


def _say_grant(grant: Path, fleet: FleetDirectory, *, as_json: bool) -> None:
    say_result(
        {"name": grant.stem, "grant": str(grant), "owner": fleet.fingerprint, "roster": fleet.roster.sequence},
        str(grant),
        as_json=as_json,
    )


@app.command("add-aggregator")
def add_aggregator(directory: Directory, card: CardFile, fingerprint: Expected = "", json: AsJson = False) -> None:
    """Name the aggregator; prints the grant to carry back to it, which contains no secret of a mask."""
    fleet = open_fleet(directory)
    _say_grant(fleet.add_aggregator(card.read_bytes(), fingerprint), fleet, as_json=json)
    note(f"next: shoal-aggregator join DIR GRANT --owner {fleet.fingerprint}")


@app.command("add-worker")
def add_worker(directory: Directory, card: CardFile, fingerprint: Expected = "", json: AsJson = False) -> None:
    """Add a worker of the aggregator; later runs are signed for all workers, of which there are none or at least two."""
    fleet = open_fleet(directory)
    _say_grant(fleet.add_helper(WORKER_ROLE, card.read_bytes(), fingerprint), fleet, as_json=json)
    note(
        f"next: shoal-aggregator shard join DIR GRANT --owner {fleet.fingerprint}; workers so far: {len(fleet.workers)}"
    )
    broker_users(fleet, "takes the worker", published=False)


@app.command("remove-worker")
def remove_worker(
    directory: Directory, name: Annotated[str, typer.Argument(help="The worker's name.")], json: AsJson = False
) -> None:
    """Leave a worker out of the runs that are signed from now on."""
    fleet = open_fleet(directory)
    fleet.remove_helper(WORKER_ROLE, name)
    say_result(
        {"workers": [worker.name for worker in fleet.workers]},
        f"workers left: {', '.join(worker.name for worker in fleet.workers) or 'none'}",
        as_json=json,
    )


@app.command("add-keeper")
def add_keeper(directory: Directory, card: CardFile, fingerprint: Expected = "", json: AsJson = False) -> None:
    """Add a keeper, which opens sums of updates and no single one, in runs that name it: run start --keeper NAME."""
    fleet = open_fleet(directory)
    _say_grant(fleet.add_helper(KEEPER_ROLE, card.read_bytes(), fingerprint), fleet, as_json=json)
    note(f"next: shoal-keeper join DIR GRANT --owner {fleet.fingerprint}")
    broker_users(fleet, "takes the keeper", published=False)


@app.command("remove-keeper")
def remove_keeper(
    directory: Directory, name: Annotated[str, typer.Argument(help="The keeper's name.")], json: AsJson = False
) -> None:
    """Forget a keeper; a run that names it ends with `run stop`, and devices keep their newest models."""
    fleet = open_fleet(directory)
    fleet.remove_helper(KEEPER_ROLE, name)
    left = [keeper.name for keeper in fleet.keepers]
    say_result({"keepers": left}, f"keepers left: {', '.join(left) or 'none'}", as_json=json)


@app.command()
def renew(directory: Directory, json: AsJson = False) -> None:
    """Sign the roster for another year."""
    fleet = open_fleet(directory)
    fleet.renew()
    path, roster = directory / ROSTER_FILE, fleet.roster
    say_result(
        {"file": str(path), "roster": roster.sequence, "expires_at": second(roster.expires_at_s)},
        str(path),
        as_json=json,
    )
    note(f"next: shoal-fleet publish {directory}, or hand this file to the aggregator, into its directory")


@task_app.command("compile")
def compile_(
    directory: Directory,
    source: Annotated[
        str,
        typer.Argument(
            help="linear, logistic, mlp, cnn, lstm, or file.py:function. With --trainer: an .npz of initial values, or a folder."
        ),
    ],
    out: Annotated[Path, typer.Option(help="Directory to write the signed task to.")],
    option: Annotated[list[str] | None, typer.Option(help="Size of a built-in, NAME=NUMBER; repeatable.")] = None,
    shared: Annotated[list[str] | None, typer.Option(help="Prefix of parameters that all clusters share.")] = None,
    private: Annotated[
        list[str] | None,
        typer.Option(
            help="Prefix of parameters that never leave a device: each trains its own, from the model's initial values; "
            "repeatable."
        ),
    ] = None,
    name: Annotated[str, typer.Option(help="The task's name; default: the source's.")] = "",
    features: Annotated[
        str,
        typer.Option(
            metavar="FILE|NAMES",
            help="Names of the columns of a sample, in order: with commas between, or a file with a line NAME or "
            "NAME,LOW,HIGH for each.",
        ),
    ] = "",
    label: Annotated[str, typer.Option(help="Name of the label column.")] = "",
    labels: Annotated[
        str, typer.Option(metavar="NAMES", help="Names of the classes, in order, with commas between.")
    ] = "",
    standardise: Annotated[
        str,
        typer.Option(
            help="off; local: each device with its own means and deviations; federated: with the fleet's, which needs bounds.",
            show_default="federated for features with bounds, local for features without, else off",
        ),
    ] = "",
    missing: Annotated[
        str, typer.Option(help="error; mean: a missing value is the feature's mean, if the task standardises.")
    ] = "error",
    target: Annotated[
        str,
        typer.Option(
            metavar="LOW,HIGH",
            help="Range of the numbers that a regression predicts: it trains in this unit, and answers in the data's.",
        ),
    ] = "",
    trainer: Annotated[
        str,
        typer.Option(metavar="NAME:VERSION", help="Devices train with code of their own, of this name and version."),
    ] = "",
    sample: Annotated[
        str,
        typer.Option(
            metavar="SHAPE",
            help="With --trainer: shape of a sample, such as 3x32x32; with :LIMIT of whole numbers below it.",
            show_default="one number for each feature",
        ),
    ] = "",
    answer: Annotated[
        str,
        typer.Option(
            metavar="SHAPE", help="With --trainer: shape of a label.", show_default="one class or one number a sample"
        ),
    ] = "",
    json: AsJson = False,
) -> None:
    """Compile a torch model and its loss to ONNX, check it against torch, and sign it.

    A built-in gets as many inputs as --features names and as many classes as --labels does. With --trainer nothing is compiled:
    the task names training code that devices have already; --option classes=NUMBER, or --labels, makes it a classification.
    """
    from shoal.owner.keys.outputs import check_output
    from shoal.owner.task_compiler.features import declare
    from shoal.owner.task_compiler.signed import SIGNATURE_FILE, TASK_FILES, Source, write_signed
    from shoal.task.data_declaration import NO_DECLARATION

    fleet = open_fleet(directory)
    check_output(fleet.path, out, ours=TASK_FILES, last=SIGNATURE_FILE)
    options = {k: whole(v, k) for k, v in pairs(option or []).items()}
    if (sample or answer) and not trainer:
        raise UsageError("--sample and --answer describe the data of a --trainer", hint="leave them away")
    if options and ":" in source:
        raise UsageError(
            f"--option is for built-ins, and {source} is not one", hint="write the sizes into the function"
        )
    data = declare(
        features=features, label=label, labels=labels, standardise=standardise, missing=missing, target=target
    )
    called = name or Path(source.split(":")[0]).stem.lower().replace("_", "-")
    if trainer:
        from shoal.owner.task_compiler.external import external_task

        if options.keys() - {"classes"}:
            raise UsageError("--option with --trainer takes classes=NUMBER alone", hint="give --sample SHAPE")
        bundle, origins = external_task(
            Path(source),
            trainer,
            name=called,
            sample=sample,
            answer=answer,
            classes=options.get("classes", 0),
            shared=shared or (),
            private=private or (),
            data=data,
        )
        write_signed(bundle, Source(trainer, {}), fleet.owner, out, origins.astype("<f4").tobytes())
        words = f"devices train it with {trainer}; starting models: {len(origins)}"
    else:
        from shoal.owner.task_compiler.builtin import build, load_user, sizes_of
        from shoal.owner.task_compiler.compile import compile_task
        from shoal.owner.task_compiler.layers import untrained_statistics
        from shoal.owner.task_compiler.selfcheck import lite_words

        if ":" not in source:
            options = {**sizes_of(source, data), **options}
        with working("compiling the task with torch"):
            made = load_user(source) if ":" in source else build(source, **options)
            bundle = compile_task(
                made.model,
                made.loss,
                made.example,
                name=called,
                kind=made.kind,
                hyper=made.hyper,
                shared=shared or (),
                private=private or (),
                data=data,
            )
        write_signed(bundle, Source(source, options), fleet.owner, out)
        if doubt := untrained_statistics(made.model):
            note(doubt)
        words = lite_words(bundle)
    graphs = sum(map(len, (bundle.score, bundle.grad, bundle.predict)))
    say_result(
        {
            "task": str(out),
            "digest": bundle.digest.hex(),
            "coordinates": bundle.length,
            "private_coordinates": bundle.manifest.private_length,
            "graph_bytes": graphs,
            "lite": words,
            "standardise": data.standardise,
            "target": list(data.target),
        },
        f"{out}: {bundle.length} coordinates, {graphs} bytes of graphs",
        words,
        *([private_words(bundle.manifest)] if bundle.private else []),
        *([data_words(data)] if data != NO_DECLARATION else []),
        as_json=json,
    )


@task_app.command()
def check(
    task: Annotated[Path, typer.Argument(help="A task that `task compile` wrote, or its task.toml.")],
    data: Annotated[
        list[Path], typer.Argument(help="Data of devices: files and folders, as for `shoal-edge run --data`.")
    ],
    label: Annotated[str, typer.Option(help="Name of the label column.", show_default="the task's")] = "",
    decimal: Annotated[
        str, typer.Option(help="Decimal mark of CSV files: `.` or `,`.", show_default="found in the file")
    ] = "",
    json: AsJson = False,
) -> None:
    """Try data on a task before any run: what a device would read, leave out and doubt; exit status 1 if some do not fit.

    Nothing is trained, and no device is needed.
    """
    from edge_client.dry_run import dry_run
    from edge_client.learning.reading import Reading
    from shoal.task.bundle import read_manifest

    manifest, reading = read_manifest(task), Reading(label, decimal=decimal)
    found: list[dict[str, Any]] = []
    for source in data:
        try:
            made = dry_run(source, manifest, reading)
            found.append(made.document())
            lines = made.lines()
        except DataError as error:
            found.append({"fits": False, "source": str(source), "error": str(error), "hint": error.hint})
            lines = [f"{source}: does not fit: {error}", *([f"  hint: {error.hint}"] if error.hint else [])]
        if not json:
            say("\n".join(lines))
    if json:
        say_json({"task": manifest.name, "data": found})
    if not all(each["fits"] for each in found):
        raise SystemExit(1)


for command in (*admission_cli.COMMANDS, *upkeep_cli.COMMANDS, status_cli.status, status_cli.report):
    app.command()(command)


def main() -> None:
    """Run the program."""
    add_version(app, prog="shoal-fleet")
    run_program(app, prog="shoal-fleet", secret=True)
