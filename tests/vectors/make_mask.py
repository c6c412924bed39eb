"""Write mask.json: known answers of the mask derivation, computed without Shoal's code.

HKDF is written out from RFC 5869 with hmac, AES-256-CTR as AES-256 of the counter blocks, the sort is Python's. Run
`python tests/vectors/make_mask.py` from the repository's root; the file changes only if the derivation's version does.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import math
import struct
from pathlib import Path

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

SALT = b"shoal-mask/v3"
SECRET = bytes(range(32))
DIGEST = hashlib.sha256(b"task").digest()


def hkdf(secret: bytes, length: int, *fields: bytes) -> bytes:
    info = b"".join(struct.pack(">I", len(field)) + field for field in fields)
    pseudo_random_key = hmac.new(SALT, secret, hashlib.sha256).digest()
    block, out, counter = b"", b"", 1
    while len(out) < length:
        block = hmac.new(pseudo_random_key, block + info + bytes([counter]), hashlib.sha256).digest()
        out, counter = out + block, counter + 1
    return out[:length]


def keystream(key: bytes, blocks: int) -> bytes:
    encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # counter blocks, never data
    return encryptor.update(b"".join(struct.pack(">QQ", 0, i) for i in range(blocks)))


def permutation(key: bytes, length: int) -> list[int]:
    digits = struct.unpack_from(f"<{2 * length}H", keystream(key, length // 4 + 1))
    return sorted(range(length), key=lambda i: (digits[length + i] << 16 | digits[i], i))


def signs(key: bytes, length: int) -> list[int]:
    bits = int.from_bytes(keystream(key, length // 128 + 1), "little")
    return [1 - 2 * (bits >> i & 1) for i in range(length)]


def hadamard(values: list[float]) -> list[float]:
    """Sylvester's matrix by its recursion: the sums and the differences of the two halves, each transformed."""
    if len(values) == 1:
        return values
    half = len(values) // 2
    first, second = hadamard(values[:half]), hadamard(values[half:])
    return [a + b for a, b in zip(first, second, strict=True)] + [a - b for a, b in zip(first, second, strict=True)]


def blocks(values: list[float]) -> list[float]:
    out, length = list(values), len(values)
    size = min(1 << (length.bit_length() - 1), 4096)
    count = length // size
    for block in range(count):
        out[block : size * count : count] = [v / math.sqrt(size) for v in hadamard(out[block : size * count : count])]
    if size * count < length:
        out[-size:] = [v / math.sqrt(size) for v in hadamard(out[-size:])]
    return out


def gather(values: list[float], index: list[int]) -> list[float]:
    return [values[i] for i in index]


def signed(values: list[float], by: list[int]) -> list[float]:
    return [value * sign for value, sign in zip(values, by, strict=True)]


def ramp_case(
    fleet: str, run: bytes, times: tuple[int, int, int], mode: str, segments: list[tuple[str, int]]
) -> dict[str, object]:
    """The modes that change values: what becomes of 1, 2, 3, ..."""
    fields = [f"{name}:{length}".encode() for name, length in segments]
    when = struct.pack(">QQQ", *times)
    masked: list[float] = []
    for field, (_, length) in zip(fields, segments, strict=True):

        def key(purpose: str, field: bytes = field) -> bytes:
            return hkdf(SECRET, 32, fleet.encode(), run, when, DIGEST, field, f"{mode}/{purpose}".encode())

        values = [float(len(masked) + i + 1) for i in range(length)]
        index = permutation(key("index"), length)
        if mode == "signed-permutation":
            masked += signed(gather(values, index), signs(key("signs"), length))
        else:
            first, middle, last = (signs(key(f"signs-{i}"), length) for i in range(3))
            inner = signed(blocks(signed(values, first)), middle)
            masked += signed(blocks(gather(inner, index)), last)
    step = 1 if len(masked) <= 64 else len(masked) // 40
    return {
        **context(fleet, run, times, mode, segments),
        "step": step,
        "masked_ramp": masked[::step],
    }


def uniform(key: bytes, count: int) -> list[float]:
    """Multiples of 2^-53 below 1."""
    return [(word >> 11) / 2**53 for word in struct.unpack_from(f"<{count}Q", keystream(key, count // 2 + 1))]


def folded(values: list[float]) -> float:
    """The sum in the order that all devices add in: the upper half is added to the lower one."""
    while len(values) > 1:
        half = len(values) // 2
        values = [a + b for a, b in zip(values[:half], values[half:], strict=True)]
    return values[0]


def reflections(circle: bytes, lengths: bytes, size: int) -> list[tuple[list[float], float, float]]:
    """For each dimension k = 1 to n: the normal, 2 divided by its squared length, and the sign."""
    total, width = sum((k + 1) // 2 for k in range(1, size + 1)), 1
    while width < size:
        width *= 2
    draws = uniform(circle, 4 * total + 512)
    points = []
    for a, b in zip(draws[::2], draws[1::2], strict=True):
        x, y = 2 * a - 1 + 2.0**-53, 2 * b - 1 + 2.0**-53
        if x * x + y * y < 1:
            points.append((x / math.sqrt(x * x + y * y), y / math.sqrt(x * x + y * y)))
    cuts, found, at = uniform(lengths, total), [], 0
    for k in range(1, size + 1):
        half = (k + 1) // 2
        ends = [0.0, *sorted(cuts[at : at + half - 1]), 1.0]
        direction = []
        for i in range(half):
            length = math.sqrt(ends[i + 1] - ends[i])
            direction += [length * points[at + i][0], length * points[at + i][1]]
        normal = [0.0] * (size - k) + direction[:k] + [0.0] * (width - size)
        sign = -math.copysign(1.0, normal[size - k])
        normal[size - k] -= sign * math.sqrt(folded([v * v for v in normal]))
        found.append((normal, 2.0 / folded([v * v for v in normal]), sign))
        at += half
    return found


def matrix_case(mode: str, size: int, length: int) -> dict[str, object]:
    """What becomes of 1, 1/2, 1/3, ... in the first ``size`` coordinates and zeros behind, rounded to float32."""
    fleet, run, times, field = "fleet-a", bytes(range(16)), (0, 3, 7), f"cluster:{length}".encode()
    place = (fleet.encode(), run, struct.pack(">QQQ", *times), DIGEST)
    circle, lengths = (hkdf(SECRET, 32, *place, f"dense:{size}".encode(), p) for p in (b"circle", b"lengths"))
    rows = reflections(circle, lengths, size)
    values = [single(1 / (i + 1)) for i in range(size)] + [0.0] * (len(rows[0][0]) - size)
    for at, (normal, ahead, sign) in enumerate(rows):
        step = ahead * folded([n * v for n, v in zip(normal, values, strict=True)])
        values = [v - n * step for n, v in zip(normal, values, strict=True)]
        values[size - 1 - at :] = [v * sign for v in values[size - 1 - at :]]
    sent = [single(v) for v in values[:size]] + [0.0] * (length - size)
    if mode == "permutation":
        sent = gather(sent, permutation(hkdf(SECRET, 32, *place, field, b"permutation"), length))
    return {
        **context(fleet, run, times, mode, [("cluster", length)]),
        "matrix": size,
        "masked": sent,
    }


def single(value: float) -> float:
    found: float = struct.unpack("<f", struct.pack("<f", value))[0]
    return found


def context(
    fleet: str, run: bytes, times: tuple[int, int, int], mode: str, segments: list[tuple[str, int]]
) -> dict[str, object]:
    """The public inputs of a case, and its key id."""
    fields = b",".join(f"{name}:{length}".encode() for name, length in segments)
    place = (fleet.encode(), run, struct.pack(">QQQ", *times), DIGEST, mode.encode(), fields)
    return {
        "fleet": fleet,
        "run_id": run.hex(),
        "times": list(times),
        "task_digest": DIGEST.hex(),
        "mode": mode,
        "segments": [list(segment) for segment in segments],
        "key_id": hkdf(SECRET, 16, b"key-id", *place).hex(),
    }


def case(
    fleet: str, run: bytes, times: tuple[int, int, int], mode: str, segments: list[tuple[str, int]]
) -> dict[str, object]:
    fields = [f"{name}:{length}".encode() for name, length in segments]
    when = struct.pack(">QQQ", *times)
    gathered, start = [], 0
    for field, (_, length) in zip(fields, segments, strict=True):
        key = hkdf(SECRET, 32, fleet.encode(), run, when, DIGEST, field, b"permutation")
        local = permutation(key, length) if mode == "permutation" else list(range(length))
        gathered += [start + index for index in local]
        start += length
    answer: dict[str, object] = {
        **context(fleet, run, times, mode, segments),
    }
    if start <= 64:
        answer["masked_range"] = gathered
    answer["masked_range_sha256"] = hashlib.sha256(struct.pack(f"<{start}I", *gathered)).hexdigest()
    return answer


def state_digest(key: bytes, run: bytes, model: int, round_: int) -> bytes:
    """The digest of the model 0, 1, 2, 3."""
    body = struct.pack(">I", len(run)) + run + struct.pack(">QQ", model, round_) + struct.pack("<4f", 0, 1, 2, 3)
    return hmac.new(key, body, hashlib.sha256).digest()


def schedule() -> dict[str, object]:
    """The keys of two runs under one key version: three rounds of each, the second from round 4 on."""
    secret, runs = SECRET, []
    for number, first in ((1, 1), (2, 4)):
        run = bytes([number]) * 16
        place = (b"fleet-a", run)
        key = hkdf(hkdf(secret, 32, b"run", *place), 32, b"first-round", struct.pack(">Q", first))
        secret = hkdf(secret, 32, b"next-run")
        rounds = []
        for round_ in range(first, first + 3):
            at = (*place, struct.pack(">Q", round_))
            content = hkdf(key, 32, b"content", *at)
            rounds.append(
                {
                    "round": round_,
                    "mask": hkdf(key, 32, b"mask", *at).hex(),
                    "content": content.hex(),
                    "state_digest": state_digest(hkdf(content, 32, b"digest"), run, 5, round_).hex(),
                }
            )
            key = hkdf(key, 32, b"next-round")
        runs.append({"run_id": run.hex(), "rounds": rounds})
    return {"fleet": "fleet-a", "version": 9, "runs": runs}


def main() -> None:
    run = bytes(range(16))
    cases = [
        case("fleet-a", run, (0, 0, 0), "permutation", [("cluster", 1)]),
        case("fleet-a", run, (0, 0, 0), "permutation", [("cluster", 16)]),
        case("fleet-a", run, (0, 1, 0), "permutation", [("cluster", 16)]),
        case("fleet-b", run, (0, 0, 0), "permutation", [("cluster", 17)]),
        case("fleet-a", bytes(range(16, 32)), (0, 0, 0), "permutation", [("cluster", 16)]),
        case("fleet-a", run, (0, 7, 0), "permutation", [("shared", 24), ("cluster", 9)]),
        case("fleet-a", run, (0, 0, 0), "permutation", [("cluster", 159_010)]),
        case("fleet-a", run, (0, 0, 0), "permutation", [("cluster", 3_000_001)]),
        case("fleet-a", run, (0, 0, 0), "none", [("cluster", 16)]),
        case("fleet-a", run, (0, 5, 0), "permutation", [("cluster", 16)]),
        case("fleet-a", run, (0, 5, 1), "permutation", [("cluster", 16)]),
        case("fleet-a", run, (0, 0, 5), "permutation", [("cluster", 16)]),
    ]
    ramps = [
        ramp_case("fleet-a", run, (0, 3, 7), mode, segments)
        for mode in ("signed-permutation", "rotation")
        for segments in (
            [("cluster", 1)],
            [("cluster", 16)],
            [("shared", 23), ("cluster", 2)],
            [("cluster", 4095)],
            [("shared", 8192), ("cluster", 10_007)],
            [("cluster", 159_010)],
        )
    ]
    document = {
        "about": "masked_range[i] is the coordinate of 0, 1, 2, ... that lands at i; sha256 is over little-endian uint32",
        "made_by": "tests/vectors/make_mask.py, without Shoal's code",
        "secret": SECRET.hex(),
        "schedule": schedule(),
        "cases": cases,
        "about_ramps": "masked_ramp is every step-th value of 1, 2, 3, ... under the mask; rotation in double precision",
        "ramps": ramps,
        "about_matrices": "masked is 1, 1/2, 1/3, ... and zeros from place matrix on, behind the dense matrix of that size",
        "matrices": [matrix_case("permutation", *sizes) for sizes in ((1, 1), (2, 9), (9, 9), (32, 40), (96, 100))],
    }
    Path(__file__).with_name("mask.json").write_text(json.dumps(document, indent=1) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
