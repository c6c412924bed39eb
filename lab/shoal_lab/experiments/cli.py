"""`shoal simulate`: run an experiment of the papers, and print, save and plot its results."""

from __future__ import annotations

import functools
import itertools
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from shoal.errors import ConfigError, ShoalError, UsageError
from shoal.util.console import note, note_error, say, say_json
from shoal.util.options import AsJson

if TYPE_CHECKING:
    from shoal_lab.experiments.common.experiment import Options, Study

DEVICES: Final = ("cpu", "cuda")
GRIDS: Final = ("default", "paper")
ALL: Final = "all"

app = typer.Typer(rich_markup_mode=None)

RANK: Final = "RANK"
WORLD: Final = "WORLD_SIZE"
"""Environment variables in which torchrun gives each of its processes a number, from 0, and the number of all."""


def _only_rank_0_prints(command: Callable[..., None]) -> Callable[..., None]:
    """Return a command whose errors, in other processes of torchrun than the first, are lines on stderr with the rank."""

    @functools.wraps(command)
    def run(*arguments: Any, **options: Any) -> None:
        rank = _rank()
        try:
            command(*arguments, **options)
        except ShoalError as error:
            if rank == 0:
                raise
            note(f"rank {rank}:")
            note_error(error)
            raise typer.Exit(error.exit_code) from error

    return run


def _torchrun() -> bool:
    return RANK in os.environ and WORLD in os.environ


def _rank() -> int:
    return int(os.environ[RANK]) if _torchrun() else 0


@app.command()
@_only_rank_0_prints
def simulate(
    experiment: Annotated[
        str | None, typer.Argument(help="Experiment, see --list, or a TOML file with one.", show_default=False)
    ] = None,
    list_: Annotated[
        bool, typer.Option("--list", help="List the experiments, or one's scenarios, and the data that each needs.")
    ] = False,
    scenario: Annotated[
        str | None, typer.Option(help="Scenario, for an experiment that has several: wild --list names them.")
    ] = None,
    algorithm: Annotated[
        str | None,
        typer.Option("--algorithm", "--strategy", help="Algorithms of the experiment: one, several as A,B, or all."),
    ] = None,
    devices: Annotated[int | None, typer.Option(help="Devices, m; by default the experiment's.", min=1)] = None,
    samples: Annotated[
        int | None, typer.Option(help="Samples per device, n; by default the experiment's.", min=1)
    ] = None,
    rounds: Annotated[int | None, typer.Option(help="Rounds; by default the experiment's.", min=1)] = None,
    seed: Annotated[int, typer.Option(help="Seed of data split, origins, batches and mask.", min=0)] = 0,
    mask: Annotated[
        str,
        typer.Option(
            help="Mask mode of the updates that strategies receive (rotation, permutation, ...), or none for clear updates. "
            "The default is that of the kept results; a fleet's is rotation."
        ),
    ] = "permutation",
    data_dir: Annotated[
        Path | None, typer.Option(help="Folder that is searched first for data sets.", file_okay=False)
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", help="Setting of the experiment or the algorithm, NAME=VALUE; repeatable."),
    ] = None,
    grid: Annotated[str, typer.Option(help="Points of a sweep: default, or paper for all of them.")] = "default",
    device: Annotated[
        str, typer.Option(help="cpu or cuda; on cuda each process that torchrun starts has a GPU of its own.")
    ] = "cpu",
    threads: Annotated[
        int, typer.Option(help="Threads of one matrix product; another number changes the last digits.", min=1)
    ] = 1,
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            help="Save a long run to this file every minute, and resume from it if it exists.", dir_okay=False
        ),
    ] = None,
    save: Annotated[
        Path | None,
        typer.Option(
            help="Also write the results to this file, with command, commit and machine; a .jsonl file keeps other runs.",
            dir_okay=False,
        ),
    ] = None,
    plot: Annotated[Path | None, typer.Option(help="Draw the figure: .png, .svg or .pdf.", dir_okay=False)] = None,
    json: AsJson = False,
) -> None:
    """Run an experiment of the CFL, IFCA or FedGroup paper with the strategies that the daemon runs.

    torchrun --nproc-per-node 4 -m shoal simulate ... divides the devices among four processes; the first prints the result.
    """
    from crypto.mask.modes.registry import MODES
    from shoal_lab.experiments import registry
    from shoal_lab.experiments.common.experiment import Options, one_of

    rank = _rank()
    if list_:
        if rank == 0:
            _list(experiment, data_dir, json)
        return
    if experiment is None:
        raise UsageError("which experiment?", hint="shoal simulate --list names them")
    for what, value, known in (("mask", mask, MODES), ("device", device, DEVICES), ("grid", grid, GRIDS)):
        one_of(what, value, known)
    chosen = registry.find(experiment)
    algorithms = _algorithms(chosen, algorithm)
    _check_outputs(device, save, plot)  # before hours of work, not after
    if checkpoint is not None and len(algorithms) > 1:
        raise UsageError("a checkpoint holds one run", hint="run the algorithms one by one, each with its own file")
    options = Options(
        algorithm=algorithms[0],
        devices=devices,
        samples=samples,
        rounds=rounds,
        seed=seed,
        mask=mask,
        data_dir=data_dir,
        settings=_settings(settings or []),
        grid=grid,
        device=device,
        threads=threads,
        checkpoint=checkpoint,
        scenario=scenario,
    )
    for name in algorithms:
        chosen.resolved(replace(options, algorithm=name))
    results, kept = _run(chosen, algorithms, options, save if rank == 0 else None)
    if rank:
        return
    if json:
        say_json(_document(chosen, results, algorithm == ALL or len(algorithms) > 1))
    else:
        from shoal_lab.experiments.report import report

        title = chosen.title if scenario is None else chosen.scenarios[scenario]["title"]
        report(f"{chosen.id}: {title} ({chosen.paper}); seed {seed}, mask {mask}", results)
    if plot is not None:
        from shoal_lab.experiments.figures import plot as draw

        kept = _done(draw, results, plot, chosen.figure) and kept
    if not kept:
        raise typer.Exit(ConfigError.exit_code)


def _done(work: Callable[..., None], *arguments: Any) -> bool:
    """Do what must not lose the results: print an error, and return whether it worked."""
    try:
        work(*arguments)
    except (UsageError, ConfigError) as error:
        note_error(error)
        return False
    return True


def _run(
    chosen: Study,
    algorithms: tuple[str, ...],
    options: Options,
    save: Path | None,
) -> tuple[list[dict[str, Any]], bool]:
    """Run the algorithms in turn and save after each, so that an interruption loses only the one that is running.

    A failure to save is printed and does not stop the run. Returns the results, and whether all of them were saved.
    """
    from shoal.report import record
    from shoal.simulation.engine.ranks import torchrun_ranks
    from shoal.simulation.engine.threads import limited_threads
    from shoal_lab.experiments.report import progress_of

    results: list[dict[str, Any]] = []
    kept = True
    with torchrun_ranks() as ranks, limited_threads(options.threads), progress_of(ranks.rank) as progress:
        for name in algorithms:
            result = chosen.run(replace(options, algorithm=name), progress)
            results.append(result | ({"world": ranks.world} if _torchrun() else {}))
            if save is not None:
                kept = _done(record.save, save, _document(chosen, results, len(algorithms) > 1))
    return results, kept


def _document(chosen: Study, results: list[dict[str, Any]], several: bool) -> dict[str, Any]:
    return {"experiment": chosen.id, "results": results} if several else results[0]


def _algorithms(chosen: Study, asked: str | None) -> tuple[str, ...]:
    if asked == ALL:
        return tuple(chosen.algorithms)
    names = tuple(name.strip() for name in asked.split(",")) if asked else tuple(chosen.algorithms[:1])
    if len(set(names)) < len(names):
        raise UsageError(f"--strategy {asked} names an algorithm twice", hint="name each once")
    return names


def _settings(items: list[str]) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for item in items:
        name, sign, value = item.partition("=")
        if not sign or not name.strip():
            raise UsageError(f"{item!r} is not NAME=VALUE", hint=f"write {name.strip() or 'NAME'}=VALUE")
        chosen[name.strip()] = value.strip()
    return chosen


def _check_outputs(device: str, save: Path | None, plot: Path | None) -> None:
    """Check outputs and device before a long run, not after it.

    Raises:
        UsageError: an output can't be written.
        ConfigError: there is no CUDA device.
    """
    from shoal.report.record import check_place

    if save is not None:
        check_place(save, "--save")
    if plot is not None:
        from shoal.report.plot import check

        check(plot)
        check_place(plot, "--plot")
    if device == "cuda":
        import torch

        if not torch.cuda.is_available():
            raise ConfigError("there is no CUDA device here", hint="use --device cpu")


def _list(experiment: str | None, data_dir: Path | None, as_json: bool) -> None:
    """Print the studies, or the scenarios of one that has any, with the data that each needs and what of these is missing."""
    from shoal_lab.experiments import registry
    from shoal_lab.experiments.data import datasets

    missing = {name: not datasets.is_here(name, data_dir) for name in datasets.names()}
    if experiment is not None and (chosen := registry.find(experiment)).scenarios:
        rows = [
            {"name": name, **about, "missing": [need for need in about["needs"] if missing[need]]}
            for name, about in chosen.scenarios.items()
        ]
        if as_json:
            say_json({"experiment": chosen.id, "algorithms": list(chosen.algorithms), "scenarios": rows})
            return
        width = max(len(row["name"]) for row in rows)
        for kind, of_kind in itertools.groupby(rows, key=lambda row: row["kind"]):
            say(f"{kind}:")
            for row in of_kind:
                lacks = "".join(f"; {need} is not here" for need in row["missing"])
                say(f"  {row['name']:{width}}  {row['title']} ({row['data']}, {row['network']}{lacks})")
        return
    studies = [registry.find(name) for name in ([experiment] if experiment else registry.ids())]
    if as_json:
        say_json(
            {
                "experiments": [
                    {
                        **{name: getattr(s, name) for name in ("id", "paper", "title")},
                        "algorithms": list(s.algorithms),
                        "needs": list(s.needs),
                        "missing": [name for name in s.needs if missing[name]],
                        "published": dict(s.published),
                    }
                    for s in studies
                ]
            }
        )
        return
    width = max(len(s.id) for s in studies)
    for s in studies:
        needs = [f"{name}, which is not here" if missing[name] else name for name in s.needs]
        say(f"{s.id:{width}}  {s.title} ({s.paper})")
        say(f"{'':{width}}  algorithms: {', '.join(s.algorithms)}{'; data: ' if needs else ''}{'; '.join(needs)}")
