"""cfl-toys: the pictures of Sattler et al., Fig. 1 (one model can't fit all devices) and Fig. 2 (paths to a stationary point).

Fig. 1: a line has to separate two classes in the plane. In the federated XOR a line separates the classes of each group, but
not those of both groups together; with opposed conditionals both groups hold the same points with opposite labels. CFL with
its default settings and FedAvg are run on both.

Fig. 2: two devices pull at two parameters by linear regression. Incongruent, no parameters suit both, and the path ends where
their gradients cancel; congruent, it ends where both gradients vanish. The plane of the picture is that of the parameters.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError
from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Population, Shard
from shoal.simulation.engine.simulate import Observation, SimResult, simulate
from shoal.simulation.shares import CFL_SHARES, cut, population_of
from shoal.simulation.trainers.networks import Linear, Softmax
from shoal_lab.experiments.common.experiment import Options, Progress, Result, Study
from shoal_lab.experiments.common.paper import paper_options

LEAST_DEVICES: Final = 4
LEAST_SAMPLES: Final = 10
PATH_ROUNDS: Final = 400
SPREAD: Final = 0.22
"""Standard deviation of a class's points about its centre."""
LOCAL: Final = LocalTraining(epochs=3, steps=1, batch_size=20, lr=0.3)
PATH_LOCAL: Final = LocalTraining(epochs=0, steps=1, batch_size=0, lr=0.03)
TOYS: Final = ("xor", "opposed")
PROBLEMS: Final = ("incongruent", "congruent")
CENTRES: Final[Mapping[str, tuple[tuple[tuple[float, float, int], ...], ...]]] = {
    "xor": (((-1.0, 1.0, 0), (1.0, 1.0, 1)), ((-1.0, -1.0, 1), (1.0, -1.0, 0))),
    "opposed": (((-1.0, 0.0, 0), (1.0, 0.0, 1)), ((-1.0, 0.0, 1), (1.0, 0.0, 0))),
}
"""Centres of each group's classes: x, y, label."""
STARTS: Final = ((-2.0, -1.5), (-2.0, 2.0), (2.5, -1.0), (2.5, 2.0))
EQUATIONS: Final[Mapping[str, tuple[tuple[tuple[float, float], float], ...]]] = {
    "incongruent": (((1.0, 0.4), 1.0), ((1.0, 0.4), -1.0)),
    "congruent": (((1.0, 0.4), 1.0), ((-0.4, 1.0), 0.5)),
}
"""Each device's single sample: inputs and the output it wants."""
VANISHED: Final = 1e-3
MOST_DOTS: Final = 80
BORDER: Final = 2.0


def toy(name: str, devices: int, samples: int, seed: int) -> Population:
    """Return ``devices`` in two groups with ``samples`` points each, cut 60/20/20."""
    rng = np.random.default_rng([seed, TOYS.index(name)])
    truth = rng.permutation(np.arange(devices) % 2)
    parts = []
    for group in truth:
        centres = CENTRES[name][group]
        which = rng.permutation(np.arange(samples) % len(centres))
        x = np.array([c[:2] for c in centres])[which] + SPREAD * rng.standard_normal((samples, 2))
        y = np.array([c[2] for c in centres], np.int64)[which]
        parts.append(cut(x.astype(np.float32), y, np.arange(samples), CFL_SHARES))
    return population_of(parts, tuple(int(g) for g in truth))


def run(study: Study, options: Options, progress: Progress) -> Result:
    """Run ``cfl-toys``."""
    devices, samples = options.devices or 0, options.samples or 0
    if devices < LEAST_DEVICES or samples < LEAST_SAMPLES:
        raise UsageError(
            f"{devices} devices of {samples} points make no two groups",
            hint="two devices a group at least, with enough points for each share",
        )
    toys: dict[str, Any] = {}
    panels: list[dict[str, Any]] = []
    history: list[dict[str, Any]] = []
    seconds, total = [], len(TOYS) + len(PROBLEMS)
    for name in TOYS:
        population = toy(name, devices, samples, options.seed)
        done, single = (_learn(a, population, options) for a in ("cfl", "fedavg"))
        seconds.append(done.cpu_seconds_per_round)
        last = done.history[-1]
        toys[f"toy_{name}"] = {
            "accuracy": done.final.accuracy if done.final else None,
            "accuracy_fedavg": single.final.accuracy if single.final else None,
            "purity": last.purity,
            "ari": last.ari,
            "clusters": last.clusters,
            "split_in_round": next((e.round for r in done.history for e in r.events if e.kind == "split"), None),
        }
        history += [
            {"toy": name, "round": r.round, "accuracy": r.accuracy, "loss": r.loss, "purity": r.purity}
            for r in done.history
        ]
        panels.append(_toy_panel(name, population, done, single))
        progress.round("cfl", len(panels), total, toys[f"toy_{name}"])
    paths: dict[str, Any] = {}
    for name in PROBLEMS:
        found = [_path(name, np.array(start, np.float32), options) for start in STARTS]
        paths[f"path_{name}"] = {
            "mean_gradient": max(f[1] for f in found),
            "largest_gradient": max(f[2] for f in found),
            "cosine": found[0][3],
            "congruent": max(f[2] for f in found) < VANISHED,
        }
        panels.append(_path_panel(name, [f[0] for f in found]))
        progress.round("cfl", len(panels), total, None)
    return study.result(
        options,
        {"path_rounds": PATH_ROUNDS, "batch_size": LOCAL.batch_size, "epochs": LOCAL.epochs, "lr": LOCAL.lr},
        accuracy=float(np.mean([t["accuracy"] for t in toys.values()])),
        clusters=max(t["clusters"] for t in toys.values()),
        cpu_seconds_per_round=float(np.mean(seconds)),
        history=history,
        purity=float(np.mean([t["purity"] for t in toys.values()])),
        ari=float(np.mean([t["ari"] for t in toys.values()])),
        extra={**toys, **paths, "panels": panels},
    )


def _learn(algorithm: str, population: Population, options: Options) -> SimResult:
    settings = dict(options.settings) if algorithm == "cfl" else {}
    sim_options = paper_options(
        rounds=options.rounds,
        local=LOCAL,
        seed=options.seed,
        mode=options.mask,
        count="all",
        deferred=False,
    )
    return simulate(algorithm, settings, population, Softmax(2, 2), sim_options)


def _path(name: str, start: NDArray[np.float32], options: Options) -> tuple[NDArray[np.float64], float, float, float]:
    """Return a path of FedAvg, (rounds + 1, 2), and at its end the mean's norm, the largest norm, and the gradients' cosine."""
    shards = tuple(Shard(np.array([x], np.float32), np.array([y], np.float32)) for x, y in EQUATIONS[name])
    points = []
    last = np.empty((len(shards), len(start)))

    def watch(seen: Observation) -> None:
        points.append(seen.workforce.theta(seen.plan, next(iter(seen.plan.models))))
        last[:] = np.stack([c.row for c in seen.contributions]) / PATH_LOCAL.lr

    sim_options = paper_options(
        rounds=PATH_ROUNDS,
        local=PATH_LOCAL,
        mode=options.mask,
        evaluate_every=0,
        deferred=False,
    )
    done = simulate("fedavg", {}, Population(shards), Linear(2), sim_options, watch=watch, start=start[None])
    points.append(next(iter(done.thetas.values())))
    norms = np.linalg.norm(last, axis=1)
    product = float(last[0] @ last[1])
    cosine = product / float(norms.prod()) if norms.min() > VANISHED else 0.0
    return np.array(points, np.float64), float(np.linalg.norm(last.mean(0))), float(norms.max()), cosine


def _toy_panel(name: str, population: Population, done: SimResult, single: SimResult) -> dict[str, Any]:
    lines: list[dict[str, Any]] = []
    assert population.groups is not None
    for group in (0, 1):
        mine = [s for s, g in zip(population.train, population.groups, strict=True) if g == group]
        x, y = np.concatenate([s.x for s in mine]), np.concatenate([s.y for s in mine])
        for label in (0, 1):
            dots = x[y == label][:MOST_DOTS]
            lines.append(_line(f"group {group}, class {label}", dots[:, 0], dots[:, 1], dots=True))
    for title, run_ in (("fedavg", single), ("cfl", done)):
        used = sorted(set(run_.clusters.values()))
        for model in used:
            lines.append(_line(f"{title}, model {model}" if title == "cfl" else title, *_border(run_.thetas[model])))
    title = {"xor": "federated XOR", "opposed": "opposed conditionals"}[name]
    return {"title": title, "x_label": "x1", "y_label": "x2", "lines": lines}


def _border(theta: NDArray[np.float32]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return two points of the line on which both classes are equally likely, outside the picture's frame."""
    weight = theta[:4].reshape(2, 2).astype(np.float64)
    normal, offset = weight[0] - weight[1], float(theta[4]) - float(theta[5])
    length = max(float(np.linalg.norm(normal)), 1e-12)
    return _across(np.clip(-offset * normal / length**2, -BORDER, BORDER), normal / length)


def _across(foot: NDArray[np.float64], normal: NDArray[np.float64]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return x and y of two points of the line through ``foot`` (2,) across ``normal``, which has length 1."""
    along = np.array([-normal[1], normal[0]])
    ends = np.stack([foot - BORDER * along, foot + BORDER * along])
    return ends[:, 0], ends[:, 1]


def _path_panel(name: str, paths: Sequence[NDArray[np.float64]]) -> dict[str, Any]:
    lines = [_line(f"from {p[0, 0]:g}, {p[0, 1]:g}", p[:, 0], p[:, 1]) for p in paths]
    for i, (x, y) in enumerate(EQUATIONS[name]):
        normal = np.array(x)
        ends = _across(y * normal / float(normal @ normal), normal / float(np.linalg.norm(normal)))
        lines.append(_line(f"device {i + 1} has no loss", *ends))
    return {"title": f"{name} risks", "x_label": "theta 1", "y_label": "theta 2", "lines": lines}


def _line(label: str, x: NDArray[Any], y: NDArray[Any], *, dots: bool = False) -> dict[str, Any]:
    return {"label": label, "x": [round(float(v), 4) for v in x], "y": [round(float(v), 4) for v in y], "dots": dots}
