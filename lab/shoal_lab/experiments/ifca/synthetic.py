"""ifca-synthetic: chance of success over R, m and n on mixtures of linear models (Ghosh et al., section 6.1, Fig. 2).

A trial draws the true models and the data once, then runs IFCA with gradient averaging (option I, divided by all m)
from ten random starts with three step sizes each. It is a success if one of the thirty ends within 0.6 sigma of the
truth. Points, noise levels and R as the value of a coordinate are those of the authors' public code: with R as the
norm, a model of zeros is within 0.6 sigma for every R up to 0.6 sigma.
"""

from __future__ import annotations

import dataclasses
import hashlib
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch

from shoal.errors import UsageError
from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Population, Shard
from shoal.simulation.engine.masks import RoundMasks
from shoal.simulation.engine.metrics import purity
from shoal.simulation.engine.simulate import simulate
from shoal.simulation.trainers.networks import Linear
from shoal.types import Segment
from shoal_lab.experiments.common.experiment import Options, Progress, Result, Study, parsed
from shoal_lab.experiments.common.paper import paper_options
from shoal_lab.experiments.ifca.linear import Batch, Point, make_mixture, one_at_a_time, random_starts, run_starts

BATCHES: Final = (2, 3, 5)
"""Numbers of starts that are run together; a trial that succeeds with the first batch skips the others."""

SUCCESS: Final = 0.6
"""Largest mean distance of a success, in units of sigma."""

RATES: Final[Mapping[int, tuple[float, ...]]] = {2: (1.0, 0.1, 0.01), 4: (2.0, 1.0, 0.5)}
DEFAULT_TRIALS: Final[Mapping[int, int]] = {2: 10, 4: 5}
PAPER_TRIALS: Final = 40


@dataclass(frozen=True, slots=True)
class Curve:
    """One panel of the figure.

    Attributes:
        k: groups; axis: the parameter that varies along a line, ``R`` or ``m``; line: the one that varies between lines.
        fixed: the other parameters of its points.
        grids: axis values and line values by grid name.
    """

    k: int
    axis: str
    line: str
    fixed: Mapping[str, float]
    grids: Mapping[str, tuple[tuple[float, ...], tuple[float, ...]]]


_SCALES: Final = (0.1, 0.25, 0.5, 0.75, 1.0)
_NOISES: Final = (0.1, 0.2, 0.4)
_SIZES: Final = (50.0, 100.0, 200.0)
CURVES: Final[Mapping[str, Curve]] = {
    "a": Curve(
        2, "R", "sigma", {"m": 100, "n": 100}, {"default": ((0.1, 0.25, 0.5), (0.1, 0.4)), "paper": (_SCALES, _NOISES)}
    ),
    "b": Curve(
        4, "R", "sigma", {"m": 400, "n": 100}, {"default": ((0.1, 0.25, 0.5), (0.1, 0.4)), "paper": (_SCALES, _NOISES)}
    ),
    "c": Curve(
        2,
        "m",
        "n",
        {"R": 0.1, "sigma": 0.1},
        {"default": ((50, 100, 200), (50, 100)), "paper": ((50, 70, 100, 150, 200, 300, 400), _SIZES)},
    ),
    "d": Curve(
        4,
        "m",
        "n",
        {"R": 0.5, "sigma": 0.1},
        {"default": ((100, 200, 400), (50, 100)), "paper": ((100, 200, 300, 400, 800), _SIZES)},
    ),
}


@dataclass(frozen=True, slots=True)
class Trial:
    """One trial.

    Attributes:
        best: least mean distance of all starts that were run; success: whether it is within 0.6 sigma.
        starts: first models that were tried; steps: iterations of all starts and step sizes together.
        purity: of the best start's clusters.
    """

    best: float
    success: bool
    starts: int
    steps: int
    purity: float


def points_of(curve: Curve, options: Options) -> Iterator[tuple[dict[str, float], Point]]:
    """Yield each point of a curve, line by line: its R, sigma, m and n, and the `Point` to draw mixtures from."""
    along, across = curve.grids[options.grid]
    forced = {"m": options.devices, "n": options.samples}
    seen = set()
    for line in across:
        for value in along:
            at = {**curve.fixed, curve.axis: value, curve.line: line}
            at |= {name: size for name, size in forced.items() if size is not None}
            if tuple(at.values()) in seen:
                continue
            seen.add(tuple(at.values()))
            m, n = int(at["m"]), int(at["n"])
            if m < curve.k or m % curve.k:
                raise UsageError(f"{m} devices can't be split into {curve.k} equal groups")
            point = Point(
                k=curve.k,
                m=m,
                n=n,
                scale=at["R"],
                sigma=at["sigma"],
                d=options.values["dimension"],
                norm=options.values["norm"],
            )
            yield {"R": at["R"], "sigma": at["sigma"], "m": m, "n": n}, point


def run_trial(point: Point, number: int, options: Options) -> Trial:
    """Run trial ``number`` of a point until its first success or until no start is left."""
    most = options.values["starts"]
    mixture = make_mixture(point, (options.seed, number), options.device)
    starts = random_starts(most, point.k, point.d, (options.seed, number), options.device)
    rates = torch.tensor(RATES[point.k], device=options.device)
    threshold = SUCCESS * point.sigma
    best, pure, begun, steps = float("inf"), 0.0, 0, 0
    for some in _batches(most):
        chosen = starts[begun : begun + some]
        endings = run_starts(
            mixture,
            chosen.repeat_interleave(len(rates), 0),
            rates.repeat(some),
            iterations=options.rounds or 0,
            threshold=threshold,
            masks=round_masks(point.d, options, f"ifca-synthetic {number} {begun}".encode()),
            settle=options.values["settle"],
            first_success=options.values["settle"],
        )
        begun += some
        steps += int(endings.iterations.sum())
        least = int(endings.distances.argmin())
        if float(endings.distances[least]) < best:
            best = float(endings.distances[least])
            pure = purity(endings.choices[least].tolist(), mixture.groups.tolist())
        if best <= threshold:
            break
    return Trial(best, best <= threshold, begun, steps, pure)


def _batches(starts: int) -> Iterator[int]:
    left = starts
    for size in (*BATCHES, starts):
        if left:
            yield min(size, left)
        left -= min(size, left)


def round_masks(d: int, options: Options, run_id: bytes) -> RoundMasks | None:
    """Return the masks of a run's rounds on ``d`` coordinates; None if there is no mask."""
    if options.mask == "none":
        return None
    return RoundMasks(
        fleet="simulated",
        run_id=run_id,
        seed=options.seed,
        task_digest=hashlib.sha256(b"ifca-synthetic").digest(),
        mode=options.mask,
        segments=(Segment("cluster", d),),
    )


def cost(point: Point, options: Options, iterations: int = 3) -> dict[str, float]:
    """Return the CPU seconds of one iteration of one start, computed in three ways, and the speed-up of the batch.

    ``batched_s``: all starts and step sizes of a trial together, none stopped early. ``simulator_s``: one run at a
    time through the strategy and the simulator's plain loop. ``numpy_s``: one run at a time in bare matrix-vector
    products, without a strategy. Stopping early, and at a trial's first success, saves on top.
    """
    mixture = make_mixture(point, (options.seed, 0))
    starts = random_starts(options.values["starts"], point.k, point.d, (options.seed, 0))
    rates = torch.tensor(RATES[point.k])
    batch = Batch(mixture, starts.repeat_interleave(len(rates), 0), rates.repeat(len(starts)))
    batch.step()
    begin_s = time.process_time()
    for _ in range(iterations):
        batch.step()
    batched_s = (time.process_time() - begin_s) / iterations / len(batch.rates)
    begin_s = time.process_time()
    one_at_a_time(mixture, starts[0], 0.1, iterations)
    numpy_s = (time.process_time() - begin_s) / iterations
    population = Population(tuple(Shard(x.numpy(), y.numpy()) for x, y in zip(mixture.x, mixture.y, strict=True)))
    recipe = LocalTraining(epochs=0, steps=1, batch_size=0, lr=0.1)
    sim_options = paper_options(rounds=iterations, local=recipe, mode=options.mask, evaluate_every=0, trainer="loop")
    settings = {"k": str(point.k), "option": "gradient"}
    run_ = simulate("ifca", settings, population, Linear(point.d), sim_options, start=starts[0].numpy())
    return {
        "batched_s": batched_s,
        "simulator_s": run_.cpu_seconds_per_round,
        "numpy_s": numpy_s,
        "simulator_ratio": run_.cpu_seconds_per_round / batched_s,
        "numpy_ratio": numpy_s / batched_s,
    }


def run(study: Study, options: Options, progress: Progress) -> Result:
    """Run the chosen curves, a trial at a time."""
    values = options.values
    names = values["curves"]
    if not names or not set(names) <= set(CURVES):
        raise UsageError(f"curves {names!r}: there are {''.join(CURVES)}")
    settle = options.grid == "default" if values["settle"] == "auto" else parsed("settle", values["settle"], True)
    options = dataclasses.replace(options, values={**values, "settle": settle})
    if values["starts"] < 1:
        raise UsageError("a trial needs at least one start")
    panels = {name: list(points_of(CURVES[name], options)) for name in names}
    trials = {name: values["trials"] or _trials(CURVES[name].k, options.grid) for name in names}
    total = sum(len(points) * trials[name] for name, points in panels.items())
    success: dict[str, Any] = {}
    history: list[dict[str, Any]] = []
    done = steps = 0
    began_s = time.process_time()
    for name, points in panels.items():
        measured = []
        for at, point in points:
            results = []
            for number in range(trials[name]):
                results.append(run_trial(point, number, options))
                done += 1
                progress.round("ifca", done, total, {"curve": name, **at, "success": results[-1].success})
            steps += sum(t.steps for t in results)
            measured.append({**at, **_summary(results)})
            history.append({"round": len(history) + 1, "curve": name, **measured[-1]})
        success[name] = {
            "k": CURVES[name].k,
            "axis": CURVES[name].axis,
            "line": CURVES[name].line,
            "points": measured,
            "rises": _rises(measured, CURVES[name]),
        }
    spent_s = time.process_time() - began_s
    extra: dict[str, Any] = {"success": success, "cpu_seconds": spent_s, "start_iterations": steps}
    if values["cost"]:
        extra["cost"] = {name: cost(points[-1][1], options) for name, points in panels.items()}
    return study.result(
        options,
        {
            "grid": options.grid,
            "trials": trials,
            "rates": {str(k): list(v) for k, v in RATES.items()},
            "success_within_sigma": SUCCESS,
            "R_is": "norm" if values["norm"] else "coordinate",
        },
        accuracy=None,
        clusters=max(CURVES[name].k for name in names),
        cpu_seconds_per_round=spent_s / max(steps, 1),
        history=history,
        extra=extra,
    )


def _trials(k: int, grid: str) -> int:
    return PAPER_TRIALS if grid == "paper" else DEFAULT_TRIALS[k]


def _summary(results: list[Trial]) -> dict[str, float]:
    wins = sum(t.success for t in results)
    return {
        "trials": len(results),
        "successes": wins,
        "probability": wins / len(results),
        "best": min(t.best for t in results),
        "purity": sum(t.purity for t in results) / len(results),
        "starts": sum(t.starts for t in results),
    }


def _rises(points: list[dict[str, Any]], curve: Curve) -> dict[str, bool]:
    """Return whether each line ends higher than it begins, or is at 1 throughout, by the line's value."""
    lines: dict[str, list[float]] = {}
    for point in sorted(points, key=lambda p: float(p[curve.axis])):
        lines.setdefault(f"{point[curve.line]:g}", []).append(point["probability"])
    return {line: ps[-1] > ps[0] or min(ps) == 1 for line, ps in lines.items()}
