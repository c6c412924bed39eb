"""Public seeds: one for each upload and each mean, so that two never share the draws of their rounding."""

from __future__ import annotations

import struct
from typing import Final

from shoal.digests import sha256

_LABEL: Final = b"shoal/v1/precision\0"


def upload_seed(run_id: bytes, round_: int, phase: int, device: str) -> bytes:
    """Return the seed, 32 bytes, of a device's upload in a round."""
    return _seed(b"upload\0", run_id, struct.pack("<II", round_, phase), device.encode())


def mean_seed(run_id: bytes, round_: int, model: int) -> bytes:
    """Return the seed, 32 bytes, of a model's mean in a round."""
    return _seed(b"mean\0", run_id, struct.pack("<II", round_, model))


def _seed(kind: bytes, *fields: bytes) -> bytes:
    return sha256(_LABEL, kind, *fields)
