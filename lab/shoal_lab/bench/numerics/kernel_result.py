"""The figures of one measured kernel."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelResult:
    """One kernel at one size.

    Attributes:
        name: the kernel.
        n: devices; 1 for the mask.
        d: coordinates; 0 for ``bipartition`` and ``madc``, which see only similarities.
        seconds: CPU seconds of the best of a few runs.
        ceiling_ratio: speed in units of the ceiling's: one sgemm for ``gram``, ``streaming_gram`` and ``edc`` (counted
            as 2 n^2 d, so symmetry can take it past 1), reading the input once for ``mean`` and ``bipartition``, n^3 / 2
            additions in the cache for ``madc``, memcpy for the mask.
        naive_ratio: the naive form's time in units of ours: dot products pair by pair, cfl Alg. 1 with sorted pairs
            and union-find, scikit-learn's randomised SVD, all n^3 differences, ``numpy.average``, one fancy-indexed
            gather.
    """

    name: str
    n: int
    d: int
    seconds: float
    ceiling_ratio: float
    naive_ratio: float
