"""Runs at the aggregator: `shoal-fleet run start|pause|resume|stop|list|show|logs`.

All ask the aggregator through the broker; only `start --out FILE` writes a file to carry by hand.
"""

from __future__ import annotations

import math
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from typer.core import TyperCommand

from shoal import limits
from shoal.errors import ShoalError, UsageError
from shoal.owner.broker.address import settings_of
from shoal.owner.cli.options import Directory
from shoal.owner.cli.pairs import pairs, private_words
from shoal.owner.keys.unlock import open_fleet
from shoal.owner.runs import defaults
from shoal.protocol.requests import LATEST_RECORDS, RequestAction
from shoal.util.console import note, say, say_json, say_result
from shoal.util.full_help import HelpAll, reveals
from shoal.util.options import AsJson
from shoal.util.progress import working

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aggregator.status.answers import RunEntry, RunPage
    from shoal.owner.keys.directory import FleetDirectory
    from shoal.owner.task_compiler.signed import Source
    from shoal.task.bundle import TaskBundle

MOST_ROUNDS: Final = 2**32 - 2
"""A plan stores 32 bits, and the final round is one more."""


app = typer.Typer(help="Start, pause, resume, stop and watch runs at the aggregator.", no_args_is_help=True)

Number = Annotated[int, typer.Argument(help="The run's number.", min=1, max=MOST_ROUNDS)]


class RunCommand(TyperCommand):
    """`shoal-fleet run start`, whose help ends with the algorithms and settings as the strategies define them."""

    def format_epilog(self, _ctx: Any, formatter: Any) -> None:
        """Write the names of the algorithms, or in the full help each with its settings."""
        from aggregator.strategies.registry import strategy_names  # imports numpy, so only when help is printed
        from shoal.owner.runs.algorithms import describe

        if not reveals(self):
            formatter.write(f"\nAlgorithms: {', '.join(strategy_names())}.\n")
            formatter.write("--help-all lists what --set takes for each.\n")
            return
        formatter.write("\nAlgorithms, and what --set takes for each:\n")
        for text in describe():
            formatter.write(f"\n{textwrap.indent(text, '  ')}\n")


@app.command(cls=RunCommand)
def start(
    directory: Directory,
    task: Annotated[
        Path | None, typer.Option(help="A task that `task compile` wrote.", exists=True, file_okay=False)
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option(help="Name of an algorithm listed below.", show_default=defaults.DEFAULT_ALGORITHM),
    ] = None,
    run: Annotated[
        int | None, typer.Option(help="Send the run of this number, which is signed already.", min=1, max=MOST_ROUNDS)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the run package to a file, to carry by hand, and send nothing.", dir_okay=False),
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Setting of the algorithm, NAME=VALUE; repeatable.")
    ] = None,
    local: Annotated[
        list[str] | None,
        typer.Option(
            help="Local training, NAME=VALUE: epochs, steps (instead of epochs, with epochs=0), batch_size, lr, lr_decay, "
            "momentum, clip, prox_mu."
        ),
    ] = None,
    pretrain: Annotated[
        list[str] | None,
        typer.Option(
            help="Local training where devices train alone (cold starts, one-shot), NAME=VALUE; defaults to --local's "
            "values.",
            hidden=True,
        ),
    ] = None,
    rounds: Annotated[
        int, typer.Option(help="Rounds, including those of cold starts.", min=1, max=limits.MAX_ROUNDS)
    ] = (defaults.DEFAULT_ROUNDS),
    mode: Annotated[
        str,
        typer.Option(
            "--mode",
            "--mask",
            help="Mask mode: rotation (secret permutation, signs, Hadamard), permutation, signed-permutation or none.",
            hidden=True,
        ),
    ] = defaults.DEFAULT_MODE,
    norm_limit: Annotated[
        float,
        typer.Option(
            help="Largest l2 norm of one update; an update above ten times the median norm is left out in any case.",
            hidden=True,
        ),
    ] = defaults.DEFAULT_NORM_LIMIT,
    max_samples: Annotated[
        int,
        typer.Option(
            help="Largest sample count that a device reports, even if it has more samples.",
            min=1,
            max=2**32 - 1,
            hidden=True,
        ),
    ] = defaults.DEFAULT_MAX_SAMPLES,
    weight_cap: Annotated[
        float,
        typer.Option(
            help="Largest weight of a device in a mean, in median weights of its cluster, at least 1; 0: no limit.",
            hidden=True,
        ),
    ] = defaults.DEFAULT_WEIGHT_CAP,
    robust: Annotated[
        str,
        typer.Option(
            help=f"Weights of the updates in a cluster's mean, against false ones: {', '.join(limits.ROBUST_RULES)}.",
            hidden=True,
        ),
    ] = defaults.DEFAULT_ROBUST,
    precision_up: Annotated[
        str,
        typer.Option(
            "--precision",
            help=f"Encoding of devices' updates, from the most bytes to the fewest: {', '.join(limits.PRECISIONS)}.",
            hidden=True,
        ),
    ] = defaults.DEFAULT_PRECISION_UP,
    precision_down: Annotated[
        str, typer.Option(help="Encoding of the means that devices receive, of the same list.", hidden=True)
    ] = defaults.DEFAULT_PRECISION_DOWN,
    min_contributors: Annotated[int, typer.Option(help="Fewest devices in a mean that is broadcast.", min=1)] = (
        defaults.DEFAULT_MIN_CONTRIBUTORS
    ),
    quorum: Annotated[
        float, typer.Option(help="Share of the devices that closes a round after its deadline.", hidden=True)
    ] = (defaults.DEFAULT_QUORUM),
    participation: Annotated[float, typer.Option(help="Share of the devices drawn for a round.")] = (
        defaults.DEFAULT_PARTICIPATION
    ),
    deadline_s: Annotated[float, typer.Option(help="Seconds until a round closes with a quorum.", hidden=True)] = (
        defaults.DEFAULT_DEADLINE_S
    ),
    weighting: Annotated[
        str, typer.Option(help="samples, or uniform: devices then report no sample counts.", hidden=True)
    ] = defaults.DEFAULT_WEIGHTING,
    norm_noise: Annotated[
        float,
        typer.Option(
            help="Relative standard deviation of a random factor on each update, 0 to 0.2, against guessing a device's "
            "data by the update's norm; 0 is off.",
            min=0,
            max=limits.MAX_NORM_NOISE,
            hidden=True,
        ),
    ] = defaults.DEFAULT_NORM_NOISE,
    evaluate_every: Annotated[
        int,
        typer.Option(help="Rounds between accuracy reports; 0: at the end only.", min=0, max=MOST_ROUNDS, hidden=True),
    ] = defaults.DEFAULT_EVALUATE_EVERY,
    begin_with: Annotated[
        Path | None,
        typer.Option(
            "--from",
            help="Begin with the models in this folder, which `models get` wrote, or in this file of a device, which "
            "`shoal-edge export --certified` wrote, and not with random ones.",
            exists=True,
        ),
    ] = None,
    from_model: Annotated[
        int | None, typer.Option(help="With --from: begin with this model of several.", min=0, hidden=True)
    ] = None,
    seed: Annotated[
        int | None,
        typer.Option(
            help="Seed of participation and batch order, which the aggregator knows; not of origins; default: random.",
            min=0,
            max=2**64 - 1,
            hidden=True,
        ),
    ] = None,
    json: AsJson = False,
    _all: HelpAll = False,
) -> None:
    """Sign a run and send it to the aggregator: the plan, which limits the aggregator, and the sealed task and origins.

    The same run again changes nothing. With --out the file is written and nothing is sent: carry it into the
    aggregator's runs directory.
    """
    if not (weight_cap == 0 or 1 <= weight_cap < math.inf):
        raise UsageError(
            f"--weight-cap {weight_cap:g} is neither 0 nor at least 1",
            hint=f"0 turns it off; {defaults.DEFAULT_WEIGHT_CAP:g} is the default; below 1 even the median device would weigh "
            "less than its samples",
        )
    if robust not in limits.ROBUST_RULES:
        raise UsageError(f"--robust {robust} is no rule", hint=f"there are {', '.join(limits.ROBUST_RULES)}")
    for option, chosen in (("--precision", precision_up), ("--precision-down", precision_down)):
        if chosen not in limits.PRECISIONS:
            raise UsageError(f"{option} {chosen} is no precision", hint=f"there are {', '.join(limits.PRECISIONS)}")
    if run is not None and (task is not None or algorithm is not None):
        raise UsageError("--run sends a run that is signed already; --task and --algorithm sign a new one")
    if from_model is not None and begin_with is None:
        raise UsageError("--from-model chooses among the models of --from", hint="give --from FOLDER as well")
    if run is None and task is None:
        raise UsageError("--task is missing", hint="shoal-fleet run start --help-all lists all options")
    fleet = open_fleet(directory)
    if task is None:
        _deliver(fleet, run or 0, out, json=json)
        return
    from shoal.owner.runs.checks import check_devices, check_roster, doubts, roster_doubts
    from shoal.owner.runs.plan import RunOptions, draft_plan, make_plan, write_run
    from shoal.owner.runs.training import local_training
    from shoal.owner.task_compiler.signed import read_signed

    now_s = int(time.time())
    check_roster(fleet.roster, now_s)
    bundle, source = read_signed(task, fleet.owner)
    training = local_training(bundle.manifest.hyper, pairs(local or []))
    if algorithm is None:
        note(f"algorithm {defaults.DEFAULT_ALGORITHM}, the default; `--help` lists the others")
    options = RunOptions(
        algorithm=algorithm or defaults.DEFAULT_ALGORITHM,
        settings=pairs(setting or []),
        rounds=rounds,
        mode=mode,
        local=training,
        pretrain=local_training(training, pairs(pretrain or [])),
        norm_limit=norm_limit,
        min_contributors=min_contributors,
        quorum=quorum,
        participation=participation,
        deadline_s=deadline_s,
        weighting=weighting,
        norm_noise=norm_noise,
        max_samples=max_samples,
        weight_cap=weight_cap,
        robust=robust,
        precision_up=precision_up,
        precision_down=precision_down,
        evaluate_every=evaluate_every,
        seed=seed,
    )
    draft = draft_plan(fleet, bundle, options)
    if bundle.private:
        note(private_words(bundle.manifest))
    devices = fleet.roster.active()
    check_devices(draft, devices)
    for doubt in (*doubts(draft, devices), *roster_doubts(fleet.roster, now_s)):
        note(f"warning: {doubt}")
    origins = _origins(fleet, begin_with, from_model, bundle, source, draft.without_statistics.origins)
    with fleet.changing():  # no other program may take the plan's keys or its number
        plan = make_plan(fleet, bundle, options)
        write_run(fleet, plan, bundle, origins)
    _deliver(fleet, plan.run, out, json=json)


def _origins(
    fleet: FleetDirectory, folder: Path | None, model: int | None, bundle: TaskBundle, source: Source, count: int
) -> NDArray[np.float32]:
    """Return a run's starting models, (count, d) float32: those in ``folder`` (or a device's file), or random ones."""
    if folder is not None:
        from shoal.owner.models.files import read_certified, read_models
        from shoal.owner.runs.plan import chosen_origins

        if folder.is_file():
            plan, round_, models = read_certified(folder, bundle, fleet)
            note(f"{folder}: models of run {plan.run} that devices certify, up to round {round_}")
            return chosen_origins(models, count, model)
        return chosen_origins(read_models(folder, bundle), count, model)
    note("drawing the starting models")
    with working("drawing the starting models with torch"):
        from shoal.owner.task_compiler.origin import make_origins  # torch: imported only after the checks

        # The aggregator reads the plan and with it the seed: origins come from the operating system's random source.
        return make_origins(source.spec, count, None, manifest=bundle.manifest, **source.options)


def _deliver(fleet: FleetDirectory, run: int, out: Path | None, *, json: bool) -> None:
    """Send a signed run to the aggregator, or write it to a file to carry."""
    from shoal.owner.keys.run_files import run_file
    from shoal.util.files import read_private, write_atomic

    path = run_file(fleet.path, run)
    if not path.exists():
        raise UsageError(f"there is no signed run {run}", hint="shoal-fleet show DIR lists the runs that are signed")
    if out is not None:
        write_atomic(out, read_private(path))
        say_result({"run": run, "file": str(out), "sent": False}, str(out), as_json=json)
        note("next: put this file into the aggregator's runs directory; devices get it through the broker")
        note(f"or send it through the broker: shoal-fleet run start {fleet.path} --run {run}")
        return
    try:
        (entry,) = _answer(fleet, RequestAction.START, package=read_private(path)).runs
    except ShoalError as error:
        stored = f"run {run} is signed and stored: shoal-fleet run start {fleet.path} --run {run} sends it again"
        error.hint = f"{error.hint}; {stored}" if error.hint else stored
        raise
    if entry.left_out:
        from aggregator.rounds.standstill import named

        note(f"warning: run {run} is in wire version {entry.wire}, which {named(entry.left_out)} can't follow")
        note("install the same version of Shoal there as here")
    _say_entry(entry, {"file": str(path), "sent": True}, json=json)


def _answer(fleet: FleetDirectory, action: RequestAction, **parts: Any) -> RunPage:
    from aggregator.status.answers import RunPage, decoded
    from shoal.owner.console.connection import ask

    return decoded(RunPage, ask(fleet, settings_of(fleet.path).wait, note, action, **parts)[0])


def _say_entry(entry: RunEntry, more: dict[str, Any], *, json: bool) -> None:
    from shoal.owner.console.words import run_data, run_line

    say_result({**run_data(entry), **more}, run_line(entry), as_json=json)


def _order(directory: Path, run: int, action: str, *, json: bool, now: bool = False) -> None:
    parts = {"now": True} if now else {}
    (entry,) = _answer(open_fleet(directory), RequestAction[action], run=run, **parts).runs
    _say_entry(entry, {}, json=json)


@app.command()
def pause(
    directory: Directory,
    run: Number,
    json: AsJson = False,
) -> None:
    """Let the open round close, and open no other until the run is resumed, also after a restart of the aggregator."""
    _order(directory, run, "PAUSE", json=json)


@app.command()
def resume(
    directory: Directory,
    run: Number,
    json: AsJson = False,
) -> None:
    """Let a paused run go on."""
    _order(directory, run, "RESUME", json=json)


@app.command()
def stop(
    directory: Directory,
    run: Number,
    now: Annotated[
        bool, typer.Option("--now", help="Close the open round at once, with the uploads that have arrived.")
    ] = False,
    json: AsJson = False,
) -> None:
    """End a run after its open round, with the usual final round: devices have their models, and `models get` works.

    A stopped run can't be resumed. One that has not opened a round is over at once.
    """
    _order(directory, run, "STOP", json=json, now=now)


@app.command("list")
def list_(
    directory: Directory,
    json: AsJson = False,
) -> None:
    """List the runs that the aggregator has: phase, round, and when the last one closed."""
    from shoal.owner.console.words import run_data, run_line

    runs = _answer(open_fleet(directory), RequestAction.LIST).runs
    if not runs:
        note("the aggregator has no run yet")
    say_result({"runs": [run_data(entry) for entry in runs]}, *(run_line(entry) for entry in runs), as_json=json)


@app.command()
def show(
    directory: Directory,
    run: Number,
    json: AsJson = False,
) -> None:
    """Print a run as it was signed, and as the aggregator has it."""
    from shoal.owner.console.words import run_data, run_line
    from shoal.owner.keys.run_list import signed_plans, summary, summary_line

    fleet = open_fleet(directory)
    runs = _answer(fleet, RequestAction.LIST).runs
    entry = next((found for found in runs if found.run == run), None)
    plan = next((summary(found) for found in signed_plans(fleet, note) if found.run == run), None)
    if entry is None and plan is None:
        raise UsageError(f"there is no run {run}", hint="shoal-fleet run list shows the runs that the aggregator has")
    if json:
        say_json({"run": run, "plan": plan, "aggregator": None if entry is None else run_data(entry)})
        return
    if plan is not None:
        say(summary_line(plan))
    say(f"run {run}: not at the aggregator yet" if entry is None else run_line(entry))


@app.command()
def logs(
    directory: Directory,
    run: Number,
    last: Annotated[int, typer.Option("--last", "-n", help="Rounds to print.", min=1, max=LATEST_RECORDS)] = 20,
    json: AsJson = False,
) -> None:
    """Print the records of a run's last closed rounds, oldest first."""
    from shoal.owner.console.words import record_data, record_line, run_data

    page = _answer(open_fleet(directory), RequestAction.LOGS, run=run, records=last)
    (entry,) = page.runs
    if not page.records:
        note(f"run {run} has closed no round yet")
    say_result(
        {**run_data(entry), "records": [record_data(record) for record in page.records]},
        *(record_line(record) for record in page.records),
        as_json=json,
    )
