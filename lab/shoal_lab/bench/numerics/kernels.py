"""The kernels against a ceiling and a naive form measured in the same run, on one thread, in CPU seconds.

A kernel is one function from a ``Bench`` to its results; ``KERNELS`` lists them. Kernel, ceiling and naive form take
turns, and the least time of each counts, so a machine that others load too still gives the ratios.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.cluster.hierarchy import DisjointSet
from threadpoolctl import threadpool_limits

from aggregator.numerics.averaging import weighted_mean
from aggregator.numerics.backend import NumpyBackend, gram_flops
from aggregator.numerics.bipartition import bipartition
from aggregator.numerics.checks import sklearn_module
from aggregator.numerics.embedding import edc, madc
from aggregator.numerics.torch_backend import TorchBackend
from crypto.mask.derivation import MaskContext, derive
from crypto.mask.secret import MaskSecret
from edge_client.learning.training import Shuffler
from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import shards_of
from shoal.simulation.engine.threads import limited_threads
from shoal.simulation.trainers.blocks import Block, Shelf, Trained
from shoal.simulation.trainers.dual import Dual
from shoal.simulation.trainers.loop import Loop
from shoal.simulation.trainers.networks import OneHidden, origins
from shoal.types import Segment

SGEMM_SIZE: Final = 2048
NAIVE_PAIRS: Final = 36
NAIVE_ROWS: Final = 50
"""Rows of the n^3 form of MADC that are timed. Every run reuses their memory, while the full form would also need 16 GB of new
pages at n = 1000: the reported ratio is a lower bound."""
DIRECTIONS: Final = 5

NETWORK: Final = OneHidden(784, 200, 10)
STEPS: Final = 10
MODELS: Final = 4
RECIPE: Final = LocalTraining(
    epochs=0, steps=STEPS, batch_size=0, lr=0.1, lr_decay=1.0, momentum=0.0, clip=0.0, prox_mu=0.0
)
LOOP_DEVICES: Final = 12

Result = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Bench:
    """Settings of a kernel's measurement.

    Attributes:
        quick: use sizes that finish in a few seconds.
        rng: seeded random source of the inputs.
    """

    quick: bool
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))

    def race(self, *functions: Callable[[], object], runs: int = 5) -> list[float]:
        """Return the least CPU seconds of each function over ``runs`` turns; short calls are repeated."""
        repeats = [max(1, int(0.02 / max(cpu_s(function), 1e-6))) for function in functions]
        least = [float("inf")] * len(functions)
        for _ in range(runs):
            for position, (function, repeat) in enumerate(zip(functions, repeats, strict=True)):
                least[position] = min(least[position], cpu_s(function, repeat))
        return least

    def normal(self, *shape: int) -> NDArray[np.float32]:
        """Return normal float32 numbers of ``shape``."""
        return self.rng.standard_normal(shape, dtype=np.float32)

    def similarity(self, n: int) -> NDArray[np.float64]:
        """Return the cosines of n random vectors, shape (n, n), float64."""
        rows = self.rng.standard_normal((n, 64))
        rows /= np.linalg.norm(rows, axis=1)[:, None]
        cosines = rows @ rows.T
        np.fill_diagonal(cosines, 1.0)
        return (cosines + cosines.T) / 2


def cpu_s(function: Callable[[], object], repeat: int = 1) -> float:
    """Return the CPU seconds of a call, the mean over ``repeat`` calls."""
    start = time.process_time()
    for _ in range(repeat):
        function()
    return (time.process_time() - start) / repeat


def result(name: str, n: int, d: int, seconds: float, ceiling_s: float, naive_s: float) -> Result:
    """Return the figures of one kernel at one size.

    Args:
        name: the kernel.
        n: devices; 1 for the mask.
        d: coordinates; 0 for ``bipartition`` and ``madc``, which see only similarities.
        seconds: CPU seconds of the best of a few runs.
        ceiling_s: the ceiling's: sgemm for ``gram`` and ``edc`` (counted as 2 n^2 d, so symmetry can take it
            past 1), reading the input once for ``mean`` and ``bipartition``, n^3 / 2 additions in the cache for ``madc``, memcpy
            for the mask.
        naive_s: the naive form's: dot products pair by pair, cfl Alg. 1 with sorted pairs and union-find, scikit-learn's
            randomised SVD, all n^3 differences, ``numpy.average``, one fancy-indexed gather.
    """
    ratios = {"ceiling_ratio": ceiling_s / seconds, "naive_ratio": naive_s / seconds}
    return {"name": name, "n": n, "d": d, "seconds": seconds, **ratios}


def measure(quick: bool) -> dict[str, Any]:
    """Measure all kernels on one thread; ``quick`` takes sizes that finish in a few seconds.

    Raises:
        ConfigError: scikit-learn or scipy is not installed.
    """
    bench = Bench(quick)
    with one_thread():
        return {"kernels": [found for kernel in KERNELS for found in kernel(bench)]}


@contextmanager
def one_thread() -> Iterator[None]:
    """Limit torch and all other libraries to one thread inside the block, and restore torch's random state afterwards."""
    with limited_threads(1), threadpool_limits(1), torch.random.fork_rng(devices=[]):
        yield


def words(data: Mapping[str, Any]) -> list[str]:
    """Return the figures as a table."""
    return [
        f"{'kernel':24} {'n':>7} {'d':>9} {'CPU s':>10}  {'ceiling x':>9}  {'naive x':>8}",
        *(
            f"{r['name']:24} {r['n']:7} {r['d']:9} {r['seconds']:10.4f}  {r['ceiling_ratio']:9.2f}  {r['naive_ratio']:8.1f}"
            for r in data["kernels"]
        ),
    ]


def _sgemm(bench: Bench) -> Callable[[], object]:
    left = bench.normal(SGEMM_SIZE, SGEMM_SIZE)
    return partial(np.matmul, left, left.T.copy())


def gram(bench: Bench) -> Iterator[Result]:
    """All dot products."""
    for n, d in [(100, 100_000)] if bench.quick else [(100, 1_000_000), (1000, 159_010)]:
        rows = bench.normal(n, d)
        whole_s, sgemm_s, pairs_s = bench.race(
            partial(NumpyBackend().gram, rows), _sgemm(bench), partial(_pairs, rows), runs=3
        )
        ceiling_s = sgemm_s * gram_flops(n, d) / gram_flops(SGEMM_SIZE, SGEMM_SIZE)
        naive_s = pairs_s * n * n / NAIVE_PAIRS
        yield result("gram", n, d, whole_s, ceiling_s, naive_s)


def _pairs(rows: NDArray[np.float32]) -> None:
    for i in range(NAIVE_PAIRS):
        np.sum(rows[i % len(rows)] * rows[(7 * i) % len(rows)])


def embedding(bench: Bench) -> Iterator[Result]:
    """FedGroup's two measures."""
    n, d = 100, 100_000 if bench.quick else 1_000_000
    rows = bench.normal(n, d)
    edc_s, sgemm_s, svd_s = bench.race(
        partial(edc, rows, DIRECTIONS), _sgemm(bench), partial(randomised_edc, rows, DIRECTIONS), runs=3
    )
    yield result("edc", n, d, edc_s, sgemm_s * gram_flops(n, d) / gram_flops(SGEMM_SIZE, SGEMM_SIZE), svd_s)
    n = 200 if bench.quick else 1000
    similarity = bench.similarity(n)
    cached = similarity.reshape(-1)[: min(similarity.size, 64_000)]
    madc_s, torch_s, sum_s, slab_s = bench.race(
        partial(madc, similarity),
        partial(madc, similarity, backend=TorchBackend("cpu")),
        cached.sum,
        partial(cubic_madc, similarity, 0, NAIVE_ROWS),
        runs=3,
    )
    for name, seconds in (("madc", madc_s), ("madc_torch", torch_s)):
        yield result(name, n, 0, seconds, sum_s * (n**3 / 2) / cached.size, slab_s * n / NAIVE_ROWS)


def mean(bench: Bench) -> Iterator[Result]:
    """The weighted mean."""
    for n, d in [(24, 1_000_000)] if bench.quick else [(24, 4_000_000), (100, 1_000_000)]:
        rows = bench.normal(n, d)
        weights = bench.rng.integers(1, 700, n).astype(np.float64)
        naive = partial(np.average, rows, axis=0, weights=weights)
        yield result("mean", n, d, *bench.race(partial(weighted_mean, rows, weights), rows.sum, naive))


def halves(bench: Bench) -> Iterator[Result]:
    """CFL's optimal bipartition."""
    for n in [500] if bench.quick else [1000, 5000]:
        similarity = bench.similarity(n)
        seconds, read_s = bench.race(partial(bipartition, similarity), similarity.sum)
        yield result("bipartition", n, 0, seconds, read_s, cpu_s(partial(union_find, similarity)))


def mask(bench: Bench) -> Iterator[Result]:
    """The permutation mask: apply, invert, and derive its key."""
    for d in [159_010] if bench.quick else [159_010, 1_000_000, 10_000_000]:
        vector, index = bench.normal(d), bench.rng.permutation(d)
        out = np.empty_like(vector)
        segments = (Segment("cluster", d),)
        context = MaskContext(
            fleet="bench", run_id=b"bench", task_digest=bytes(32), mode="permutation", segments=segments
        )
        secret = MaskSecret.from_bytes(bytes(32))
        derive_s, key = cpu_s(partial(derive, secret, context)), derive(secret, context)
        mask_s, unmask_s, memcpy_s, gather_s, scatter_s, draw_s = bench.race(
            partial(key.apply, vector, out),
            partial(key.invert, vector, out),
            partial(np.copyto, out, vector),
            partial(vector.__getitem__, index),
            partial(out.__setitem__, index, vector),
            partial(bench.rng.permutation, d),
        )
        for name, seconds, naive_s in (
            ("mask", mask_s, gather_s),
            ("unmask", unmask_s, scatter_s),
            ("derive", derive_s, draw_s),
        ):
            yield result(name, 1, d, seconds, memcpy_s, naive_s)


def simulator(bench: Bench) -> Iterator[Result]:
    """The simulator's local training at n = 200, 100 and 50 samples a device; a quick run takes fewer devices and only two sizes.

    The work is Rotated MNIST's: one hidden layer of 784-200-10, ten full-batch steps, all devices from one of four models. The
    ceiling counts the plain form's operations, so that the dual form takes it past 1; the naive form is the plain loop; ``n``
    is a device's samples, ``seconds`` are of all devices measured.
    """
    for samples, devices in [(200, 13), (50, 52)] if bench.quick else [(200, 52), (100, 104), (50, 208)]:
        yield measure_training(samples, devices, 3 if bench.quick else 5)


def training_flops(devices: int, samples: int) -> float:
    """Return the operations of the plain form: forward and gradient of both layers, no gradient of the inputs."""
    first = 4 * samples * NETWORK.inputs * NETWORK.hidden
    second = 6 * samples * NETWORK.hidden * NETWORK.classes
    return float(STEPS * devices * (first + second))


def measure_training(samples: int, devices: int, runs: int = 3) -> Result:
    """Return the figures of training ``devices`` with so many samples each, on one thread.

    Ours trains all and sums them up by model, as in a round of IFCA: X X^T is known from rounds before, the first
    layer's outputs from the scoring just done. The loop trains a few devices and is scaled up. Each piece takes the best
    of ``runs``, interleaved, so that a busy machine slows all alike.
    """
    rng = np.random.default_rng(0)
    x = rng.random((devices, samples, NETWORK.inputs), np.float32)
    y = rng.integers(0, NETWORK.classes, (devices, samples))
    shelf = Shelf(shards_of(x, y))
    models = torch.from_numpy(origins(NETWORK, MODELS, 0))
    start = np.arange(devices) * MODELS // devices
    dual, loop = Dual(NETWORK, shelf), Loop(NETWORK)
    blocks = [shelf.block(ids) for ids in shelf.parts(np.arange(devices), dual.limits(MODELS, RECIPE))]
    few = shelf.block(np.arange(min(LOOP_DEVICES, devices)))
    left, right = torch.rand(SGEMM_SIZE, SGEMM_SIZE), torch.rand(SGEMM_SIZE, SGEMM_SIZE)
    scored = [dual.score(models, block).of(start[block.ids]) for block in blocks]

    def ours() -> None:
        totals = torch.zeros_like(models)
        for block, pre in zip(blocks, scored, strict=True):
            chosen = start[block.ids]
            _add(dual.train(models, chosen, block, _orders(block), RECIPE, 1, pre.clone()), chosen, totals)

    def plain() -> None:
        chosen = start[few.ids]
        _add(loop.train(models, chosen, few, _orders(few), RECIPE, 1), chosen, torch.zeros_like(models))

    with torch.no_grad():
        ours()
        times = [[cpu_s(work) for work in (partial(torch.mm, left, right), ours, plain)] for _ in range(runs)]
    sgemm_s, ours_s, plain_s = (min(column) for column in zip(*times, strict=True))
    ceiling_s = sgemm_s * training_flops(devices, samples) / (2.0 * SGEMM_SIZE**3)
    return result("simulator", samples, NETWORK.length, ours_s, ceiling_s, plain_s * devices / len(few.ids))


def _orders(block: Block) -> list[Shuffler]:
    """Return batch orders, which full-batch training requires and does not use."""
    return [np.random.default_rng(0) for _ in block.ids]


def _add(trained: Trained, start: NDArray[np.int64], totals: torch.Tensor) -> None:
    for row in np.unique(start):
        trained.add_to(totals[int(row)], np.flatnonzero(start == row), None)


KERNELS: Final[list[Callable[[Bench], Iterator[Result]]]] = [gram, embedding, mean, halves, mask, simulator]
"""The kernels that ``measure`` runs, in this order; a new kernel is one more function."""


def union_find(similarity: NDArray[np.float64]) -> int:
    """Merge the most similar pairs until two sets remain, as cfl Alg. 1 says; return the number of sets.

    Args:
        similarity: shape (m, m), float64, symmetric.
    """
    above, right = np.triu_indices(len(similarity), 1)
    sets = DisjointSet(range(len(similarity)))
    for pair in np.argsort(-similarity[above, right], kind="stable"):
        if sets.n_subsets == 2:
            break
        sets.merge(above[pair], right[pair])
    return int(sets.n_subsets)


def randomised_edc(updates: NDArray[np.float32], directions: int) -> NDArray[np.float32]:
    """Return EDC (fedgroup Eq. 8) by scikit-learn's randomised SVD of dW^T and cosines, shape (n, m), float32.

    Args:
        updates: shape (n, d), float32.
        directions: m.
    """
    decomposition = sklearn_module("sklearn.decomposition").TruncatedSVD(directions, random_state=0)
    vectors = decomposition.fit_transform(updates.T)
    pairwise = sklearn_module("sklearn.metrics.pairwise")
    return np.asarray(pairwise.cosine_similarity(updates, vectors.T))


def cubic_madc(similarity: NDArray[np.float64], start: int, stop: int) -> NDArray[np.float64]:
    """Return rows ``start`` to ``stop`` of MADC (fedgroup Eq. 7) through all differences at once, (n^3 in full).

    Args:
        similarity: shape (n, n), float64, symmetric, 1 on the diagonal.
        start: first row.
        stop: row after the last.

    Returns:
        shape (stop - start, n), float64.
    """
    size = len(similarity)
    total = np.abs(similarity[start:stop, None, :] - similarity[None, :, :]).sum(axis=2)
    total -= 2.0 * np.abs(1.0 - similarity[start:stop])
    total[np.arange(stop - start), np.arange(start, stop)] = 0.0
    return np.asarray(total / (size - 2), np.float64)
