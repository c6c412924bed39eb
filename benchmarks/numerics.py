"""The kernels against a ceiling and a naive form measured in the same run, in CPU seconds.

Start with one thread (`OMP_NUM_THREADS=1 python -m benchmarks.numerics`), or CPU seconds count idle spinning too.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.averaging import weighted_mean
from aggregator.numerics.backend import NumpyBackend, gram_flops
from aggregator.numerics.bipartition import bipartition
from crypto.mask.keys import MaskContext, derive
from crypto.mask.secret import MaskSecret
from wire.types import Segment

SGEMM_SIZE: Final = 2048
NAIVE_PAIRS: Final = 36


@dataclass(frozen=True, slots=True)
class KernelResult:
    """One kernel at one size.

    Attributes:
        name: the kernel.
        n: devices; 1 for the mask.
        d: coordinates; 0 for the bipartition, which sees only similarities.
        seconds: CPU seconds of the best of a few runs.
        ceiling_ratio: speed in units of the ceiling's: one sgemm for ``gram`` (counted as 2 n^2 d, so symmetry can
            take it past 1), reading the input once for ``mean`` and ``bipartition``, memcpy for ``mask`` and ``unmask``.
        naive_ratio: the naive form's time in units of ours: dot products pair by pair, cfl Alg. 1 with sorted pairs
            and union-find, ``numpy.average``, one fancy-indexed gather.
    """

    name: str
    n: int
    d: int
    seconds: float
    ceiling_ratio: float
    naive_ratio: float


def measure(quick: bool) -> list[KernelResult]:
    """Measure all kernels; ``quick`` takes sizes that finish in a few seconds."""
    rng = np.random.default_rng(0)
    gram_sizes = [(100, 100_000)] if quick else [(100, 1_000_000), (1000, 159_010)]
    mean_sizes = [(24, 1_000_000)] if quick else [(24, 4_000_000), (100, 1_000_000)]
    results = [_gram(rng, n, d) for n, d in gram_sizes]
    results += [_mean(rng, n, d) for n, d in mean_sizes]
    results += [_bipartition(rng, n) for n in ([500] if quick else [1000, 5000])]
    for d in [159_010] if quick else [159_010, 1_000_000, 10_000_000]:
        results += _mask(rng, d)
    return results


def _best(function: Callable[[], object], runs: int = 5) -> float:
    """Return the least CPU seconds of ``runs`` calls after one that warms up; short calls are repeated."""
    start = time.process_time()
    function()
    repeat = max(1, int(0.02 / max(time.process_time() - start, 1e-6)))
    best = float("inf")
    for _ in range(runs):
        start = time.process_time()
        for _ in range(repeat):
            function()
        best = min(best, (time.process_time() - start) / repeat)
    return best


def _read_s(values: NDArray[np.floating]) -> float:
    """Return the CPU seconds to sum ``values``, extrapolated from a piece far larger than any cache."""
    flat = values.reshape(-1)
    piece = flat[: min(flat.size, 16_000_000)]
    return _best(piece.sum) * flat.size / piece.size


def _gram(rng: np.random.Generator, n: int, d: int) -> KernelResult:
    rows = rng.standard_normal((n, d), dtype=np.float32)
    left = rng.standard_normal((SGEMM_SIZE, SGEMM_SIZE), dtype=np.float32)
    right = left.T.copy()
    sgemm_flops = gram_flops(SGEMM_SIZE, SGEMM_SIZE) / _best(lambda: left @ right)
    seconds = _best(lambda: NumpyBackend().gram(rows), runs=3)

    def pairs() -> None:
        for i in range(NAIVE_PAIRS):
            np.sum(rows[i % n] * rows[(7 * i) % n])

    naive_s = _best(pairs, runs=2) * n * n / NAIVE_PAIRS
    return KernelResult("gram", n, d, seconds, gram_flops(n, d) / seconds / sgemm_flops, naive_s / seconds)


def _mean(rng: np.random.Generator, n: int, d: int) -> KernelResult:
    rows = rng.standard_normal((n, d), dtype=np.float32)
    weights = rng.integers(1, 700, n).astype(np.float64)
    seconds = _best(lambda: weighted_mean(rows, weights))
    naive_s = _best(lambda: np.average(rows, axis=0, weights=weights), runs=2)
    return KernelResult("mean", n, d, seconds, _read_s(rows) / seconds, naive_s / seconds)


def _bipartition(rng: np.random.Generator, n: int) -> KernelResult:
    rows = rng.standard_normal((n, 64))
    rows /= np.linalg.norm(rows, axis=1)[:, None]
    similarity = rows @ rows.T
    seconds = _best(lambda: bipartition(similarity))
    naive_s = _best(lambda: _union_find(similarity), runs=1)
    return KernelResult("bipartition", n, 0, seconds, _read_s(similarity) / seconds, naive_s / seconds)


def _union_find(similarity: NDArray[np.float64]) -> int:
    size = len(similarity)
    above, right = np.triu_indices(size, 1)
    parent = list(range(size))

    def root(device: int) -> int:
        while parent[device] != device:
            parent[device] = parent[parent[device]]
            device = parent[device]
        return device

    sets = size
    for pair in np.argsort(-similarity[above, right], kind="stable"):
        if sets == 2:
            break
        one, other = root(int(above[pair])), root(int(right[pair]))
        if one != other:
            parent[one] = other
            sets -= 1
    return sets


def _mask(rng: np.random.Generator, d: int) -> list[KernelResult]:
    vector = rng.standard_normal(d, dtype=np.float32)
    context = MaskContext("bench", b"bench", 0, bytes(32), "permutation", (Segment("cluster", d),))
    secret = MaskSecret.from_bytes(bytes(32))
    start = time.process_time()
    key = derive(secret, context)
    derive_s = time.process_time() - start
    out = np.empty_like(vector)
    index = rng.permutation(d)

    def scatter() -> None:
        out[index] = vector

    memcpy_s = _best(lambda: np.copyto(out, vector))
    gather_naive_s = _best(lambda: vector[index])
    scatter_naive_s = _best(scatter)
    mask_s = _best(lambda: key.apply(vector, out))
    unmask_s = _best(lambda: key.invert(vector, out))
    return [
        KernelResult("mask", 1, d, mask_s, memcpy_s / mask_s, gather_naive_s / mask_s),
        KernelResult("unmask", 1, d, unmask_s, memcpy_s / unmask_s, scatter_naive_s / unmask_s),
        KernelResult("derive", 1, d, derive_s, memcpy_s / derive_s, _best(lambda: rng.permutation(d)) / derive_s),
    ]


def main() -> None:
    """Print all results as a table."""
    for result in measure(quick="--quick" in sys.argv):
        sys.stdout.write(
            f"{result.name:12s} n={result.n:<5d} d={result.d:<9d} {result.seconds:10.5f} s"
            f"  ceiling x{result.ceiling_ratio:<7.3f} naive x{result.naive_ratio:.2f}\n"
        )


if __name__ == "__main__":
    main()
