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
HALF = {
    2: (0.452780035, 1.510417608),
    4: (0.12839503, 0.388048299, 0.656759119, 0.942340456, 1.256231197, 1.618046386, 2.069017227, 2.732589571),
}


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


def hadamard(values: list[float]) -> list[float]:
    if len(values) == 1:
        return values
    half = len(values) // 2
    first, second = hadamard(values[:half]), hadamard(values[half:])
    return [a + b for a, b in zip(first, second, strict=True)] + [a - b for a, b in zip(first, second, strict=True)]


def blocks(vector: list[float]) -> list[float]:
    """Transform the whole blocks, whose coordinates are apart, then the last coordinates as one block if some are left."""
    size = min(1 << (len(vector).bit_length() - 1), 4096)
    count, out = len(vector) // size, list(vector)
    for block in range(count):
        column = out[block : size * count : count]
        out[block : size * count : count] = [v / math.sqrt(size) for v in hadamard(column)]
    if size * count < len(out):
        out[-size:] = [v / math.sqrt(size) for v in hadamard(out[-size:])]
    return out


def eden(vector: list[float], bits: int) -> bytes:
    signs = stream(b"signs\0", -(-len(vector) // 8))
    turned = blocks([-v if signs[i // 8] >> i % 8 & 1 else v for i, v in enumerate(vector)])
    squared = sum(v * v for v in turned)
    spread = math.sqrt(squared / len(turned))
    levels = [-v for v in reversed(HALF[bits])] + list(HALF[bits])
    index = [min(range(len(levels)), key=lambda j: abs(v / spread - levels[j])) for v in turned]
    scale = squared / sum(v * levels[j] for v, j in zip(turned, index, strict=True))
    packed = bytearray(-(-len(index) * bits // 8))
    for i, j in enumerate(index):
        packed[i * bits // 8] |= j << i * bits % 8
    return struct.pack("<f", scale) + bytes(packed)


def main() -> None:
    vector = [float32(math.sin(i * i) * (1 + i % 7)) for i in range(300)]
    found = {
        "seed": SEED.hex(),
        "vector": struct.pack("<300f", *vector).hex(),
        "float32": struct.pack("<300f", *vector).hex(),
        "float16": struct.pack("<300e", *vector).hex(),
        "int8": int8(vector).hex(),
        "eden4": eden(vector, 4).hex(),
        "eden2": eden(vector, 2).hex(),
    }
    Path(__file__).with_name("precision.json").write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
