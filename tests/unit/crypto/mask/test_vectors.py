"""Known answers that an independent implementation computed (tests/vectors/make_mask.py)."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from crypto.mask.derivation import MaskContext, MaskKey, derive
from crypto.mask.masking import mask
from crypto.mask.secret import MaskSecret
from shoal.types import Segment

VECTORS: dict[str, Any] = json.loads((Path(__file__).parents[3] / "vectors" / "mask.json").read_text(encoding="ascii"))


@pytest.mark.parametrize(
    "case", VECTORS["cases"], ids=lambda case: f"{case['mode']}-{case['segments']}-{case['times']}"
)
def test_derivation_matches_the_known_answer(case: dict[str, Any]) -> None:
    """The key id and the permutation of every segment are those of the vector file."""
    key = key_of(case)
    got = mask(np.arange(key.length, dtype=np.float32), key).values.astype("<u4")
    if "masked_range" in case:
        assert got.tolist() == case["masked_range"]
    assert hashlib.sha256(got.tobytes()).hexdigest() == case["masked_range_sha256"]


@pytest.mark.parametrize("case", VECTORS["ramps"], ids=lambda case: f"{case['mode']}-{case['segments']}")
def test_values_change_to_the_known_answer(case: dict[str, Any]) -> None:
    """Signed permutations give the file's values bit for bit, rotations to 1e-6 of the norm."""
    key = key_of(case)
    ramp = np.arange(1, key.length + 1, dtype=np.float32)
    got = mask(ramp, key).values[:: case["step"]]
    if case["mode"] == "signed-permutation":
        assert got.tolist() == case["masked_ramp"]
    else:
        known = np.array(case["masked_ramp"])
        assert np.linalg.norm(got - known) <= 1e-6 * np.linalg.norm(known)


def key_of(case: dict[str, Any]) -> MaskKey:
    zero, key_version, round_ = case["times"]
    assert zero == 0
    context = MaskContext(
        fleet=case["fleet"],
        run_id=bytes.fromhex(case["run_id"]),
        task_digest=bytes.fromhex(case["task_digest"]),
        mode=case["mode"],
        segments=tuple(Segment(name, length) for name, length in case["segments"]),
        key_version=key_version,
        round=round_,
    )
    key = derive(MaskSecret.from_bytes(bytes.fromhex(VECTORS["secret"])), context)
    assert key.key_id.hex() == case["key_id"]
    return key
