"""`shoal bench`: measurements of the real code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from shoal import limits
from shoal.errors import UsageError
from shoal.owner.runs.defaults import DEFAULT_MODE
from shoal.report.delivery import AsJson, BrokerName, HtmlFile, SaveFile, broker_name, deliver, stop_cleanly
from shoal.util.console import counted, forbid_inspection, mask_words, note, say
from shoal.util.files import write_atomic

if TYPE_CHECKING:
    from shoal_lab.bench.numerics.kernel_result import KernelResult

app = typer.Typer(help="Measurements of the real code.", no_args_is_help=True, rich_markup_mode=None)


@app.command("round")
def bench_round(
    devices: Annotated[int, typer.Option(help="Device processes.", min=1, max=200)] = 10,
    rounds: Annotated[int, typer.Option(help="Measured rounds.", min=3)] = 20,
    mode: Annotated[
        str, typer.Option(help="Mask mode: rotation, permutation, signed-permutation or none.")
    ] = DEFAULT_MODE,
    broker: BrokerName = "auto",
    save: SaveFile = None,
    json: AsJson = False,
) -> None:
    """Measure the seconds of a warm round: persistent device processes, a real broker, MLP 784-200-10, 600 samples each."""
    from shoal_lab.bench.rounds import measure

    forbid_inspection()
    stop_cleanly()
    data = measure(devices, broker_name(broker), rounds, mode).data()
    deliver(data, json, lambda: _show_round(data), save)


def _show_round(data: dict[str, Any]) -> None:
    say(
        f"{data['seconds_per_round_median']:.3f} s a round (median of {data['rounds']}, "
        f"{data['seconds_per_round_min']:.3f} to {data['seconds_per_round_max']:.3f}), "
        f"{counted(data['devices'], 'device')} on {data['broker']}, mask {mask_words(data['mode'])}"
    )
    say(
        f"{data['bound_ratio']:.1f} times what the gradient steps alone take here: {data['devices']} x "
        f"{1e3 * data['seconds_training_alone']:.1f} ms on {data['cores']} cores"
    )
    say(
        f"model {data['model_bytes']} bytes; peak memory: device {data['device_rss_mb_max']:.0f} MB, "
        f"aggregator {data['aggregator_rss_mb_max']:.0f} MB"
    )


@app.command("start")
def bench_start(
    starts: Annotated[int, typer.Option(help="Starts of each kind.", min=1, max=100)] = 5,
    broker: BrokerName = "auto",
    save: SaveFile = None,
    json: AsJson = False,
) -> None:
    """Measure the seconds from a device's start to its first loss and first update, without the run on its disk and with it."""
    from shoal_lab.bench.starts import measure

    forbid_inspection()
    stop_cleanly()
    data = measure(starts, broker_name(broker)).data()
    deliver(data, json, lambda: _show_starts(data), save)


def _show_starts(data: dict[str, Any]) -> None:
    for kind, words in (("first", "fetching the run"), ("again", "with the run on its disk")):
        for name, end in (
            (f"seconds_to_loss_{kind}", f"first loss ({data[f'cpu_seconds_to_loss_{kind}_median']:.2f} s of CPU)"),
            (f"seconds_{kind}", "first update"),
        ):
            times = data[name]
            say(
                f"{words}: {data[f'{name}_median']:.2f} s to the {end} (median of {data['starts']}, "
                f"{min(times):.2f} to {max(times):.2f})"
            )


@app.command("aggregator")
def bench_aggregator(
    devices: Annotated[
        list[int] | None, typer.Option(help="Fleet size; may be given again; default: 100, 1000 and 5000.", min=1)
    ] = None,
    algorithm: Annotated[str, typer.Option(help="fedavg, ifca, cfl, fedgroup, ...")] = "fedavg",
    save: SaveFile = None,
    json: AsJson = False,
) -> None:
    """Measure the CPU time of a round in the aggregator's service, for fleets of several sizes and 7850 coordinates.

    It leaves out the daemon's event queue, MQTT and the broker, acknowledgements on the wire, and the devices: uploads are
    made beforehand and handed to the service in one process. `shoal bench load` measures the whole daemon.
    """
    from shoal_lab.bench.load.aggregator import SIZES, measure
    from shoal_lab.bench.load.engine import measure_engine

    forbid_inspection()
    loads = [measure(n, algorithm).data() for n in devices or SIZES]
    engine = measure_engine(algorithm)
    data = {"algorithm": algorithm, "loads": loads, "engine": engine}

    def show() -> None:
        _show_loads(loads)
        _show_engine(engine)

    deliver(data, json, show, save)


def _show_loads(loads: list[dict[str, Any]]) -> None:
    say(
        f"{'devices':>7} {'CPU s a round':>14} {'CPU ms an upload':>17} {'CPU ms a presence':>18} {'bytes published':>16}"
    )
    for d in loads:
        say(
            f"{d['devices']:7} {d['cpu_seconds_per_round']:14.3f} {d['cpu_ms_per_upload']:17.2f} "
            f"{d['cpu_ms_per_presence']:18.2f} {d['published_bytes_per_round']:16}"
        )


@app.command("load")
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
    page: Annotated[
        bool, typer.Option("--page", help="Serve the fleet page, followed by one reader and scraped every second.")
    ] = False,
    shards: Annotated[
        int, typer.Option(help="Workers of the aggregator, each a process; 1 is an aggregator without.", min=1, max=64)
    ] = 1,
    core_each: Annotated[
        bool, typer.Option("--core-each", help="Bind each process of the aggregator to one core, in turn.")
    ] = False,
    save: SaveFile = None,
    json: AsJson = False,
) -> None:
    """Measure rounds through mosquitto and `shoal-aggregator serve`, with many device runtimes in a few processes.

    Training is replaced by a gradient that costs next to nothing; everything else is real. With --prepared no device
    runtimes run, so that the aggregator is measured alone.
    """
    from shoal_lab.bench.load.measurement import measure

    forbid_inspection()
    stop_cleanly()
    if churn and prepared:
        raise UsageError("--prepared has no devices that could leave", hint="leave out --prepared or --churn")
    found = measure(
        devices,
        model=_model(model),
        algorithm=algorithm,
        rounds=rounds,
        open_files=open_files,
        prepared=prepared,
        churn=churn,
        page=page,
        shards=shards,
        core_each=core_each,
    )
    data = found.data() | ({"page": True} if page else {})
    deliver(data, json, lambda: _show_load(data), save)


@app.command("soak")
def bench_soak(
    devices: Annotated[
        int, typer.Option(help="Device runtimes, each on its own connection.", min=1, max=limits.MAX_DEVICES)
    ] = 30,
    minutes: Annotated[float, typer.Option(help="Length of the soak.", min=0.1)] = 30.0,
    algorithm: Annotated[str, typer.Option(help="fedavg, ifca, cfl, fedgroup, ...")] = "fedavg",
    plot: Annotated[Path | None, typer.Option(help="Draw the figure: .png, .svg or .pdf.", dir_okay=False)] = None,
    save: SaveFile = None,
    json: AsJson = False,
) -> None:
    """Run rounds for many minutes and compare the aggregator's memory, files and times in the first and last third."""
    from shoal.report.plot import check
    from shoal.report.record import check_place
    from shoal_lab.bench.load import soak

    if plot is not None:
        check(plot)
        check_place(plot, "--plot")
    forbid_inspection()
    stop_cleanly()
    found = soak.measure(devices, minutes, algorithm)
    data = found.data()

    def write_figure() -> None:
        if plot is not None:
            soak.plot(found, plot)

    deliver(data, json, lambda: _show_soak(data), save, write_figure)


def _show_soak(data: dict[str, Any]) -> None:
    say(
        f"{counted(data['devices'], 'device')}, {data['minutes']:.1f} minutes, {counted(data['rounds'], 'round')}; "
        f"{counted(data['nacks'], 'NACK')}, {counted(data['reminders'], 'reminder')}"
    )
    say(f"{'':28} {'first third':>14} {'last third':>14}")
    for name, flat in data["flat"].items():
        first, last = data["first_third"][name], data["last_third"][name]
        say(f"{name:28} {first:14.4g} {last:14.4g}  {'flat' if flat else 'rises'}")


def _model(name: str) -> Any:
    if name not in ("logistic", "mlp"):
        raise UsageError(f"no model {name!r}", hint="use logistic or mlp")
    return name


def _show_load(data: dict[str, Any]) -> None:
    say(
        f"{counted(data['devices'], 'device')}, {data['algorithm']}, model of {data['model_bytes']} bytes, "
        f"{counted(data['rounds'], 'round')}: {data['seconds_per_round_median']:.3f} s a round (median)"
    )
    say(
        f"aggregator: {data['aggregator_cpu_ms_per_upload']:.2f} ms of CPU an upload, peak {data['aggregator_rss_mb_max']:.0f} "
        f"MB, {data['open_files_max']} open files; broker: {data['broker_cpu_s_per_round']:.3f} s of CPU a round"
    )
    say(
        f"its main thread: {data['main_thread_cpu_ms_per_upload']:.2f} ms of CPU an upload; broker and devices took "
        f"{100 * data['others_cpu_share']:.0f} % of all CPU time"
    )
    if "uploads_per_s_median" in data:
        say(f"{data['uploads_per_s_median']:.0f} uploads a second from the first one to the last answer (median)")
    say(
        f"uploads: {data['uploads_counted']} counted of {data['uploads_expected']}; "
        f"{counted(data['nacks'], 'NACK')}, {counted(data['reminders'], 'reminder')}"
    )
    if data.get("churn"):
        say(
            f"{100 * data['churn']:g} % of the devices left after each round: {data['uploads_fewest']} uploads in the smallest "
            f"round, {data['out_of_step']} out of step"
        )


def _show_engine(fleets: list[dict[str, Any]]) -> None:
    say("the engine's rules alone, without messages, seals and disk:")
    for d in fleets:
        say(
            f"{d['devices']:7} devices: {d['us_per_presence']:.1f} us a presence, {d['us_per_upload']:.1f} us an upload"
        )


@app.command("numerics")
def bench_numerics(
    quick: Annotated[bool, typer.Option("--quick", help="Smaller sizes.")] = False,
    save: SaveFile = None,
    json: AsJson = False,
) -> None:
    """Compare the CPU time of each numeric kernel with its ceiling and its naive form, on one thread."""
    import dataclasses

    from shoal_lab.bench.numerics.kernels import measure

    results = measure(quick)
    data = {"kernels": [dataclasses.asdict(r) for r in results]}
    deliver(data, json, lambda: _show_kernels(results), save)


def _show_kernels(results: list[KernelResult]) -> None:
    say(f"{'kernel':24} {'n':>7} {'d':>9} {'CPU s':>10}  {'ceiling x':>9}  {'naive x':>8}")
    for r in results:
        say(f"{r.name:24} {r.n:7} {r.d:9} {r.seconds:10.4f}  {r.ceiling_ratio:9.2f}  {r.naive_ratio:8.1f}")


@app.command("privacy")
def bench_privacy(
    mode: Annotated[list[str] | None, typer.Option(help="Mask mode; may be given again. All by default.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer trials, no CNN, no d = 1e7.")] = False,
    data_dir: Annotated[
        Path | None, typer.Option(help="Attack MNIST, from its files in this folder.", file_okay=False)
    ] = None,
    html: HtmlFile = None,
    save: SaveFile = None,
    json: AsJson = False,
) -> None:
    """Measure the cost of each mask mode, the aggregator's computations under it, and each attack's success beside chance."""
    from shoal_lab.bench.privacy.benchmark import measure
    from shoal_lab.bench.privacy.page import page
    from shoal_lab.bench.privacy.table import lines

    report = measure(mode or (), quick=quick, data_dir=data_dir, progress=note)

    def show() -> None:
        for line in lines(report):
            say(line)

    def write_page() -> None:
        if html is not None:
            write_atomic(html, page(report).encode(), mode=0o644)

    deliver(report.data(), json, show, save, write_page)


@app.command("poison")
def bench_poison(
    attack: Annotated[list[str] | None, typer.Option(help="Attack; may be given again. All by default.")] = None,
    rule: Annotated[list[str] | None, typer.Option(help="Robust rule; may be given again. All by default.")] = None,
    data: Annotated[
        list[str] | None,
        typer.Option(
            help="digits, mnist, fashion-mnist or mnist-skewed; may be given again. By default all that are here."
        ),
    ] = None,
    mode: Annotated[list[str] | None, typer.Option(help="Mask mode; may be given again. rotation by default.")] = None,
    strategy: Annotated[str, typer.Option(help="Algorithm.")] = "fedavg",
    seed: Annotated[list[int] | None, typer.Option(help="Seed; may be given again. 0 by default.", min=0)] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of each run.", min=1)] = 100,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of MNIST's files.", file_okay=False)] = None,
    save: SaveFile = None,
    json: AsJson = False,
) -> None:
    """Let three of ten devices attack, or up to three of twenty, and compare the honest ones under each robust rule."""
    from shoal_lab.bench.poison import benchmark
    from shoal_lab.bench.poison.page import lines

    options = benchmark.Options(
        attacks=tuple(attack or ()),
        rules=tuple(rule or ()),
        data=tuple(data or ()),
        modes=tuple(mode or ()),
        strategy=strategy,
        seeds=tuple(seed or (0,)),
        rounds=rounds,
        data_dir=data_dir,
    )
    found = benchmark.data(benchmark.measure(options, note), options)

    def show() -> None:
        for line in lines(found["rows"]):
            say(line)

    deliver(found, json, show, save)


@app.command("links")
def bench_links(
    task: Annotated[
        list[str] | None,
        typer.Option(
            help="digits (the demo's task) or a scenario of `shoal simulate wild --list`; may be given again. By default digits "
            "and three scenarios."
        ),
    ] = None,
    precision: Annotated[
        list[str] | None, typer.Option(help="Precision of both ways; may be given again. All by default.")
    ] = None,
    algorithm: Annotated[str, typer.Option(help="Algorithm.")] = "cfl",
    seed: Annotated[list[int] | None, typer.Option(help="Seed; may be given again. 0 by default.", min=0)] = None,
    rounds: Annotated[int, typer.Option(help="Rounds of each run.", min=1)] = 60,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of MNIST's files.", file_okay=False)] = None,
    save: SaveFile = None,
    json: AsJson = False,
) -> None:
    """Compare precisions of updates and means: bytes, accuracy over rounds, groups found."""
    from shoal_lab.bench import links

    options = links.Options(
        tasks=tuple(task or links.DEFAULT_TASKS),
        precisions=tuple(precision or ()),
        algorithm=algorithm,
        rounds=rounds,
        seeds=tuple(seed or (0,)),
        data_dir=data_dir,
    )
    found = links.data(links.measure(options, note), options)

    def show() -> None:
        for line in links.lines(found["rows"]):
            say(line)

    deliver(found, json, show, save)


@app.command("race")
def bench_race(
    task: Annotated[
        list[str] | None, typer.Option(help="mlp, logistic or cnn; may be given again. All by default.")
    ] = None,
    system: Annotated[
        list[str] | None,
        typer.Option(help="shoal, torch, pfl-research or flower; may be given again. All by default."),
    ] = None,
    rounds: Annotated[int, typer.Option(help="Rounds that count, after one to warm up.", min=2)] = 12,
    install: Annotated[
        bool, typer.Option("--install", help="Install peers that are missing, about 1 GB each, below the cache folder.")
    ] = False,
    seed: Annotated[int, typer.Option(help="Seed of the devices' samples and the starting models.", min=0)] = 0,
    data_dir: Annotated[Path | None, typer.Option(help="Folder of MNIST's files.", file_okay=False)] = None,
    save: SaveFile = None,
    json: AsJson = False,
) -> None:
    """Compare CPU seconds a round with plain torch, pfl-research and Flower's simulation, on the same work and one core.

    100 devices with 200 samples of MNIST train an epoch a round. The systems take turns, and their accuracies are compared. Peers
    have environments of their own; those that are not installed are skipped.
    """
    from shoal_lab.bench.race import benchmark
    from shoal_lab.bench.race.tasks import TASKS

    stop_cleanly()
    options = benchmark.Options(
        tasks=tuple(task or TASKS),
        systems=tuple(system or benchmark.SYSTEMS),
        rounds=rounds,
        install=install,
        data_dir=data_dir,
        seed=seed,
    )
    found = benchmark.data(*benchmark.measure(options, note), options)

    def show() -> None:
        for line in benchmark.lines(found):
            say(line)

    deliver(found, json, show, save)
