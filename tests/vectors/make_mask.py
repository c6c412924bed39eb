"""Write mask.json: known answers of the mask derivation, computed without Shoal's code.

HKDF is written out from RFC 5869 with hmac, AES-256-CTR as AES-256 of the counter blocks, the sort is Python's. Run
`python tests/vectors/make_mask.py` from the repository's root; the file changes only if the derivation's version does.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import struct
from pathlib import Path

from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

SALT = b"shoal-mask/v1"
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


def permutation(key: bytes, length: int) -> list[int]:
    encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()  # counter blocks, never data
    stream = encryptor.update(b"".join(struct.pack(">QQ", 0, i) for i in range(length // 2 + 1)))
    low = (1 << (length - 1).bit_length()) - 1
    words = [(struct.unpack_from("<Q", stream, 8 * i)[0] & ~low) | i for i in range(length)]
    return [word & low for word in sorted(words)]


def case(fleet: str, run: bytes, epoch: int, mode: str, segments: list[tuple[str, int]]) -> dict[str, object]:
    fields = [f"{name}:{length}".encode() for name, length in segments]
    when = struct.pack(">Q", epoch)
    gathered, start = [], 0
    for field, (_, length) in zip(fields, segments, strict=True):
        key = hkdf(SECRET, 32, fleet.encode(), when, DIGEST, field, b"permutation")
        local = permutation(key, length) if mode == "permutation" else list(range(length))
        gathered += [start + index for index in local]
        start += length
    key_id = hkdf(SECRET, 16, b"key-id", fleet.encode(), run, when, DIGEST, mode.encode(), b",".join(fields))
    answer: dict[str, object] = {
        "fleet": fleet,
        "run_id": run.hex(),
        "epoch": epoch,
        "task_digest": DIGEST.hex(),
        "mode": mode,
        "segments": [list(segment) for segment in segments],
        "key_id": key_id.hex(),
    }
    if start <= 64:
        answer["masked_range"] = gathered
    answer["masked_range_sha256"] = hashlib.sha256(struct.pack(f"<{start}I", *gathered)).hexdigest()
    return answer


def main() -> None:
    run = bytes(range(16))
    cases = [
        case("fleet-a", run, 0, "permutation", [("cluster", 1)]),
        case("fleet-a", run, 0, "permutation", [("cluster", 16)]),
        case("fleet-a", run, 1, "permutation", [("cluster", 16)]),
        case("fleet-b", run, 0, "permutation", [("cluster", 17)]),
        case("fleet-a", run, 7, "permutation", [("shared", 24), ("cluster", 9)]),
        case("fleet-a", run, 0, "permutation", [("cluster", 159_010)]),
        case("fleet-a", run, 0, "none", [("cluster", 16)]),
    ]
    document = {
        "about": "masked_range[i] is the coordinate of 0, 1, 2, ... that lands at i; sha256 is over little-endian uint32",
        "made_by": "tests/vectors/make_mask.py, without Shoal's code",
        "secret": SECRET.hex(),
        "next_secret": hkdf(SECRET, 32, b"next").hex(),
        "cases": cases,
    }
    Path(__file__).with_name("mask.json").write_text(json.dumps(document, indent=1) + "\n", encoding="ascii")


if __name__ == "__main__":
    main()
