"""`shoal demo`: run FedAvg, CFL and IFCA on a broker, an aggregator and twenty devices as real processes."""

from __future__ import annotations

import dataclasses
import hashlib
import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Protocol

import numpy as np

from shoal.demo.data import Hidden, hide_groups, load_images
from shoal.demo.seen import Seen, look, stored_update
from shoal.owner.runs.plan import origins_needed, round_mask
from shoal.owner.task_compiler.builtin import build
from shoal.owner.task_compiler.compile import compile_task
from shoal.owner.task_compiler.origin import make_origins
from shoal.page.history import RunHistory, history_of
from shoal.page.page import still
from shoal.protocol.documents import RunPlan
from shoal.protocol.recipe import LocalTraining, Recipe, as_settings
from shoal.simulation.engine.metrics import adjusted_rand
from shoal.simulation.process_fleet import Stage, StageError
from shoal.task.bundle import TaskBundle
from shoal.transport.local_broker import start_broker
from shoal.types import Float32Vector

HIDDEN_UNITS: Final = 64
LOCAL: Final = LocalTraining(epochs=5, batch_size=8, lr=0.1)
RUN_TIMEOUT_S: Final = 300.0
POLL_S: Final = 0.1
SLOW_HINT: Final = "is this machine busy? try again; with mosquitto installed the demo needs less of it"
LOOK_ROUND: Final = 5
"""Round from which the demo reads updates from the aggregator's disk."""
STATUS_WAIT_S: Final = 5.0
OPTIONS: Final = (
    Recipe("fedavg", rounds=30, local=LOCAL),
    Recipe("cfl", rounds=60, local=LOCAL),
    Recipe(
        "ifca",
        as_settings({"k": 4, "restarts": 6, "restart_rounds": 8}),
        rounds=64,
        local=LOCAL,
    ),
)
"""Options of the three runs, with the same local training; the others are a fleet's defaults."""


DEFAULT_MODE: Final = OPTIONS[0].mode
RoundUpdate = tuple[int, Float32Vector]
"""A round and a masked update (d,) of it."""


@dataclass(frozen=True, slots=True)
class RunResult:
    """One algorithm's figures; accuracy in percent over all devices' test shares, in the final round."""

    algorithm: str
    accuracy: float
    ari: float
    clusters: int
    rounds: int
    seconds_per_round: float
    bytes_up_per_device_round: float
    bytes_down_per_device_round: float
    mode: str


@dataclass(frozen=True, slots=True)
class DemoResult:
    """All figures of the demo; ``pages`` are the runs' histories for the fleet page."""

    broker: str
    devices: int
    groups: int
    runs: tuple[RunResult, ...]
    device_rss_mb_max: float
    torch_loaded: bool
    aggregator_rss_mb_max: float
    seen: Seen
    side: int
    pages: tuple[Mapping[str, Any], ...] = ()

    def page(self) -> bytes:
        """Return the fleet page of the runs."""
        return still("Shoal's demo", self.pages, note=f"{self.devices} devices in {self.groups} hidden groups.")

    def data(self) -> dict[str, Any]:
        """Return the figures as `--json` prints them."""
        return {
            "broker": self.broker,
            "devices": self.devices,
            "groups": self.groups,
            "runs": [{f: getattr(r, f) for f in RunResult.__slots__} for r in self.runs],
            "device": {"rss_mb_max": self.device_rss_mb_max, "torch_loaded": self.torch_loaded},
            "aggregator": {"rss_mb_max": self.aggregator_rss_mb_max},
            "seen": {
                "cosine": self.seen.cosine,
                "share_in_place": self.seen.share_in_place,
                "reading_psnr_db_masked": self.seen.masked.psnr_db,
                "reading_psnr_db_none": self.seen.none.psnr_db,
            },
        }


class Progress(Protocol):
    """Receives the progress of the demo."""

    def stage(self, text: str) -> None:
        """A step that takes a moment begins; ``text`` names it."""

    def round(self, algorithm: str, done: int, total: int, record: dict[str, Any] | None) -> None:
        """``done`` of ``total`` rounds are closed; ``record`` is the last one's, None before the first."""


def run_demo(
    *,
    devices: int,
    skew: str,
    data: str,
    data_dir: Path | None,
    seed: int,
    progress: Progress,
    mode: str = DEFAULT_MODE,
) -> DemoResult:
    """Run the demo in mask mode ``mode`` and end every process that it started.

    Raises:
        DataError: MNIST's files are not in ``data_dir``.
        StageError: a program ended early, or a run took too long.
    """
    x, y, side = load_images(data, data_dir)
    hidden = hide_groups(x, y, side, devices=devices, skew=skew, seed=seed)
    progress.stage("compiling the task: torch on this machine only, ONNX for the devices")
    sizes = {"inputs": side * side, "hidden": HIDDEN_UNITS, "classes": 10}
    made = build("mlp", **sizes)
    bundle = compile_task(made.model, made.loss, made.example, name="digits", kind=made.kind, hyper=LOCAL)
    with tempfile.TemporaryDirectory(prefix="shoal-demo-") as folder:
        root = Path(folder)
        (root / "broker").mkdir()
        (root / "data").mkdir()
        sources = hidden.save(root / "data")
        names = tuple(f"dev-{i:02d}" for i in range(devices))
        progress.stage("starting the broker")
        with start_broker("auto", root / "broker") as running:
            progress.stage(f"making keys for the owner, the aggregator and {devices} devices")
            with Stage(root / "fleet", running.url, names) as stage:
                progress.stage(f"starting the aggregator and {devices} devices on {running.kind}")
                stage.start_aggregator()
                for name, source in zip(names, sources, strict=True):
                    stage.start_device(name, source)
                options = (dataclasses.replace(o, mode=mode) for o in OPTIONS)
                runs = tuple(_one_run(stage, bundle, sizes, o, seed, hidden, progress) for o in options)
                return _result(stage, bundle, sizes, hidden, runs, running.kind, seed)


def plan_seed(seed: int) -> int:
    """Return a seed for the plan. It differs from the origins' seed, because the aggregator reads the plan."""
    return int.from_bytes(hashlib.sha256(b"shoal/demo/plan" + str(seed).encode()).digest()[:4], "little")


def _one_run(
    stage: Stage,
    bundle: TaskBundle,
    sizes: dict[str, int],
    options: Recipe,
    seed: int,
    hidden: Hidden,
    progress: Progress,
) -> tuple[RunPlan, RoundUpdate | None, RunResult, Mapping[str, Any]]:
    # The demo's origins follow from its seed, so that it can be repeated; a fleet's come from the system's random source.
    origins = make_origins("mlp", origins_needed(options), seed, manifest=bundle.manifest, **sizes)
    plan = stage.add_run(bundle, origins, dataclasses.replace(options, seed=plan_seed(seed)))
    records, view = _watch(stage, plan, progress)
    final = records[-1]
    clusters = [final["clusters"].get(d, -1) for d in stage.devices]
    figures = [_ended(stage, d, plan.run) for d in stage.devices]
    rounds = sum(f["rounds"] for f in figures)
    result = RunResult(
        algorithm=plan.recipe.algorithm,
        accuracy=100.0 * final["correct"] / max(1, final["tested"]),
        ari=adjusted_rand(clusters, hidden.groups),
        clusters=len(set(clusters)),
        rounds=len(records) - 1,
        # Without the first round, in which devices still download the run, and the final one, in which none trains.
        seconds_per_round=float(np.median([r["seconds"] for r in records[1:-1]])),
        bytes_up_per_device_round=sum(f["bytes_up"] for f in figures) / rounds,
        bytes_down_per_device_round=sum(f["bytes_down"] for f in figures) / rounds,
        mode=plan.recipe.mode,
    )
    return plan, view, result, _page_of(plan, records, result)


def _page_of(plan: RunPlan, records: list[dict[str, Any]], result: RunResult) -> Mapping[str, Any]:
    """Return a run's history for the fleet page, with how well its clusters fit the hidden groups."""
    agreement = [("Agreement with the hidden groups", f"{result.ari:.2f} of 1 (ARI)")]
    run = RunHistory(
        name=plan.recipe.algorithm, algorithm=plan.recipe.algorithm, rounds=plan.recipe.rounds, results=agreement
    )
    return history_of(run, records).document()


def _watch(stage: Stage, plan: RunPlan, progress: Progress) -> tuple[list[dict[str, Any]], RoundUpdate | None]:
    """Wait for the end of the run, reporting progress; return its rounds and a masked update from the aggregator's disk.

    Raises:
        StageError: the run took too long, or a program ended.
    """
    end = time.monotonic() + RUN_TIMEOUT_S
    view = None
    while not stage.finished(plan.run):
        stage.check()
        if time.monotonic() > end:
            said = stage.programs["aggregator"].tail()
            raise StageError(f"run {plan.run} did not finish in {RUN_TIMEOUT_S:g} s\n{said}", hint=SLOW_HINT)
        records = stage.records(plan.run)
        progress.round(plan.recipe.algorithm, len(records), plan.recipe.rounds + 1, records[-1] if records else None)
        if len(records) >= LOOK_ROUND:
            # Files of closed rounds are removed, so a poll may find no update; the last one found is used.
            seen = stored_update(stage.aggregator_dir / f"run-{plan.run:06d}", plan.length)
            view = view if seen is None else seen
        time.sleep(POLL_S)
    records = stage.records(plan.run)
    progress.round(plan.recipe.algorithm, len(records), plan.recipe.rounds + 1, records[-1])
    return records, view


def _ended(stage: Stage, device: str, run: int) -> dict[str, Any]:
    """Return a device's figures of a run that has just ended, once it has written them."""
    end = time.monotonic() + STATUS_WAIT_S
    while time.monotonic() < end:
        figures = stage.device_status(device).get("ended", {}).get(str(run))
        if figures is not None:
            return dict(figures)
        time.sleep(0.02)
    stage.check()
    raise TimeoutError(f"{device} did not report the end of run {run}")


def _result(
    stage: Stage,
    bundle: TaskBundle,
    sizes: dict[str, int],
    hidden: Hidden,
    runs: tuple[tuple[RunPlan, RoundUpdate | None, RunResult, Mapping[str, Any]], ...],
    broker: str,
    seed: int,
) -> DemoResult:
    plan, (round_, view) = next((p, v) for p, v, _, _ in runs if v is not None)
    theta = make_origins("mlp", 1, seed, manifest=bundle.manifest, **sizes)[0]
    seen = look(
        view,
        round_mask(stage.fleet, plan, round_),
        bundle,
        theta,
        hidden.x[0][0],
        int(hidden.y[0][0]),
    )
    return DemoResult(
        broker=broker,
        devices=len(stage.devices),
        groups=len(set(hidden.groups)),
        runs=tuple(r for _, _, r, _ in runs),
        device_rss_mb_max=max(stage.programs[d].peak_rss_mb() for d in stage.devices),
        torch_loaded=any(stage.device_status(d).get("torch_loaded", False) for d in stage.devices),
        aggregator_rss_mb_max=stage.programs["aggregator"].peak_rss_mb(),
        seen=seen,
        side=hidden.side,
        pages=tuple(page for *_, page in runs),
    )
