"""`shoal bench`: measurements of the real code.

A bench is a module with ``measure``, which returns a document, and ``words``, which returns its lines of text. Its command here
declares the options, and imports the module only when it runs.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from shoal import limits
from shoal.errors import UsageError
from shoal.protocol.recipe import DEFAULTS
from shoal.report.delivery import BrokerName, HtmlFile, SaveFile, broker_name, deliver, stop_cleanly
from shoal.util.console import forbid_inspection, note, say
from shoal.util.files import write_atomic
from shoal.util.options import AsJson

app = typer.Typer(help="Measurements of the real code.", no_args_is_help=True, rich_markup_mode=None)


@dataclass(frozen=True, slots=True)
class Report:
    """The document of a bench, its text, and what is written besides."""

    data: dict[str, Any]
    words: Callable[[dict[str, Any]], Iterable[str]]
    write: Callable[[], None] = lambda: None


def _bench(measure: Callable[..., Report]) -> Callable[..., Report]:
    """Make ``measure`` a command that also takes --save and --json, and delivers its report."""

    def command(*, save: Path | None, json: bool, **options: Any) -> None:
        forbid_inspection()
        stop_cleanly()
        report = measure(**options)
        deliver(report.data, json, lambda: say("\n".join(report.words(report.data))), save, report.write)

    def delivery(save: SaveFile = None, json: AsJson = False) -> None: ...

    parts = [inspect.signature(function, eval_str=True).parameters for function in (measure, delivery)]
    merged = {name: parameter for part in parts for name, parameter in part.items()}
    command.__doc__ = measure.__doc__
    command.__signature__ = inspect.Signature(list(merged.values()))  # type: ignore[attr-defined]
    command.__annotations__ = {name: parameter.annotation for name, parameter in merged.items()}
    app.command(measure.__name__.removeprefix("bench_"))(command)
    return measure


@_bench
def bench_round(
    devices: Annotated[int, typer.Option(help="Device processes.", min=1, max=200)] = 10,
    mode: Annotated[
        str, typer.Option(help="Mask mode: rotation, permutation, signed-permutation or none.")
    ] = DEFAULTS.mode,
    broker: BrokerName = "auto",
    beside: Annotated[
        str, typer.Option(help="Measure pairs with another system: flower, or flower-kernel with shoal-kernel.")
    ] = "",
) -> Report:
    """Measure the seconds of a warm round: persistent device processes, a real broker, MLP 784-200-10, 600 samples each.

    With --beside, Shoal and the other system take turns at the same rounds: CPU time, memory, bytes written and syncs of both.
    The other system is installed in an environment of its own below the cache folder, about 1 GB.
    """
    from shoal_lab.bench import rounds as bench

    if beside:
        from crypto.mask.kernel import installed
        from shoal_lab.bench import beside as other
        from shoal_lab.experiments.common.experiment import one_of

        one_of("system", beside, ("flower", "flower-kernel"))
        if (beside == "flower-kernel") != (installed() is not None):
            hint = "pip install ./deploy/kernel for flower-kernel; pip uninstall shoal-kernel for flower"
            raise UsageError(
                "shoal-kernel is installed here" if installed() else "shoal-kernel isn't installed here", hint=hint
            )
        found = other.measure(devices, broker_name(broker), mode, progress=note)
        return Report(found, other.words)
    return Report(bench.measure(devices, broker_name(broker), mode), bench.words)


@_bench
def bench_start(
    starts: Annotated[int, typer.Option(help="Starts of each kind.", min=1, max=100)] = 5,
) -> Report:
    """Measure the seconds from a device's start to its first loss and first update, without the run on its disk and with it."""
    from shoal_lab.bench import starts as bench

    return Report(bench.measure(starts), bench.words)


@_bench
def bench_load(
    devices: Annotated[
        int, typer.Option(help="Device runtimes, each on its own connection.", min=1, max=limits.MAX_DEVICES)
    ],
    model: Annotated[
        str, typer.Option(help="logistic (784-10, 31400 bytes) or mlp (784-200-10, 636040).")
    ] = "logistic",
    algorithm: Annotated[str, typer.Option(help="fedavg, ifca, cfl, fedgroup, ...")] = "fedavg",
    rounds: Annotated[int, typer.Option(help="Training rounds, the first of them a warm-up.", min=1)] = 5,
    open_files: Annotated[int, typer.Option(help="Soft and hard limit on the aggregator's open files.", min=64)] = 1024,
    prepared: Annotated[
        bool, typer.Option("--prepared", help="Seal all uploads first, then replay them from one process.")
    ] = False,
    churn: Annotated[
        float,
        typer.Option(help="Share of the devices that leave after each round, back after the next.", min=0, max=0.5),
    ] = 0.0,
    shards: Annotated[
        int, typer.Option(help="Workers of the aggregator, each a process; 1 is an aggregator without.", min=1, max=64)
    ] = 1,
    core_each: Annotated[
        bool, typer.Option("--core-each", help="Bind each process of the aggregator to one core, in turn.")
    ] = False,
    keeper: Annotated[bool, typer.Option("--keeper", help="A run with a keeper, which opens sums.")] = False,
) -> Report:
    """Measure rounds through mosquitto and `shoal-aggregator serve`, with many device runtimes in a few processes.

    Training is replaced by a gradient that costs next to nothing; everything else is real. With --prepared no device
    runtimes run, so that the aggregator is measured alone.
    """
    from shoal_lab.bench.load import measurement

    if prepared and (churn or keeper):
        missing = "devices that could leave" if churn else "updates for a keeper"
        raise UsageError(
            f"--prepared has no {missing}", hint=f"leave out --prepared or --{'churn' if churn else 'keeper'}"
        )
    data = measurement.measure(
        devices,
        model=model,
        algorithm=algorithm,
        rounds=rounds,
        open_files=open_files,
        prepared=prepared,
        churn=churn,
        shards=shards,
        core_each=core_each,
        with_keeper=keeper,
    )
    return Report(data, measurement.words)


@_bench
def bench_soak(
    devices: Annotated[
        int, typer.Option(help="Device runtimes, each on its own connection.", min=1, max=limits.MAX_DEVICES)
    ] = 30,
    minutes: Annotated[float, typer.Option(help="Length of the soak.", min=0.1)] = 30.0,
    plot: Annotated[Path | None, typer.Option(help="Draw the figure: .png, .svg or .pdf.", dir_okay=False)] = None,
) -> Report:
    """Run rounds for many minutes and compare the aggregator's memory, files and times in the first and last third."""
    from shoal.report.plot import check
    from shoal.report.record import check_place
    from shoal_lab.bench.load import soak

    if plot is not None:
        check(plot)
        check_place(plot, "--plot")
    data = soak.measure(devices, minutes)
    return Report(data, soak.words, *([partial(soak.plot, [data], plot)] if plot else []))


@_bench
def bench_numerics(
    quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes.")] = False,
) -> Report:
    """Compare the CPU time of each numeric kernel with its ceiling and its naive form, on one thread."""
    from shoal_lab.bench.numerics import kernels

    return Report(kernels.measure(quick), kernels.words)


@_bench
def bench_privacy(
    mode: Annotated[
        list[str] | None,
        typer.Option(help="Mask mode, or sums for a run with a keeper; may be given again. All by default."),
    ] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer trials, no CNN, no d = 1e7.")] = False,
    data_dir: Annotated[
        Path | None, typer.Option(help="Attack MNIST, from its files in this folder.", file_okay=False)
    ] = None,
    html: HtmlFile = None,
) -> Report:
    """Measure the cost of each mask mode, the aggregator's computations under it, and each attack's success beside chance."""
    from shoal_lab.bench.privacy import benchmark
    from shoal_lab.bench.privacy.benchmark import page

    document, pictures = benchmark.measure(mode or (), quick=quick, data_dir=data_dir, progress=note)

    def write_page() -> None:
        if html is not None:
            write_atomic(html, page(document, pictures).encode(), mode=0o644)

    return Report(document, benchmark.words, write_page)


@_bench
def bench_poison(
    attack: Annotated[list[str] | None, typer.Option(help="Attack; may be given again. All by default.")] = None,
    rule: Annotated[list[str] | None, typer.Option(help="Robust rule; may be given again. All by default.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="digits, mnist, fashion-mnist or mnist-skewed; may be given again. By default all that are here."
        ),
    ] = None,
    strategy: Annotated[str, typer.Option(help="Algorithm.")] = "fedavg",
    seed: Annotated[list[int] | None, typer.Option(help="Seed; may be given again. 0 by default.", min=0)] = None,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of MNIST's files.", file_okay=False)] = None,
) -> Report:
    """Let three of ten devices attack, or up to three of twenty, and compare the honest ones under each robust rule."""
    from shoal_lab.bench import poison

    found = poison.measure(
        attacks=attack or (),
        rules=rule or (),
        data=data or (),
        strategy=strategy,
        seeds=seed or (0,),
        data_dir=data_dir,
        progress=note,
    )
    return Report(found, lambda document: poison.lines(document["rows"]))


@_bench
def bench_links(
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="digits (the demo's task) or a scenario of `shoal simulate wild --list`; may be given again. By default digits "
            "and three scenarios."
        ),
    ] = None,
) -> Report:
    """Compare precisions of updates and means in runs of CFL: bytes, accuracy over rounds, groups found."""
    from shoal_lab.bench import links

    return Report(links.measure(task or links.TASKS, progress=note), links.words)


@_bench
def bench_race(
    rounds: Annotated[int, typer.Option(help="Rounds that count, after one to warm up.", min=2)] = 12,
    install: Annotated[
        bool, typer.Option("--install", help="Install peers that are missing, about 1 GB each, below the cache folder.")
    ] = False,
) -> Report:
    """Compare CPU seconds a round with plain torch, pfl-research and Flower's simulation, on the same work and one core.

    100 devices with 200 samples of MNIST train an epoch a round. The systems take turns, and their accuracies are compared. Peers
    have environments of their own; those that are not installed are skipped.
    """
    from shoal_lab.bench.race import benchmark

    return Report(benchmark.measure(rounds=rounds, install=install, progress=note), benchmark.words)
