"""Mask keys and vectors for tests of the mask."""

from __future__ import annotations

import numpy as np

from crypto.mask.derivation import MaskContext, MaskKey, derive
from crypto.mask.secret import MaskSecret
from shoal.types import Segment

SECRET = MaskSecret.from_bytes(bytes(range(32)))


def key_of(mode: str, *lengths: int) -> MaskKey:
    names = ("shared", "cluster") if len(lengths) > 1 else ("cluster",)
    segments = tuple(Segment(name, length) for name, length in zip(names, lengths, strict=True))
    return derive(
        SECRET,
        MaskContext(fleet="plant-7", run_id=b"run", task_digest=bytes(32), mode=mode, segments=segments),
    )


def normal(length: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(length, dtype=np.float32)
