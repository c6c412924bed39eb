"""Compare this platform with the known answers of masks, key schedule and precisions: needs numpy and cryptography alone.

Run `python -m tests.vectors.check` from the repository's root. It prints a line for each known answer and ends with 0 if all
agree, else with 1. Rotations are sums of floating-point numbers, whose order is the platform's: they agree to 1e-6 of the norm.
Everything else agrees bit for bit.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import numpy as np

from crypto.mask.dense import behind_matrix
from crypto.mask.derivation import MaskContext, MaskKey, derive
from crypto.mask.masking import mask, unmask
from crypto.mask.schedule import VersionKey
from crypto.mask.secret import MaskSecret
from shoal.protocol.precision.codec import encode
from shoal.types import MaskedVector, Segment

HERE: Final = Path(__file__).parent
MASKS: Final[dict[str, Any]] = json.loads((HERE / "mask.json").read_text(encoding="ascii"))
PRECISIONS: Final[dict[str, Any]] = json.loads((HERE / "precision.json").read_text(encoding="ascii"))
TOLERANCE: Final = 1e-6
"""Of a vector's norm, where the order of sums is the platform's."""
DIGESTED_MODEL: Final = 5
"""The model whose state mask.json has digests of: the vector 0, 1, 2, 3."""


def key_of(case: Mapping[str, Any]) -> MaskKey:
    """Return the mask of a case of mask.json."""
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
    return derive(MaskSecret.from_bytes(bytes.fromhex(MASKS["secret"])), context)


def close(found: np.ndarray[Any, Any], known: np.ndarray[Any, Any], exact: bool) -> bool:
    """Return whether two vectors are equal, or if not ``exact`` differ by at most TOLERANCE of the norm."""
    if exact:
        return bool(np.array_equal(found, known))
    return bool(np.linalg.norm(found - known) <= TOLERANCE * np.linalg.norm(known))


def masks() -> Iterator[tuple[str, bool]]:
    """Yield (known answer, whether this platform agrees) for each mask, masked and back."""
    for case in MASKS["cases"]:
        key = key_of(case)
        numbers = np.arange(key.length, dtype=np.float32)
        masked = mask(numbers, key)
        found = hashlib.sha256(masked.values.astype("<u4").tobytes()).hexdigest()
        agrees = key.key_id.hex() == case["key_id"] and found == case["masked_range_sha256"]
        yield f"mask {_name(case)}", agrees
        yield f"unmask {_name(case)}", bool(np.array_equal(unmask(masked, key), numbers))
    for case in MASKS["ramps"]:
        key = key_of(case)
        ramp = np.arange(1, key.length + 1, dtype=np.float32)
        masked, exact = mask(ramp, key), case["mode"] == "signed-permutation"
        known = np.array(case["masked_ramp"])
        yield f"mask {_name(case)}", close(masked.values[:: case["step"]], known, exact)
        if case["step"] == 1:  # the file has all coordinates: unmask those that the other implementation computed
            masked = MaskedVector(values=known.astype(np.float32), key_id=bytes.fromhex(case["key_id"]))
        yield f"unmask {_name(case)}", close(unmask(masked, key), ramp, exact)
    for case in MASKS["matrices"]:
        key = behind_matrix(key_of(case), MaskSecret.from_bytes(bytes.fromhex(MASKS["secret"])), case["matrix"])
        figures = np.zeros(key.length, np.float32)
        figures[: case["matrix"]] = 1 / np.arange(1, case["matrix"] + 1)
        masked = mask(figures, key)
        yield f"matrix of {case['matrix']} rows, {_name(case)}", masked.values.tolist() == case["masked"]
        yield f"back from {case['matrix']} rows, {_name(case)}", close(unmask(masked, key), figures, exact=False)


def schedule() -> Iterator[tuple[str, bool]]:
    """Yield (known answer, whether this platform agrees) for the keys of each round."""
    known = MASKS["schedule"]
    key = VersionKey(known["fleet"], known["version"], bytes.fromhex(MASKS["secret"]))
    for run in known["runs"]:
        steps = key.begin_run(bytes.fromhex(run["run_id"]), run["rounds"][0]["round"])
        for answer in run["rounds"]:
            keys = steps.take()
            digest = keys.state_digest(DIGESTED_MODEL, np.arange(4, dtype=np.float32))
            found = (keys.round, keys.mask.reveal().hex(), keys.content.hex(), digest.hex())
            agrees = found == (answer["round"], answer["mask"], answer["content"], answer["state_digest"])
            yield f"keys of round {answer['round']}", agrees


def precisions() -> Iterator[tuple[str, bool]]:
    """Yield (known answer, whether this platform agrees) for each encoding of a vector."""
    seed = bytes.fromhex(PRECISIONS["seed"])
    vector = np.frombuffer(bytes.fromhex(PRECISIONS["vector"]), "<f4").astype(np.float32)
    for precision in ("float32", "float16", "int8"):
        yield f"precision {precision}", encode(vector, precision, seed) == bytes.fromhex(PRECISIONS[precision])


def _name(case: Mapping[str, Any]) -> str:
    lengths = "+".join(str(length) for _, length in case["segments"])
    return f"{case['mode']} of {lengths}, times {case['times']}"


def main() -> int:
    """Print each known answer and whether this platform agrees; return the exit status."""
    failed = 0
    for name, agrees in (*masks(), *schedule(), *precisions()):
        print(f"{'ok      ' if agrees else 'DIFFERS '} {name}")  # noqa: T201 - a script's result
        failed += not agrees
    print(f"{failed} of the known answers differ" if failed else "all known answers agree")  # noqa: T201
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
