"""Cost of every mask mode (derive, apply, undo) as a multiple of memcpy's, and its exactness.

CPU seconds on one thread. All modes and memcpy take turns and the least time of each counts, so that the ratios hold on a
machine with other load. Prints a table: ``python -m shoal_lab.bench.numerics.mask_modes [--quick]``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import numpy as np
from numpy.typing import NDArray

from crypto.mask.derivation import MaskContext, MaskKey, derive
from crypto.mask.masking import mask, unmask
from crypto.mask.modes.registry import MODES
from crypto.mask.secret import MaskSecret
from shoal.types import MaskedVector, Segment
from shoal_lab.bench.numerics.kernels import Bench

SIZES: Final = (100_000, 1_000_000, 10_000_000)
ROWS: Final = 4
"""Vectors whose cosines and mean are compared."""


@dataclass(frozen=True, slots=True)
class ModeCost:
    """One mode at one size.

    Attributes:
        mode: its name; d: coordinates.
        derive_ms, apply_ms, invert_ms: CPU milliseconds of the best of a few turns.
        apply_memcpy_ratio: ``apply_ms`` in units of copying the vector.
        cosine_error: largest absolute difference between cosines of masked and of clear vectors.
        mean_error: l2 distance between the unmasked mean of masked vectors and the mean of clear ones, relative to it.
    """

    mode: str
    d: int
    derive_ms: float
    apply_ms: float
    invert_ms: float
    apply_memcpy_ratio: float
    cosine_error: float
    mean_error: float


def mode_costs(modes: Sequence[str] = tuple(MODES), sizes: Sequence[int] = SIZES, *, turns: int = 9) -> list[ModeCost]:
    """Measure the modes, by size and then by mode.

    Raises:
        ConfigError: there is no such mode.
    """
    return [cost for d in sizes for cost in _at(d, modes, turns)]


def _at(d: int, modes: Sequence[str], turns: int) -> list[ModeCost]:
    bench = Bench(quick=True)
    vector = bench.normal(d)
    out, back = np.empty_like(vector), np.empty_like(vector)
    secret = MaskSecret.from_bytes(bytes(32))
    contexts = [
        MaskContext(fleet="bench", run_id=b"bench", task_digest=bytes(32), mode=mode, segments=(Segment("cluster", d),))
        for mode in modes
    ]
    derive_s = bench.race(*(partial(derive, secret, context) for context in contexts), runs=2)
    keys = [derive(secret, context) for context in contexts]
    work: list[Callable[[], object]] = [partial(np.copyto, out, vector)]
    work += [partial(key.apply, vector, out) for key in keys]
    work += [partial(key.invert, vector, back) for key in keys]
    memcpy_s, *times_s = bench.race(*work, runs=turns)
    costs = []
    for at, (mode, key) in enumerate(zip(modes, keys, strict=True)):
        apply_s, invert_s = times_s[at], times_s[at + len(keys)]
        costs.append(
            ModeCost(
                mode=mode,
                d=d,
                derive_ms=1e3 * derive_s[at],
                apply_ms=1e3 * apply_s,
                invert_ms=1e3 * invert_s,
                apply_memcpy_ratio=apply_s / memcpy_s,
                cosine_error=_cosine_error(bench, key),
                mean_error=_mean_error(bench, key),
            )
        )
    return costs


def _cosine_error(bench: Bench, key: MaskKey) -> float:
    rows = [bench.normal(key.length) for _ in range(ROWS)]
    return float(np.abs(_cosines([mask(row, key).values for row in rows]) - _cosines(rows)).max())


def _cosines(rows: Sequence[NDArray[np.float32]]) -> NDArray[np.float64]:
    wide = np.stack(rows).astype(np.float64)
    wide /= np.linalg.norm(wide, axis=1)[:, None]
    return wide @ wide.T


def _mean_error(bench: Bench, key: MaskKey) -> float:
    clear, masked = np.zeros((2, key.length))
    for _ in range(ROWS):
        row = bench.normal(key.length)
        clear += row
        masked += mask(row, key).values
    mean = unmask(MaskedVector((masked / ROWS).astype(np.float32), key.key_id), key)
    expected = (clear / ROWS).astype(np.float32)
    return float(np.linalg.norm(mean.astype(np.float64) - expected) / np.linalg.norm(expected))


def main() -> None:
    """Print the table."""
    for cost in mode_costs(sizes=SIZES[:1] if "--quick" in sys.argv else SIZES):
        sys.stdout.write(
            f"{cost.mode:18s} d={cost.d:<9d} derive {cost.derive_ms:8.2f} ms  apply {cost.apply_ms:8.3f} ms"
            f" = {cost.apply_memcpy_ratio:6.1f} memcpy  invert {cost.invert_ms:8.3f} ms"
            f"  cosine error {cost.cosine_error:.1e}  mean error {cost.mean_error:.1e}\n"
        )


if __name__ == "__main__":
    main()
