"""The kernels against a ceiling and a naive form measured in the same run, on one thread, in CPU seconds.

A kernel is one function from a ``Bench`` to its results; ``KERNELS`` lists them. Kernel, ceiling and naive form take
turns, and the least time of each counts, so a machine that others load too still gives the ratios.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.averaging import weighted_mean
from aggregator.numerics.backend import NumpyBackend, gram_flops
from aggregator.numerics.bipartition import bipartition
from aggregator.numerics.checks import sklearn_module
from aggregator.numerics.embedding import edc, madc
from aggregator.numerics.streaming import StreamingGram
from aggregator.numerics.torch_backend import TorchBackend
from crypto.mask.derivation import MaskContext, derive
from crypto.mask.secret import MaskSecret
from shoal.types import Segment
from shoal_lab.bench.numerics.kernel_result import KernelResult
from shoal_lab.bench.numerics.naive import cubic_madc, randomised_edc, union_find

SGEMM_SIZE: Final = 2048
NAIVE_PAIRS: Final = 36
NAIVE_ROWS: Final = 50
"""Rows of the n^3 form of MADC that are timed. Every run reuses their memory, while the full form would also need 16 GB of new
pages at n = 1000: the reported ratio is a lower bound."""
DIRECTIONS: Final = 5


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
        repeats = []
        for function in functions:
            start = time.process_time()
            function()
            repeats.append(max(1, int(0.02 / max(time.process_time() - start, 1e-6))))
        least = [float("inf")] * len(functions)
        for _ in range(runs):
            for position, (function, repeat) in enumerate(zip(functions, repeats, strict=True)):
                start = time.process_time()
                for _ in range(repeat):
                    function()
                least[position] = min(least[position], (time.process_time() - start) / repeat)
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


Kernel = Callable[[Bench], Iterator[KernelResult]]


def measure(quick: bool) -> list[KernelResult]:
    """Measure all kernels on one thread; ``quick`` takes sizes that finish in a few seconds.

    Raises:
        ConfigError: scikit-learn or scipy is not installed.
    """
    bench = Bench(quick)
    with sklearn_module("threadpoolctl").threadpool_limits(limits=1):
        from shoal_lab.bench.numerics.training import simulator  # loads torch

        return [result for kernel in KERNELS for result in kernel(bench)] + simulator(quick)


def _sgemm(bench: Bench) -> Callable[[], object]:
    left = bench.normal(SGEMM_SIZE, SGEMM_SIZE)
    right = left.T.copy()
    return lambda: left @ right


def gram(bench: Bench) -> Iterator[KernelResult]:
    """All dot products, and the same as rows arrive one by one."""
    for n, d in [(100, 100_000)] if bench.quick else [(100, 1_000_000), (1000, 159_010)]:
        rows = bench.normal(n, d)
        store = np.empty_like(rows)

        def stream(rows: NDArray[np.float32] = rows, store: NDArray[np.float32] = store) -> NDArray[np.float64]:
            products = StreamingGram(rows.shape[1], len(rows), store=store)
            for row in rows:
                products.add(row)
            return products.result()

        def pairs(rows: NDArray[np.float32] = rows) -> None:
            for i in range(NAIVE_PAIRS):
                np.sum(rows[i % len(rows)] * rows[(7 * i) % len(rows)])

        def whole(rows: NDArray[np.float32] = rows) -> NDArray[np.float64]:
            return NumpyBackend().gram(rows)

        whole_s, stream_s, sgemm_s, pairs_s = bench.race(whole, stream, _sgemm(bench), pairs, runs=3)
        ceiling_s = sgemm_s * gram_flops(n, d) / gram_flops(SGEMM_SIZE, SGEMM_SIZE)
        naive_s = pairs_s * n * n / NAIVE_PAIRS
        yield KernelResult(
            name="gram", n=n, d=d, seconds=whole_s, ceiling_ratio=ceiling_s / whole_s, naive_ratio=naive_s / whole_s
        )
        yield KernelResult(
            name="streaming_gram",
            n=n,
            d=d,
            seconds=stream_s,
            ceiling_ratio=ceiling_s / stream_s,
            naive_ratio=naive_s / stream_s,
        )


def embedding(bench: Bench) -> Iterator[KernelResult]:
    """FedGroup's two measures."""
    n, d = 100, 100_000 if bench.quick else 1_000_000
    rows = bench.normal(n, d)
    edc_s, sgemm_s, svd_s = bench.race(
        lambda: edc(rows, DIRECTIONS), _sgemm(bench), lambda: randomised_edc(rows, DIRECTIONS), runs=3
    )
    ceiling_s = sgemm_s * gram_flops(n, d) / gram_flops(SGEMM_SIZE, SGEMM_SIZE)
    yield KernelResult(name="edc", n=n, d=d, seconds=edc_s, ceiling_ratio=ceiling_s / edc_s, naive_ratio=svd_s / edc_s)
    n = 200 if bench.quick else 1000
    similarity = bench.similarity(n)
    cached = similarity.reshape(-1)[: min(similarity.size, 64_000)]
    in_torch = TorchBackend("cpu")
    madc_s, torch_s, sum_s, slab_s = bench.race(
        lambda: madc(similarity),
        lambda: madc(similarity, backend=in_torch),
        cached.sum,
        lambda: cubic_madc(similarity, 0, NAIVE_ROWS),
        runs=3,
    )
    ceiling_s, naive_s = sum_s * (n**3 / 2) / cached.size, slab_s * n / NAIVE_ROWS
    yield KernelResult(
        name="madc", n=n, d=0, seconds=madc_s, ceiling_ratio=ceiling_s / madc_s, naive_ratio=naive_s / madc_s
    )
    yield KernelResult(
        name="madc_torch", n=n, d=0, seconds=torch_s, ceiling_ratio=ceiling_s / torch_s, naive_ratio=naive_s / torch_s
    )


def mean(bench: Bench) -> Iterator[KernelResult]:
    """The weighted mean."""
    for n, d in [(24, 1_000_000)] if bench.quick else [(24, 4_000_000), (100, 1_000_000)]:
        rows = bench.normal(n, d)
        weights = bench.rng.integers(1, 700, n).astype(np.float64)

        def ours(rows: NDArray[np.float32] = rows, weights: NDArray[np.float64] = weights) -> NDArray[np.float32]:
            return weighted_mean(rows, weights)

        def naive(rows: NDArray[np.float32] = rows, weights: NDArray[np.float64] = weights) -> object:
            return np.average(rows, axis=0, weights=weights)

        mean_s, read_s, naive_s = bench.race(ours, rows.sum, naive)
        yield KernelResult(
            name="mean", n=n, d=d, seconds=mean_s, ceiling_ratio=read_s / mean_s, naive_ratio=naive_s / mean_s
        )


def halves(bench: Bench) -> Iterator[KernelResult]:
    """CFL's optimal bipartition."""
    for n in [500] if bench.quick else [1000, 5000]:
        similarity = bench.similarity(n)

        def ours(similarity: NDArray[np.float64] = similarity) -> object:
            return bipartition(similarity)

        seconds, read_s = bench.race(ours, similarity.sum)
        start = time.process_time()
        union_find(similarity)
        naive_s = time.process_time() - start
        yield KernelResult(
            name="bipartition", n=n, d=0, seconds=seconds, ceiling_ratio=read_s / seconds, naive_ratio=naive_s / seconds
        )


def mask(bench: Bench) -> Iterator[KernelResult]:
    """The permutation mask: apply, invert, and derive its key."""
    for d in [159_010] if bench.quick else [159_010, 1_000_000, 10_000_000]:
        vector = bench.normal(d)
        context = MaskContext(
            fleet="bench",
            run_id=b"bench",
            task_digest=bytes(32),
            mode="permutation",
            segments=(Segment("cluster", d),),
        )
        start = time.process_time()
        key = derive(MaskSecret.from_bytes(bytes(32)), context)
        derive_s = time.process_time() - start
        yield from _mask_at(bench, d, vector, key.apply, key.invert, derive_s)


def _mask_at(
    bench: Bench,
    d: int,
    vector: NDArray[np.float32],
    apply: Callable[[NDArray[np.float32], NDArray[np.float32]], object],
    invert: Callable[[NDArray[np.float32], NDArray[np.float32]], object],
    derive_s: float,
) -> Iterator[KernelResult]:
    out = np.empty_like(vector)
    index = bench.rng.permutation(d)

    def scatter() -> None:
        out[index] = vector

    mask_s, unmask_s, memcpy_s, gather_s, scatter_s, draw_s = bench.race(
        lambda: apply(vector, out),
        lambda: invert(vector, out),
        lambda: np.copyto(out, vector),
        lambda: vector[index],
        scatter,
        lambda: bench.rng.permutation(d),
    )
    yield KernelResult(
        name="mask", n=1, d=d, seconds=mask_s, ceiling_ratio=memcpy_s / mask_s, naive_ratio=gather_s / mask_s
    )
    yield KernelResult(
        name="unmask", n=1, d=d, seconds=unmask_s, ceiling_ratio=memcpy_s / unmask_s, naive_ratio=scatter_s / unmask_s
    )
    yield KernelResult(
        name="derive", n=1, d=d, seconds=derive_s, ceiling_ratio=memcpy_s / derive_s, naive_ratio=draw_s / derive_s
    )


KERNELS: Final[list[Kernel]] = [gram, embedding, mean, halves, mask]
"""The kernels that ``measure`` runs, in this order; a new kernel is one more function."""


def main() -> None:
    """Print all results as a table."""
    for result in measure(quick="--quick" in sys.argv):
        sys.stdout.write(
            f"{result.name:15s} n={result.n:<5d} d={result.d:<9d} {result.seconds:10.5f} s"
            f"  ceiling x{result.ceiling_ratio:<7.3f} naive x{result.naive_ratio:.2f}\n"
        )


if __name__ == "__main__":
    main()
