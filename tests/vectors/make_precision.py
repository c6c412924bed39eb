"""Write precision.json: known answers of the encodings of vectors, computed without Shoal's code.

Everything is plain Python on doubles, rounded to float32 where the format says so. Run `python tests/vectors/make_precision.py`
from the repository's root; the file changes only if the wire format does.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from pathlib import Path

SEED = hashlib.sha256(b"upload").digest()


def float32(value: float) -> float:
    return struct.unpack("<f", struct.pack("<f", value))[0]


def stream(purpose: bytes, count: int) -> bytes:
    """Return the first ``count`` bytes of window 0."""
    name = b"shoal/v1/precision/stream\0" + struct.pack("<I", len(SEED)) + SEED + purpose + struct.pack("<Q", 0)
    return hashlib.shake_256(name).digest(count)


def int8(vector: list[float]) -> bytes:
    draws = struct.unpack(f"<{len(vector)}H", stream(b"rounding\0", 2 * len(vector)))
    scales = [float32(max(map(abs, vector[at : at + 256])) / 127) for at in range(0, len(vector), 256)]
    steps = [
        max(-127, min(127, math.floor(float32(float32(value / scales[i // 256]) + (draws[i] + 0.5) / 65536))))
        for i, value in enumerate(vector)
    ]
    return struct.pack(f"<{len(scales)}f", *scales) + struct.pack(f"{len(steps)}b", *steps)


def main() -> None:
    vector = [float32(math.sin(i * i) * (1 + i % 7)) for i in range(300)]
    found = {
        "seed": SEED.hex(),
        "vector": struct.pack("<300f", *vector).hex(),
        "float32": struct.pack("<300f", *vector).hex(),
        "float16": struct.pack("<300e", *vector).hex(),
        "int8": int8(vector).hex(),
    }
    Path(__file__).with_name("precision.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
