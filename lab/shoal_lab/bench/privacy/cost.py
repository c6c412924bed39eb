"""Measure a mask mode: its cost, and the exactness of the aggregator's computations under it."""

from __future__ import annotations

import hashlib
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.averaging import weighted_mean
from aggregator.numerics.backend import cosine_matrix
from aggregator.numerics.bipartition import bipartition
from aggregator.numerics.embedding import edc
from crypto.mask.derivation import MaskContext, derive
from crypto.mask.masking import mask, unmask
from crypto.mask.secret import MaskSecret
from crypto.seal.envelope import open_from_member, read_head, seal_message_to_member
from crypto.seal.identity import Identity
from crypto.sums.ring import hidden, mean_of, unit_of
from shoal.owner.runs.plan import most_summed
from shoal.protocol.channels import UPLOAD
from shoal.protocol.recipe import DEFAULTS
from shoal.types import MaskedVector, Segment
from shoal_lab.bench.attacks.lab import CLASSES, ONE_EPOCH, Images, Lab
from shoal_lab.bench.attacks.sums import words_of
from shoal_lab.bench.numerics.kernels import Bench

SIZES: Final = (100_000, 1_000_000, 10_000_000)
MAIN_SIZE: Final = 1_000_000
"""Coordinates that the fixed figures are of."""
DEVICES: Final = 8
TOLERANCE: Final = 1e-4
"""Relative difference up to which a result on masked vectors counts as the one on clear vectors."""
MEAN_TOLERANCE: Final = 1e-3
"""The same for a mean of fixed-point numbers, which have room for updates a thousand times longer."""
_MEGABYTE: Final = 1e6


def measure_cost(mode: str, quick: bool) -> list[dict[str, Any]]:
    """Return the cost of a mode at 1e5, 1e6 and, unless quick, 1e7 coordinates; the least of a few runs each.

    CPU milliseconds on one thread for a vector of ``d`` coordinates, applying also in units of copying the vector, and the bytes
    that the masked vector travels as: the mask adds none.
    """
    return [cost(mode, d, Bench(quick), runs=3 if d > MAIN_SIZE else 5) for d in (SIZES[:2] if quick else SIZES)]


def cost(mode: str, d: int, bench: Bench, runs: int) -> dict[str, Any]:
    """Return the cost of a mode at ``d`` coordinates, as `measure_cost` does, as the least of so many runs."""
    secret = MaskSecret.from_bytes(hashlib.sha256(b"cost").digest())
    context = MaskContext(
        fleet="lab", run_id=b"cost", task_digest=bytes(32), mode=mode, segments=(Segment("cluster", d),)
    )
    key = derive(secret, context)
    source, out = bench.normal(d), np.empty(d, np.float32)
    apply, invert, copy = bench.race(
        lambda: key.apply(source, out), lambda: key.invert(source, out), lambda: np.copyto(out, source), runs=runs
    )
    (deriving,) = bench.race(lambda: derive(secret, context), runs=1 if d > MAIN_SIZE else 3)
    return {
        "d": d,
        "derive_ms": 1e3 * deriving,
        "apply_ms": 1e3 * apply,
        "invert_ms": 1e3 * invert,
        "apply_memcpy_ratio": apply / copy,
        "bytes": mask(source, key).values.nbytes,
    }


def measure_sums(quick: bool) -> list[dict[str, Any]]:
    """Return the cost of a run with a keeper as `measure_cost` does: a pad is applied, and the mean of a sum inverts it."""
    return [_cost_of_sum(d, Bench(quick), runs=3 if d > MAIN_SIZE else 5) for d in (SIZES[:2] if quick else SIZES)]


def _cost_of_sum(d: int, bench: Bench, runs: int) -> dict[str, Any]:
    most, seed = most_summed(DEVICES), bytes(32)
    source, out, unit = (
        bench.normal(d) / np.float32(d**0.5),
        np.empty(d, np.float32),
        unit_of(DEFAULTS.norm_limit, d, most),
    )
    words = hidden(source, unit, most, ())
    apply, invert, copy = bench.race(
        lambda: hidden(source, unit, most, [seed]),
        lambda: mean_of(words, 1, unit, DEFAULTS.norm_limit),
        lambda: np.copyto(out, source),
        runs=runs,
    )
    times = {"derive_ms": 0.0, "apply_ms": 1e3 * apply, "invert_ms": 1e3 * invert, "apply_memcpy_ratio": apply / copy}
    return {"d": d, **times, "bytes": words.nbytes}


def computed_of_sums(lab: Lab) -> dict[str, Any]:
    """Return what the aggregator can compute in a run with a keeper, as `measure_computed` does: the mean, and nothing else."""
    clear = lab.once("computed", lambda: [_update(lab, i) for i in range(DEVICES)])
    error = _relative(words_of(clear)[1], np.mean(np.stack(clear).astype(np.float64), axis=0))
    can = dict.fromkeys(measure_computed(lab, "none")["can"], False) | {"mean": error < MEAN_TOLERANCE}
    return {"cosine_error": 1.0, "mean_error": error, "can": can}


def measure_seal(quick: bool) -> dict[str, float]:
    """Return CPU ms a MB for sealing and opening a masked update of 1e6 coordinates, and the bytes that sealing adds."""
    sender, recipient = Identity.generate("dev-00"), Identity.generate("aggregator")
    body = Bench(quick).normal(MAIN_SIZE).tobytes()
    head = UPLOAD.head("lab", sender.name, recipient.name)
    to, by = recipient.member.seal_key, sender.member.sign_key
    payload = seal_message_to_member(sender, to, head, b"", body).payload

    def opening() -> None:
        found, at = read_head(payload)
        open_from_member(recipient, payload, found, at, by)

    sealing, unsealing = Bench(quick).race(
        lambda: seal_message_to_member(sender, to, head, b"", body), opening, runs=2 if quick else 4
    )
    size = len(body) / _MEGABYTE
    return {
        "seal_ms_per_mb": 1e3 * sealing / size,
        "open_ms_per_mb": 1e3 * unsealing / size,
        "bytes_added": float(len(payload) - len(body)),
    }


def measure_computed(lab: Lab, mode: str) -> dict[str, Any]:
    """Compute on eight devices' updates, of two groups with different labels, under ``mode`` and in clear, and compare.

    Returns:
        ``cosine_error``, the largest absolute difference of a cosine; ``mean_error``, the relative L2 distance of the unmasked
        mean of masked updates from the mean in float64; and ``can``: computation -> whether its result equals that on the clear
        updates, to 1e-4.
    """
    clear = np.stack(lab.once("computed", lambda: [_update(lab, i) for i in range(DEVICES)]))
    key, masked = lab.key(mode), np.stack([lab.masked(u, mode) for u in clear])
    weights = np.arange(1.0, DEVICES + 1)
    exact = np.average(clear.astype(np.float64), axis=0, weights=weights)

    def opened(vector: NDArray[np.float32]) -> NDArray[np.float64]:
        return unmask(MaskedVector(np.ascontiguousarray(vector, np.float32), key.key_id), key).astype(np.float64)

    mean_error = _relative(opened(weighted_mean(masked, weights)), exact)
    before, after = cosine_matrix(clear), cosine_matrix(masked)
    cosine_error = float(np.abs(before - after).max())
    split = bipartition(after).left == bipartition(before).left
    median = _relative(opened(np.median(masked, axis=0)), np.median(clear.astype(np.float64), axis=0))
    can = {
        "norms": _relative(np.linalg.norm(masked, axis=1), np.linalg.norm(clear, axis=1)) < TOLERANCE,
        "cosines": cosine_error < TOLERANCE,
        "mean": mean_error < TOLERANCE,
        "cfl_split": split and set(bipartition(after).left) in ({0, 2, 4, 6}, {1, 3, 5, 7}),
        "singular_values": _relative(_singular(masked), _singular(clear)) < TOLERANCE,
        "fedgroup_embedding": _relative(edc(masked, 2), edc(clear, 2)) < 1e2 * TOLERANCE,
        "distances_of_kmeans": _relative(_distances(masked), _distances(clear)) < TOLERANCE,
        "coordinate_median": median < TOLERANCE,
        "sees_sparsity": bool(np.array_equal((masked == 0).sum(1), (clear == 0).sum(1))),
        "sees_values": bool(np.array_equal(np.sort(masked, axis=1), np.sort(clear, axis=1))),
        "sees_magnitudes": bool(np.array_equal(np.sort(np.abs(masked), axis=1), np.sort(np.abs(clear), axis=1))),
        "sees_updates": bool(np.array_equal(masked, clear)),
    }
    return {
        "cosine_error": cosine_error,
        "mean_error": mean_error,
        "can": {name: bool(value) for name, value in can.items()},
    }


def _update(lab: Lab, device: int) -> NDArray[np.float32]:
    images = lab.pick(f"computed {device}", 60)
    return lab.update(Images(images.x, (images.y + device % 2) % CLASSES), ONE_EPOCH, seed=device)


def _relative(a: NDArray[Any], b: NDArray[Any]) -> float:
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.linalg.norm(x - y) / np.linalg.norm(y))


def _singular(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    return np.asarray(np.linalg.svd(rows.astype(np.float64), compute_uv=False))


def _distances(rows: NDArray[np.float32]) -> NDArray[np.float64]:
    wide = rows.astype(np.float64)
    return np.asarray(np.linalg.norm(wide[:, None] - wide[None], axis=2), np.float64)
