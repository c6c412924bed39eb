"""Compare an NVIDIA card with the CPU, and measure it against limits measured beside: `make gpu`, four minutes, no network.

It runs with any Python that has torch, and prints one JSON document. A part that can't run here is in it by name, with the
reason: without a card that is every part but the versions.
"""

from __future__ import annotations

import importlib.metadata
import json
import platform
import subprocess
import sys
import time
import timeit
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Final

ROOT: Final = Path(__file__).parents[2]
SIZES: Final = ((100, 159_010), (1000, 159_010), (5000, 159_010), (1000, 1_000_000))
"""Updates and their coordinates."""
CARD: Final = "cuda"
SQUARE: Final = 8192
COPIED_BYTES: Final = 1 << 30
GROUPS: Final = 5
ROUNDS: Final = 3
"""Rounds of each task of the race; the first warms up."""
PARTS: Final = ("limits", "equality", "kernels", "race", "ranks")
EQUAL: Final = (
    "tests/scenarios/rounds/test_groups_found.py",
    "tests/scenarios/rounds/test_cfl_moves.py",
    "tests/scenarios/rounds/test_runs.py",
    "tests/unit/aggregator/numerics",
    "tests/unit/aggregator/strategies",
)
"""Tests of clusters and splits, whose products torch computes on the card."""
TESTS_S: Final = 90.0

Part = dict[str, Any]


def wall_s(call: Callable[[], object], turns: int = 3) -> float:
    """Return the least seconds of a call until the card has finished."""
    import torch

    end = torch.cuda.synchronize if CARD == "cuda" else bool
    return min(timeit.repeat(lambda: (call(), end()), number=1, repeat=turns))


def versions() -> Part:
    """Return what the machine runs; nothing here needs a card."""
    found: Part = {"python": platform.python_version(), "processor": platform.machine()}
    for name in ("torch", "numpy", "scipy", "cryptography"):
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = None
    return found


def limits() -> Part:
    """Measure products of square matrices, by float32 without TF32 and by float64, and copies, in bytes a second."""
    import torch

    from aggregator.numerics.torch_backend import full_precision

    host = torch.ones(COPIED_BYTES // 4)
    pinned, there = host.pin_memory(), host.cuda()
    found: Part = {"card": torch.cuda.get_device_name(), "cuda": torch.version.cuda}
    with full_precision():
        for name, dtype in (("sgemm", torch.float32), ("dgemm", torch.float64)):
            square = torch.randn(SQUARE, SQUARE, device=CARD, dtype=dtype)
            found[f"{name}_flops_per_s"] = 2.0 * SQUARE**3 / wall_s(partial(torch.mm, square, square))
    copies = {
        "device": partial(there.clone),
        "pinned": partial(there.copy_, pinned, non_blocking=True),
        "pageable": partial(there.copy_, host),
    }
    return found | {f"{name}_copy_bytes_per_s": COPIED_BYTES / wall_s(copy) for name, copy in copies.items()}


def tests(*arguments: str) -> Part:
    """Run tests with their products on the card, and return the end of what they say."""
    words = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--numerics", "cuda", *arguments]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=TESTS_S, check=False)
    return {"passed": done.returncode == 0, "said": (done.stdout + done.stderr).splitlines()[-12:]}


def equality() -> Part:
    """Run the tests of clusters and splits."""
    return tests(*EQUAL)


def ranks() -> Part:
    """Let two processes share the card."""
    return tests("tests/gpu/test_check.py", "-k", "two_ranks")


def kernels(measured: Part) -> Part:
    """Measure products, splits, means and EDC beside the CPU, each with its share of the measured limit.

    The limit of a product is its operations by sgemm (EDC's: dgemm), or its bytes by the copy from pinned memory, which takes
    longer. A split and a mean are the CPU's work on every backend: their limit is reading their input once.
    """
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from aggregator.numerics.backend import NumpyBackend, cosine_from_gram, gram_flops
    from aggregator.numerics.bipartition import bipartition
    from aggregator.numerics.embedding import edc
    from aggregator.numerics.torch_backend import TorchBackend

    def halves(cosines: NDArray[np.float64]) -> set[tuple[int, ...]]:
        cut = bipartition(cosines)
        return {cut.left, cut.right}

    card, cpu, found = TorchBackend(CARD), NumpyBackend(), Part()
    for n, d in SIZES:
        rows = torch.randn(n, d, device=CARD).cpu().numpy()
        rows[: n // 2, : d // 10] += 1.0  # a split that is no matter of rounding
        copy_s, flops = rows.nbytes / measured["pinned_copy_bytes_per_s"], gram_flops(n, d)
        products, theirs_found = card.gram(rows), cpu.gram(rows)
        similarity, weights = cosine_from_gram(products), np.arange(1.0, n + 1)
        pairs: dict[str, tuple[Callable[[], object], Callable[[], object], float]] = {
            "gram": (partial(card.gram, rows), partial(cpu.gram, rows), flops / measured["sgemm_flops_per_s"]),
            "edc": (
                partial(edc, rows, GROUPS, backend=card),
                partial(edc, rows, GROUPS),
                flops / measured["dgemm_flops_per_s"],
            ),
        }
        sums: dict[str, tuple[Callable[[], object], NDArray[Any]]] = {
            "cut": (partial(bipartition, similarity), similarity),
            "mean": (partial(cpu.weighted_mean, rows, weights), rows),
        }
        for name, (ours, theirs, product_s) in pairs.items():
            took_s, cpu_s = wall_s(ours, 2), wall_s(theirs, 1)
            found[f"{name} {n} x {d}"] = {
                "seconds": took_s,
                "share_of_limit": max(product_s, copy_s) / took_s,
                "share_of_product": product_s / took_s,
                "times_cpu": cpu_s / took_s,
            }
        for name, (call, read) in sums.items():
            took_s = wall_s(call, 2)
            found[f"{name} {n} x {d}"] = {"seconds": took_s, "share_of_limit": wall_s(read.sum, 2) / took_s}
        apart = np.abs(products - theirs_found).max() / np.diagonal(theirs_found).max()
        found[f"gram {n} x {d}"]["largest_difference"] = float(apart)
        found[f"cut {n} x {d}"]["equal"] = halves(similarity) == halves(cosine_from_gram(theirs_found))
    return found


def race() -> Part:
    """Train the tasks of `shoal bench race` on random samples in the simulator, on the card and on a thread of the CPU."""
    import numpy as np
    from shoal_lab.bench.race.systems.shoal_simulator import network
    from shoal_lab.bench.race.tasks import SAMPLES, TASKS
    from shoal_lab.experiments.common.paper import paper_options

    from shoal.protocol.recipe import LocalTraining
    from shoal.simulation.data import Population, shards_of
    from shoal.simulation.engine.simulate import SimRound, simulate

    found: Part = {}
    rng = np.random.default_rng(0)
    for name, task in TASKS.items():
        pixels = 3 * 32 * 32 if task.coloured else 28 * 28
        x = rng.random((task.devices, SAMPLES, pixels), np.float32)
        population = Population(shards_of(x, rng.integers(0, 10, (task.devices, SAMPLES))))
        local = LocalTraining(epochs=1, steps=0, batch_size=task.batch, lr=task.lr)
        took_s = {}
        for place, device in (("card", CARD), ("cpu", "cpu")):
            times: list[float] = []

            def ended(_: SimRound, at: list[float] = times) -> None:
                at.append(time.perf_counter())

            options = paper_options(rounds=ROUNDS, local=local, evaluate_every=0, device=device)
            simulate("fedavg", {}, population, network(task), options, ended)
            took_s[place] = (times[-1] - times[0]) / (ROUNDS - 1)
        found[name] = {
            "device_rounds_per_s": task.devices / took_s["card"],
            "times_cpu": took_s["cpu"] / took_s["card"],
        }
    return found


def lacking() -> str:
    """Return why this machine has no card to check; empty if it has one."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    return "" if torch.cuda.is_available() else "no CUDA device"


def main() -> None:
    """Run all parts and print the document; exit with 1 if the card and the CPU differ."""
    document: Part = {"versions": versions()}
    reason = lacking()
    for name in PARTS:
        began_s = time.perf_counter()
        if reason:
            document[name] = {"skipped": reason}
        else:
            try:
                document[name] = kernels(document["limits"]) if name == "kernels" else globals()[name]()
            except (ImportError, KeyError, RuntimeError, subprocess.TimeoutExpired) as error:
                document[name] = {"skipped": f"{type(error).__name__}: {str(error)[:300]}"}
            document[name]["wall_s"] = time.perf_counter() - began_s
        sys.stderr.write(f"{name}: {document[name].get('skipped', 'done')}\n")
    sys.stdout.write(json.dumps(document, indent=2) + "\n")
    sys.exit(any(part.get("passed") is False for part in document.values()))


if __name__ == "__main__":
    main()
