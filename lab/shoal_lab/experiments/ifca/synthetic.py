"""ifca-synthetic: chance of success over R, m and n on mixtures of linear models (Ghosh et al., section 6.1, Fig. 2).

A trial draws the true models and the data once, then runs IFCA with gradient averaging (option I, divided by all m)
from ten random starts with three step sizes each. It is a success if one of the thirty ends within 0.6 sigma of the
truth. Points, noise levels and R as the value of a coordinate are those of the authors' public code: with R as the
norm, a model of zeros is within 0.6 sigma for every R up to 0.6 sigma.

Mixtures of linear models, and many starts of IFCA on one of them at once (Ghosh et al., sections 5.1 and 6.1).

A start is k first models and a step size. All starts of a trial share the data, so their residuals are one matrix
product a block of devices, and the block is read once for scoring and for the gradients. The semantics are those of
`aggregator.strategies.ifca.strategy` with ``option = gradient``: each device takes the model of least loss on its own samples
(the lowest index on ties), its update is one full-batch step of the mean squared error, and each model moves by the mean of
those who chose it times their share of all m machines (Alg. 1, line 14), which the server computes on masked updates.

Letters in shapes: r starts, k models, m devices, n samples a device, d coordinates, and c devices of a block.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from crypto.mask.derivation import MaskKey
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


def run_trial(point: Point, number: int, options: Options) -> dict[str, Any]:
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
    return {"best": best, "success": best <= threshold, "starts": begun, "steps": steps, "purity": pure}


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
    usual = dict.fromkeys(DEFAULT_TRIALS, PAPER_TRIALS) if options.grid == "paper" else DEFAULT_TRIALS
    trials = {name: values["trials"] or usual[CURVES[name].k] for name in names}
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
                progress.round("ifca", done, total, {"curve": name, **at, "success": results[-1]["success"]})
            steps += sum(t["steps"] for t in results)
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


def _summary(results: list[dict[str, Any]]) -> dict[str, float]:
    total = {name: sum(t[name] for t in results) for name in ("success", "purity", "starts")}
    return {
        "trials": len(results),
        "successes": total["success"],
        "probability": total["success"] / len(results),
        "best": min(t["best"] for t in results),
        "purity": total["purity"] / len(results),
        "starts": total["starts"],
    }


def _rises(points: list[dict[str, Any]], curve: Curve) -> dict[str, bool]:
    """Return whether each line ends higher than it begins, or is at 1 throughout, by the line's value."""
    lines: dict[str, list[float]] = {}
    for point in sorted(points, key=lambda p: float(p[curve.axis])):
        lines.setdefault(f"{point[curve.line]:g}", []).append(point["probability"])
    return {line: ps[-1] > ps[0] or min(ps) == 1 for line, ps in lines.items()}


BLOCK_BYTES: Final = 4 << 20
"""Bytes of samples per block: small enough for a core's share of the cache."""

WINDOW: Final = 10
"""Iterations between two checks of whether a start can still succeed or fail."""

DIVERGED: Final = 1000.0
"""A start is abandoned when its distance to the truth has grown by this factor."""


@dataclass(frozen=True, slots=True, eq=False)
class Mixture:
    """m devices with n samples each of k linear models.

    Attributes:
        x: shape (m, n, d), float32; y: shape (m, n), float32: y = <x, truth of the device's group> + noise.
        truth: shape (k, d), float32; groups: shape (m,), int64, equal in size.
    """

    x: Tensor
    y: Tensor
    truth: Tensor
    groups: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Endings:
    """The final states of r starts.

    Attributes:
        thetas: shape (r, k, d), float32, the last models.
        choices: shape (r, m), int64, the devices' last choices.
        distances: shape (r,), float32, mean distance to the truth under the best matching; inf if the start diverged.
        iterations: shape (r,), int64, iterations of each start.
    """

    thetas: Tensor
    choices: Tensor
    distances: Tensor
    iterations: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """One point of a curve.

    Attributes:
        k: groups; m: devices, a multiple of k; n: samples a device; d: coordinates.
        scale: R; sigma: standard deviation of the noise.
        norm: R is the l2 norm of each true model, as the paper's text has it, and not the value of its coordinates
            that are not 0, as the authors' code has it.
    """

    k: int
    m: int
    n: int
    scale: float
    sigma: float
    d: int = 1000
    norm: bool = False


def make_mixture(point: Point, seed: tuple[int, ...], device: str = "cpu") -> Mixture:
    """Return a mixture whose true coordinates are 0 or R, each with probability one half.

    Points that differ only in R and sigma use the same draws otherwise, so that a curve over R shows the effect of R alone.

    Args:
        point: the mixture's parameters.
        seed: seed of every draw.
        device: torch device of the tensors.
    """
    m, n, d, k = point.m, point.n, point.d, point.k
    rng = np.random.default_rng([*seed, m, n, d, k])
    bits = rng.integers(0, 2, (k, d)).astype(np.float32)
    length = np.sqrt(np.maximum(bits.sum(1, keepdims=True), 1)) if point.norm else np.float32(1)
    truth = (bits * (point.scale / length)).astype(np.float32)
    x = rng.standard_normal((m, n, d), np.float32)
    noise = rng.standard_normal((m, n), np.float32) * np.float32(point.sigma)
    groups = np.arange(m) * k // m
    y = np.einsum("mnd,md->mn", x, truth[groups]) + noise
    return Mixture(*(torch.from_numpy(a).to(device) for a in (x, y, truth, groups)))


def random_starts(count: int, k: int, d: int, seed: tuple[int, ...], device: str = "cpu") -> Tensor:
    """Return first models (count, k, d), float32: each coordinate 0 or 1 with probability one half (section 6.1)."""
    draws = np.random.default_rng([*seed, k, d]).integers(0, 2, (count, k, d))
    return torch.from_numpy(draws.astype(np.float32)).to(device)


def matched_distance(thetas: Tensor, truth: Tensor) -> Tensor:
    """Return (1/k) sum_j |theta_j - theta*_pi(j)| (r,) for the best permutation pi.

    Args:
        thetas: shape (r, k, d).
        truth: shape (k, d).
    """
    k = len(truth)
    costs = torch.linalg.vector_norm(thetas[:, :, None] - truth, dim=3)
    every = torch.tensor(list(itertools.permutations(range(k))), device=thetas.device)
    matched: Tensor = costs[:, torch.arange(k, device=thetas.device), every].mean(2).amin(1)
    return matched


def permutation_of(key: MaskKey, d: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return the gathers (d,) that mask and unmask: masked = vector[first], vector = masked[second].

    Read off the real mask by masking 0, 1, ..., d - 1, which float32 holds exactly.
    """
    masked = np.empty(d, np.float32)
    key.apply(np.arange(d, dtype=np.float32), masked)
    order = masked.astype(np.int64)
    if not np.array_equal(np.sort(order), np.arange(d)):
        raise ValueError("the batched linear experiment supports only masks that permute coordinates")
    return order, np.argsort(order)


def one_at_a_time(
    mixture: Mixture, start: Tensor, rate: float, iterations: int
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the models (k, d) and choices (m,) of one start, computed device by device and model by model.

    The reference that `Batch` must equal, and the baseline for its speed. ``start`` has shape (k, d).
    """
    x, y = mixture.x.cpu().numpy(), mixture.y.cpu().numpy()
    thetas = start.cpu().numpy().copy()
    m, n, _ = x.shape
    choices = np.zeros(m, np.int64)
    for _ in range(iterations):
        sums = np.zeros_like(thetas)
        for i in range(m):
            residuals = [x[i] @ theta - y[i] for theta in thetas]
            choices[i] = j = int(np.argmin([np.mean(r * r) for r in residuals]))
            sums[j] += x[i].T @ residuals[j] * np.float32(2 / n)
        thetas -= np.float32(rate / m) * sums
    return thetas, choices


class Batch:
    """r starts of IFCA on one mixture, one `step` an iteration.

    Attributes:
        models: shape (r, k, d), float32, as devices hold them.
        moves: shape (r, k, d), float32, masked, of the last step: the means that the server relays.
        choices: shape (r, m), int64, of the last step.
    """

    def __init__(self, mixture: Mixture, starts: Tensor, rates: Tensor, masks: RoundMasks | None = None) -> None:
        """Begin at ``starts`` (r, k, d) with the step sizes ``rates`` (r,); without ``masks`` the server sees clear moves."""
        self.mixture = mixture
        self.models = starts
        self.moves = torch.zeros_like(starts)
        self.rates = rates
        self.masks = masks
        self.round = 0
        m, n, d = mixture.x.shape
        self.block = max(1, BLOCK_BYTES // (4 * n * d))
        self.choices = torch.zeros((len(starts), m), dtype=torch.int64, device=starts.device)

    def keep(self, chosen: Tensor) -> None:
        """Drop the starts that ``chosen`` (r,), bool, leaves out."""
        self.models, self.moves = self.models[chosen], self.moves[chosen]
        self.rates, self.choices = self.rates[chosen], self.choices[chosen]

    def step(self) -> Tensor:
        """Do one round of every start and return how far its models moved on average, (r,), float32."""
        x, y = self.mixture.x, self.mixture.y
        m, n, d = x.shape
        r, k, _ = self.models.shape
        models = self.models.view(r * k, d).T  # (d, r k): one column for each model
        sums = torch.zeros((r * k, d), device=x.device)
        first_model = torch.arange(r, device=x.device) * k
        for begin in range(0, m, self.block):
            xb = x[begin : begin + self.block]
            c = len(xb)
            # One product for the models of all starts: they share the data.
            residuals = torch.mm(xb.reshape(c * n, d), models).view(c, n, r * k)
            residuals.sub_(y[begin : begin + c, :, None])
            choice = residuals.square().mean(1).view(c, r, k).argmin(2)  # (c, r): the model of least loss
            index = choice[:, None, :, None].expand(c, n, r, 1)
            chosen_residuals = residuals.view(c, n, r, k).gather(3, index).squeeze(3)  # (c, n, r)
            gradients = torch.bmm(chosen_residuals.transpose(1, 2), xb)  # (c, r, d), without the factor 2/n
            sums.index_add_(0, (first_model + choice).view(-1), gradients.view(c * r, d))
            self.choices[:, begin : begin + c] = choice.T
        # 2/n is the gradient's factor; 1/m is the server's: the mean of those who chose, times their share of all devices.
        moves = sums.view(r, k, d) * (self.rates * (-2.0 / (n * m)))[:, None, None]
        self.models = self.models + self._relayed(moves)
        moved: Tensor = torch.linalg.vector_norm(moves, dim=2).mean(1)
        return moved

    def _relayed(self, moves: Tensor) -> Tensor:
        """Return the clear ``moves`` (r, k, d) as devices get them from the server, which has them under the round's mask."""
        self.round += 1
        self.moves = moves
        if self.masks is None:
            return moves
        key = self.masks.take(self.round)
        first, second = (torch.from_numpy(g).to(moves.device) for g in permutation_of(key, moves.shape[2]))
        self.moves = moves[..., first]
        return self.moves[..., second]


def run_starts(
    mixture: Mixture,
    starts: Tensor,
    rates: Tensor,
    *,
    iterations: int,
    threshold: float,
    masks: RoundMasks | None = None,
    settle: bool = False,
    first_success: bool = False,
) -> Endings:
    """Run ``iterations`` of IFCA from every start.

    Args:
        mixture: the data.
        starts: shape (r, k, d), float32.
        rates: shape (r,), float32, step sizes.
        iterations: T.
        threshold: largest distance that is a success.
        masks: masks of the rounds; None works in the clear.
        settle: check every `WINDOW` iterations whether a start can stop early: if the fastest pace of the last window
            could not carry it across ``threshold`` in the remaining iterations, or if it has `DIVERGED`. A pace can grow,
            so this is a heuristic; False runs every iteration.
        first_success: stop all starts as soon as one has settled as a success.
    """
    batch = Batch(mixture, starts, rates, masks)
    live = torch.arange(len(starts), device=starts.device)  # indices of the starts that still run
    thetas, choices = starts.clone(), batch.choices.clone()
    distances = torch.full((len(starts),), torch.inf, device=starts.device)
    counts = torch.zeros(len(starts), dtype=torch.int64, device=starts.device)
    first_distances = matched_distance(starts, mixture.truth)
    pace = torch.zeros(len(starts), device=starts.device)  # each live start's largest step in this window
    for done in range(1, iterations + 1):
        pace = torch.maximum(pace, batch.step())
        if done % WINDOW and done < iterations:
            continue
        current = batch.models
        distance = matched_distance(current, mixture.truth)
        finite = torch.isfinite(distance)
        thetas[live], choices[live], counts[live] = current, batch.choices, done
        distances[live] = torch.where(finite, distance, torch.inf)
        continuing = finite
        if settle:
            # A start is decided if it can't cross the threshold any more, in either direction.
            undecided = (distance - threshold).abs() <= pace * (iterations - done)
            continuing = finite & undecided & (distance <= DIVERGED * first_distances[live])
            if first_success and bool((distances[live][~undecided & finite] <= threshold).any()):
                break
        if not bool(continuing.any()):
            break
        batch.keep(continuing)
        live, pace = live[continuing], torch.zeros(int(continuing.sum()), device=starts.device)
    return Endings(thetas, choices, distances, counts)
