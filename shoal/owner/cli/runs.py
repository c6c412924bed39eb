"""Runs at the aggregator: `shoal-fleet run start|pause|resume|stop|list|show|logs`.

All ask the aggregator through the broker; only `start --out FILE` writes a file to carry by hand. `start` has help in two
lengths: `--help` shows the options that most people need, `--help-all` shows every option.
"""

from __future__ import annotations

import copy
import inspect
import sys
import textwrap
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, get_args

import typer
from typer.core import TyperCommand

from shoal.errors import ShoalError, UsageError
from shoal.owner.cli.pairs import Directory, add_hint, pairs, private_words
from shoal.owner.keys.settings import settings_of
from shoal.owner.keys.unlock import open_fleet
from shoal.protocol.recipe import DEFAULTS, LocalTraining, Recipe, as_settings, knobs
from shoal.protocol.requests import LATEST_RECORDS, RequestAction
from shoal.util.console import note, say, say_result, working
from shoal.util.options import AsJson

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from aggregator.status.answers import RunEntry, RunPage
    from shoal.owner.keys.directory import FleetDirectory
    from shoal.owner.task_compiler.signed import Source
    from shoal.task.bundle import TaskBundle
    from shoal.types import Float32Vector

LAST_RUN: Final = 2**32 - 1
"""Largest number of a run, which a plan stores in 32 bits."""


app = typer.Typer(help="Start, pause, resume, stop and watch runs at the aggregator.", no_args_is_help=True)

Number = Annotated[int, typer.Argument(help="The run's number.", min=1, max=LAST_RUN)]


def reveal(command: Any) -> None:
    """Let the help of a typer command show all of its options."""
    for parameter in command.params:
        parameter.hidden = False


def reveals(command: Any) -> bool:
    """Return whether the help of a typer command shows all of its options."""
    return not any(getattr(parameter, "hidden", False) for parameter in command.params)


def _show(context: typer.Context, wanted: bool) -> None:
    if wanted:
        reveal(context.command)
        say(context.get_help())
        raise typer.Exit


HelpAll = Annotated[
    bool,
    typer.Option("--help-all", help="Show all options.", is_eager=True, expose_value=False, callback=_show),
]


class RunCommand(TyperCommand):
    """`shoal-fleet run start`, whose help ends with the algorithms and settings as the strategies define them."""

    def format_epilog(self, _ctx: Any, formatter: Any) -> None:
        """Write the names of the algorithms, or in the full help each with its settings."""
        from aggregator.strategies.registry import strategy_names  # imports numpy, so only when help is printed
        from shoal.owner.runs.training import describe

        if not reveals(self):
            formatter.write(f"\nAlgorithms: {', '.join(strategy_names())}.\n")
            formatter.write("--help-all lists what --set takes for each.\n")
            return
        formatter.write("\nAlgorithms, and what --set takes for each:\n")
        for text in describe():
            formatter.write(f"\n{textwrap.indent(text, '  ')}\n")


def _takes_recipe(command: Callable[..., None]) -> Callable[..., None]:
    """Give a command an option for each number and text of a recipe, in place of its ``**choices``.

    `--help` shows the options named in COMMON and the recipe's common ones, `--help-all` all of them.
    """
    signature = inspect.signature(command, eval_str=True)
    own = [p for p in signature.parameters.values() if p.kind is not p.VAR_KEYWORD]
    shown = [p if p.name in COMMON else p.replace(annotation=_hidden(p.annotation)) for p in own]
    choices = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=getattr(DEFAULTS, name),
            annotation=Annotated[
                found.kind | None if found.optional else found.kind,
                typer.Option(help=found.help, hidden=not found.common),
            ],
        )
        for name, found in knobs(Recipe).items()
    ]
    command.__signature__ = signature.replace(parameters=[*shown, *choices])  # type: ignore[attr-defined]
    return command


def _hidden(annotation: Any) -> Any:
    kind, option = get_args(annotation)
    option = copy.copy(option)
    option.hidden = True
    return Annotated[kind, option]


COMMON: Final = (
    "directory",
    "task",
    "algorithm",
    "run",
    "out",
    "setting",
    "local",
    "begin_with",
    "every",
    "when_data_grows",
    "at_most",
    "until",
    "_all",
)
"""Parameters of `start` that its short help shows."""
_LOCAL: Final = ", ".join(knobs(LocalTraining))


@app.command(cls=RunCommand)
@_takes_recipe
def start(
    directory: Directory,
    task: Annotated[
        Path | None, typer.Option(help="A task that `task compile` wrote.", exists=True, file_okay=False)
    ] = None,
    algorithm: Annotated[
        str | None, typer.Option(help="Name of an algorithm listed below.", show_default=DEFAULTS.algorithm)
    ] = None,
    run: Annotated[
        int | None, typer.Option(help="Send the run of this number, which is signed already.", min=1, max=LAST_RUN)
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(help="Write the run package to a file, to carry by hand, and send nothing.", dir_okay=False),
    ] = None,
    setting: Annotated[
        list[str] | None, typer.Option("--set", help="Setting of the algorithm, NAME=VALUE; repeatable.")
    ] = None,
    local: Annotated[
        list[str] | None, typer.Option(help=f"Local training, NAME=VALUE: {_LOCAL}; with epochs=0, steps count.")
    ] = None,
    pretrain: Annotated[
        list[str] | None,
        typer.Option(
            help="Local training where devices train alone (cold starts, one-shot), NAME=VALUE; defaults to --local's "
            "values."
        ),
    ] = None,
    begin_with: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="RUN|FOLDER",
            help="Begin with the models of this run, which the broker still holds, in this folder, which `models get` wrote, "
            "or in this file of a device, which `shoal-edge export --certified` wrote, and not with random ones.",
        ),
    ] = None,
    from_model: Annotated[
        int | None, typer.Option(help="With --from: begin with this model of several.", min=0)
    ] = None,
    every: Annotated[
        str, typer.Option(help="Sign a standing order: a run begins so long after the end of the last, 30m, 12h or 1d.")
    ] = "",
    when_data_grows: Annotated[
        str,
        typer.Option(
            help="Sign a standing order: a run begins once the data of --min-contributors devices have grown by so many "
            "per cent, 20%, and --every after the last, by default an hour."
        ),
    ] = "",
    at_most: Annotated[int | None, typer.Option(help="With --every: most runs of the order.")] = None,
    until: Annotated[
        str, typer.Option(help="With --every: last day of the order, YYYY-MM-DD.", show_default="the roster's last")
    ] = "",
    keeper: Annotated[
        str | None,
        typer.Option(
            help="Name of a keeper: the aggregator learns sums of at least three updates, and no single one. For all "
            "algorithms but local, with a number of clusters where they have such a setting."
        ),
    ] = None,
    json: AsJson = False,
    _all: HelpAll = False,
    **choices: Any,
) -> None:
    """Sign a run and send it to the aggregator: the plan, which limits the aggregator, and the sealed task and origins.

    The same run again changes nothing. With --out the file is written and nothing is sent: carry it into the
    aggregator's runs directory.
    """
    if run is not None and (task is not None or algorithm is not None):
        raise UsageError("--run sends a run that is signed already; --task and --algorithm sign a new one")
    if from_model is not None and begin_with is None:
        raise UsageError("--from-model chooses among the models of --from", hint="give --from FOLDER as well")
    if run is None and task is None:
        raise UsageError("--task is missing", hint="shoal-fleet run start --help-all lists all options")
    every = every or ("1h" if when_data_grows else "")
    if not every and (at_most is not None or until):
        raise UsageError("--at-most and --until belong to a standing order", hint="give --every as well, such as 1d")
    recipe = Recipe(algorithm or DEFAULTS.algorithm, as_settings(pairs(setting or [])), **choices)
    fleet = open_fleet(directory)
    if task is None:
        _deliver(fleet, run or 0, out, json=json)
        return
    from aggregator.strategies.registry import settings_of as strategy_settings
    from shoal.owner.runs.plan import (
        check_devices,
        check_roster,
        chosen_origins,
        doubts,
        draft_plan,
        make_plan,
        roster_doubts,
        with_keeper,
        write_run,
    )
    from shoal.owner.runs.standing import signed_schedule
    from shoal.owner.runs.training import local_training
    from shoal.owner.task_compiler.signed import read_signed

    now_s = int(time.time())
    check_roster(fleet.roster, now_s)
    _check_replaced(fleet)
    schedule = signed_schedule(fleet, every, at_most, until, when_data_grows) if every else None
    bundle, source = read_signed(task, fleet.owner)
    training = local_training(bundle.manifest.hyper, pairs(local or []))
    if algorithm is None:
        note(f"algorithm {DEFAULTS.algorithm}, the default; `--help` lists the others")
    recipe = replace(recipe, local=training, pretrain=local_training(training, pairs(pretrain or [])))
    member = None if keeper is None else fleet.keeper(keeper)
    if member is not None:
        recipe = with_keeper(recipe)
        note("with a keeper updates weigh alike, and no rule compares them: weighting uniform, robust off")
    settings = strategy_settings(recipe.algorithm, recipe.values)
    origins, earlier = None, 0
    if begin_with is not None:
        origins = chosen_origins(_earlier_models(fleet, begin_with, bundle), settings, from_model)
        earlier = len(origins)
    draft = draft_plan(fleet, bundle, recipe, earlier=earlier, schedule=schedule, keeper=member)
    if bundle.private:
        note(private_words(bundle.manifest))
    devices = fleet.roster.only(recipe.only).active()
    check_devices(draft, devices, settings)
    for doubt in (*doubts(draft, devices, settings), *roster_doubts(fleet.roster, now_s)):
        note(f"warning: {doubt}")
    if origins is None:
        origins = _new_origins(task, bundle, source, draft.without_statistics.origins)
    with fleet.changing():  # no other program may take the plan's keys or its number
        plan = make_plan(fleet, bundle, recipe, earlier=earlier, schedule=schedule, keeper=member)
        write_run(fleet, plan, bundle, origins)
    _deliver(fleet, plan.run, out, json=json)


def _earlier_models(fleet: FleetDirectory, source: str, bundle: TaskBundle) -> dict[int, Float32Vector]:
    """Return the models of an earlier run, model -> (d,) float32: at the broker, in a folder or in a device's file."""
    from shoal.owner.models.files import models_of, read_certified, read_models
    from shoal.owner.models.reader import read_models as read_broker

    path = Path(source)
    if path.is_file():
        plan, round_, models = read_certified(path, bundle, fleet)
        note(f"{path}: models of run {plan.run} that devices certify, up to round {round_}")
        return models
    if path.exists() or not source.isdecimal():
        return read_models(path, bundle)
    found = read_broker(fleet, settings_of(fleet.path).silence, note, int(source)).finished_run()
    for model, reason in sorted(found.missing.items()):
        note(f"warning: model {model} is missing: {reason}")
    return models_of(found, bundle)


def _new_origins(task: Path, bundle: TaskBundle, source: Source, count: int) -> NDArray[np.float32]:
    """Return a run's starting models, (count, d) float32: the task's, or random ones."""
    if bundle.manifest.trainer is not None:
        from shoal.owner.task_compiler.external import read_origins

        return read_origins(task, bundle, count)
    note("drawing the starting models")
    with working("drawing the starting models with torch"):
        from shoal.owner.task_compiler.origin import make_origins  # torch: imported only after the checks

        # The aggregator reads the plan and with it the seed: origins come from the operating system's random source.
        return make_origins(source.spec, count, None, manifest=bundle.manifest, **source.options)


def _check_replaced(fleet: FleetDirectory) -> None:
    """Ask the owner at a terminal whether another run may end the standing order in force.

    Raises:
        UsageError: it may not, or nobody can be asked.
    """
    from shoal.owner.runs.standing import last_run, order_in_force

    plan = order_in_force(fleet)
    if plan is None:
        return
    note(f"a standing order is in force, of runs {plan.run} to {last_run(plan)}: this run would end it")
    if not sys.stdin.isatty() or not typer.confirm("end it?", err=True):
        raise UsageError(
            "nothing is signed",
            hint=f"shoal-fleet schedule stop {fleet.path} ends the order; at a terminal you are asked",
        )


def _deliver(fleet: FleetDirectory, run: int, out: Path | None, *, json: bool) -> None:
    """Send a signed run to the aggregator, or write it to a file to carry."""
    from shoal.owner.keys.vault import run_file
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
        page = answer(fleet, RequestAction.START, package=read_private(path))
    except ShoalError as error:
        add_hint(
            error, f"run {run} is signed and stored: shoal-fleet run start {fleet.path} --run {run} sends it again"
        )
        raise
    from aggregator.rounds.standstill import named

    if page.schedule is not None:
        from shoal.owner.console.asking import schedule_data, schedule_line

        say_result(
            {**schedule_data(page.schedule), "file": str(path), "sent": True},
            schedule_line(page.schedule),
            as_json=json,
        )
        note(f"next: shoal-fleet schedule list {fleet.path}; this machine may be off until the order ends")
        return
    (entry,) = page.runs
    if entry.short:
        note(f"warning: the model of run {run} may not fit the memory of {named(entry.short)}")
        note("free memory on them, or train a smaller model: docs/operator/run.md, Memory")
    if entry.left_out:
        note(f"warning: run {run} is in wire version {entry.wire}, which {named(entry.left_out)} can't follow")
        note("install the same version of Shoal there as here")
    _say_entry(entry, {"file": str(path), "sent": True}, json=json)


def answer(fleet: FleetDirectory, action: RequestAction, **parts: Any) -> RunPage:
    """Send a request to the aggregator and return its answer.

    Raises:
        ShoalError: as `shoal.owner.console.asking.ask`.
    """
    from aggregator.status.answers import RunPage, decoded
    from shoal.owner.console.asking import ask

    return decoded(RunPage, ask(fleet, settings_of(fleet.path).wait, note, action, **parts)[0])


def _say_entry(entry: RunEntry, more: dict[str, Any], *, json: bool) -> None:
    from shoal.owner.console.asking import run_data, run_line

    say_result({**run_data(entry), **more}, run_line(entry), as_json=json)


def _order(directory: Path, run: int, action: str, *, json: bool, now: bool = False) -> None:
    (entry,) = answer(open_fleet(directory), RequestAction[action], run=run, now=now).runs
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
    if not now:
        note("the run ends when its open round closes; --now ends it at once, also while its keeper is away")


@app.command("list")
def list_(
    directory: Directory,
    json: AsJson = False,
) -> None:
    """List the runs that the aggregator has: phase, round, and when the last one closed."""
    from shoal.owner.console.asking import run_data, run_line

    runs = answer(open_fleet(directory), RequestAction.LIST).runs
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
    from shoal.owner.console.asking import run_data, run_line
    from shoal.owner.keys.run_list import signed_plans, summary, summary_line

    fleet = open_fleet(directory)
    runs = answer(fleet, RequestAction.LIST).runs
    entry = next((found for found in runs if found.run == run), None)
    plan = next((summary(found) for found in signed_plans(fleet, note) if found.run == run), None)
    if entry is None and plan is None:
        raise UsageError(f"there is no run {run}", hint="shoal-fleet run list shows the runs that the aggregator has")
    say_result(
        {"run": run, "plan": plan, "aggregator": None if entry is None else run_data(entry)},
        *([] if plan is None else [summary_line(plan)]),
        f"run {run}: not at the aggregator yet" if entry is None else run_line(entry),
        as_json=json,
    )


@app.command()
def logs(
    directory: Directory,
    run: Number,
    last: Annotated[int, typer.Option("--last", "-n", help="Rounds to print.", min=1, max=LATEST_RECORDS)] = 20,
    json: AsJson = False,
) -> None:
    """Print the records of a run's last closed rounds, oldest first."""
    from shoal.owner.console.asking import record_data, record_line, run_data

    page = answer(open_fleet(directory), RequestAction.LOGS, run=run, records=last)
    (entry,) = page.runs
    if not page.records:
        note(f"run {run} has closed no round yet")
    say_result(
        {**run_data(entry), "records": [record_data(record) for record in page.records]},
        *(record_line(record) for record in page.records),
        as_json=json,
    )
