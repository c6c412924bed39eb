"""Known answers that an independent implementation computed (tests/vectors/make_mask.py)."""

from __future__ import annotations

import hashlib
from typing import Any

import numpy as np
import pytest

from crypto.mask.masking import mask
from tests.helpers.trees import python
from tests.vectors.check import MASKS as VECTORS
from tests.vectors.check import key_of

ONLY_NUMPY_AND_CRYPTOGRAPHY = """
import sys

class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.split(".")[0]
        ours = ("shoal", "crypto", "tests", "numpy", "cryptography", "cffi", "_cffi_backend")
        if top not in ours and top not in sys.stdlib_module_names:
            raise ImportError("blocked: " + name)

sys.meta_path.insert(0, Block())
from tests.vectors.check import main
raise SystemExit(main())
"""


@pytest.mark.parametrize(
    "case", VECTORS["cases"], ids=lambda case: f"{case['mode']}-{case['segments']}-{case['times']}"
)
def test_derivation_matches_the_known_answer(case: dict[str, Any]) -> None:
    """The key id and the permutation of every segment are those of the vector file."""
    key = key_of(case)
    assert key.key_id.hex() == case["key_id"]
    got = mask(np.arange(key.length, dtype=np.float32), key).values.astype("<u4")
    if "masked_range" in case:
        assert got.tolist() == case["masked_range"]
    assert hashlib.sha256(got.tobytes()).hexdigest() == case["masked_range_sha256"]


@pytest.mark.parametrize("case", VECTORS["ramps"], ids=lambda case: f"{case['mode']}-{case['segments']}")
def test_values_change_to_the_known_answer(case: dict[str, Any]) -> None:
    """Signed permutations give the file's values bit for bit, rotations to 1e-6 of the norm."""
    key = key_of(case)
    assert key.key_id.hex() == case["key_id"]
    got = mask(np.arange(1, key.length + 1, dtype=np.float32), key).values[:: case["step"]]
    if case["mode"] == "signed-permutation":
        assert got.tolist() == case["masked_ramp"]
    else:
        known = np.array(case["masked_ramp"])
        assert np.linalg.norm(got - known) <= 1e-6 * np.linalg.norm(known)


@pytest.mark.slow
def test_platform_checks_the_known_answers() -> None:
    """`python -m tests.vectors.check` needs numpy and cryptography alone, and checks unmasking too."""
    done = python(ONLY_NUMPY_AND_CRYPTOGRAPHY)
    lines = done.stdout.splitlines()
    assert (done.returncode, lines[-1:]) == (0, ["all known answers agree"]), done.stdout + done.stderr
    assert len([line for line in lines if line.startswith("ok       unmask ")]) == len(
        VECTORS["cases"] + VECTORS["ramps"]
    )
