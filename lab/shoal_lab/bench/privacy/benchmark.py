"""`shoal bench privacy`: for every mask mode its cost, its exactness, and each attack's success beside chance."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from aggregator.numerics.checks import sklearn_module
from crypto.mask.modes.registry import MODES, find
from shoal_lab.bench.attacks.base import Result
from shoal_lab.bench.attacks.lab import Lab, make_lab
from shoal_lab.bench.attacks.registry import ATTACKS
from shoal_lab.bench.privacy.cost import MAIN_SIZE, Computed, Cost, measure_computed, measure_cost, measure_seal

Progress = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class ModeReport:
    """All measurements of one mode; ``attacked`` has each attack's results by its name."""

    mode: str
    costs: tuple[Cost, ...]
    computed: Computed
    attacked: Mapping[str, tuple[Result, ...]]

    @property
    def results(self) -> tuple[Result, ...]:
        """Every attack's results, one a variant."""
        return tuple(r for results in self.attacked.values() for r in results)

    @property
    def verdict(self) -> str:
        """One line made of the results and nothing else: an attack counts if any of its variants works."""
        tried = {name: results for name, results in self.attacked.items() if results}
        worked = [name for name, results in tried.items() if any(r.works for r in results)]
        stopped = [name for name in tried if name not in worked]
        named = ", ".join(name + self._limit(name) for name in worked)
        can = self.computed.can
        if can["sees_updates"]:
            left = "no mask, the aggregator has every update in clear"
        elif can["sees_values"]:
            left = "a disguise that leaves all values in sight"
        elif can["sees_magnitudes"]:
            left = "a disguise that leaves all absolute values in sight"
        else:
            left = "a disguise that leaves norms and dot products in sight"
        return (
            f"{left}; {len(worked)} of {len(tried)} attacks get more than chance ({named}); "
            f"not: {', '.join(stopped) or 'none'}"
        )

    def _limit(self, name: str) -> str:
        """Return a remark if the attack was tried under fresh keys too, and works only while a key lasts a run."""
        results = self.attacked[name]
        fresh = [r.works for r in results if r.keys == "round"]
        return " with one key a run" if fresh and not any(fresh) else ""

    def data(self) -> dict[str, Any]:
        """Return the mode's part of the JSON object."""
        main = next(c for c in self.costs if c.d == MAIN_SIZE)
        return {
            "mode": self.mode,
            "derive_ms": main.derive_ms,
            "apply_ms": main.apply_ms,
            "invert_ms": main.invert_ms,
            "apply_memcpy_ratio": main.apply_memcpy_ratio,
            "cosine_error": self.computed.cosine_error,
            "mean_error": self.computed.mean_error,
            "can": self.computed.can,
            "attacks": [r.data() for r in self.results],
            "verdict": self.verdict,
            "sizes": [dataclasses.asdict(c) for c in self.costs],
        }


@dataclass(frozen=True, slots=True, kw_only=True)
class PrivacyReport:
    """A whole run.

    Attributes:
        dataset: digits or mnist; coordinates: of the attacked model; seal: ms a MB and bytes, the same in every mode.
        seconds: the run took, wall clock.
    """

    modes: tuple[ModeReport, ...]
    dataset: str
    coordinates: int
    quick: bool
    seal: dict[str, float]
    seconds: float

    def data(self) -> dict[str, Any]:
        """Return the data of the JSON object."""
        return {
            "modes": [m.data() for m in self.modes],
            "dataset": self.dataset,
            "coordinates": self.coordinates,
            "quick": self.quick,
            "seal": self.seal,
            "sources": {a.name: a.source for a in ATTACKS},
            "seconds": self.seconds,
        }


def result_rows(modes: Sequence[ModeReport]) -> list[list[Result | None]]:
    """Return the results as rows of a table, one column a mode; None where an attack has no variant for a mode."""
    order = dict.fromkeys(r.row for m in modes for r in m.results)
    columns = [{r.row: r for r in m.results} for m in modes]
    return [[column.get(row) for column in columns] for row in order]


def attack_all(lab: Lab, mode: str, progress: Progress = lambda _: None) -> dict[str, tuple[Result, ...]]:
    """Return the results of every attack of the registry on one mode, by the attack's name."""
    results = {}
    for attack in ATTACKS:
        progress(f"{mode}: {attack.name}")
        results[attack.name] = tuple(attack.run(lab, mode))
    return results


def measure(
    modes: Sequence[str] = (), *, quick: bool = False, data_dir: Path | None = None, progress: Progress = lambda _: None
) -> PrivacyReport:
    """Measure ``modes``, by default all, on digits, or on MNIST where ``data_dir`` holds it; one thread.

    Raises:
        ConfigError: a mode is not known, or scikit-learn is not installed.
        DataError: MNIST's files are not there.
    """
    chosen = tuple(dict.fromkeys(modes)) or tuple(MODES)
    for mode in chosen:
        find(mode)
    start = time.monotonic()
    with one_thread():
        progress("compiling the task")
        lab = make_lab(quick=quick, data_dir=data_dir)
        reports = []
        for mode in chosen:
            progress(f"{mode}: cost")
            costs = tuple(measure_cost(mode, quick))
            computed = measure_computed(lab, mode)
            reports.append(ModeReport(mode, costs, computed, attack_all(lab, mode, progress)))
            lab.forget(mode)
        seal = measure_seal(quick)
    return PrivacyReport(
        modes=tuple(reports),
        dataset=lab.name,
        coordinates=lab.length,
        quick=quick,
        seal=seal,
        seconds=time.monotonic() - start,
    )


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit BLAS and torch to one thread inside the block, and restore torch's random state afterwards."""
    import torch

    before = torch.get_num_threads()
    with sklearn_module("threadpoolctl").threadpool_limits(limits=1), torch.random.fork_rng(devices=[]):
        torch.set_num_threads(1)
        try:
            yield
        finally:
            torch.set_num_threads(before)
