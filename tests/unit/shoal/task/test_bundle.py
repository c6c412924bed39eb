"""The bundle: container, directory, digest, segments."""

from __future__ import annotations

import hashlib
import struct

import numpy as np
import pytest

from shoal.errors import ShoalError, TaskError, WireError
from shoal.task.bundle import MAGIC, TaskBundle
from tests.helpers.tasks import logistic_bundle


@pytest.fixture(scope="module")
def bundle():
    return logistic_bundle()


def test_container_round_trip_and_digest(bundle):
    """The graphs are not in the repr; swapped ones and another operator set are refused."""
    data = bundle.to_bytes()
    assert TaskBundle.from_bytes(data) == bundle
    assert bundle.digest == hashlib.sha256(data).digest()
    assert len(repr(bundle)) < 2000
    with pytest.raises(TaskError, match=r"score\.onnx is not the graph"):
        TaskBundle(bundle.manifest, bundle.grad, bundle.score, bundle.predict)
    with pytest.raises(TaskError, match="another operator set"):
        logistic_bundle(opset=19)


def test_directory_round_trip(bundle, tmp_path):
    """Writing it removes the private values of an earlier task."""
    logistic_bundle(private=[1.0, 2.0, 3.0]).to_dir(tmp_path / "task")
    for _ in range(2):
        bundle.to_dir(tmp_path / "task")
    assert TaskBundle.from_dir(tmp_path / "task") == bundle
    names = ["grad.onnx", "predict.onnx", "score.onnx", "task.toml"]
    assert sorted(p.name for p in (tmp_path / "task").iterdir()) == names
    with pytest.raises(TaskError, match="can't make"):
        bundle.to_dir(tmp_path / "task" / "task.toml" / "below")


def test_segments_put_shared_first():
    assert [(s.name, s.length) for s in logistic_bundle().segments] == [("cluster", 15)]
    shared = logistic_bundle(segment="shared")
    assert [(s.name, s.length) for s in shared.segments] == [("shared", 12), ("cluster", 3)]
    assert shared.length == 15


def test_truncation_is_refused(bundle):
    """Every truncation and extension is refused."""
    data = bundle.to_bytes()
    for end in [*range(64), *range(64, len(data), 97)]:
        with pytest.raises(ShoalError):
            TaskBundle.from_bytes(data[:end])
    with pytest.raises(WireError, match="does not match"):
        TaskBundle.from_bytes(data + b"\0")


def test_header_lies_are_refused(bundle):
    """And a manifest with spaces is not the canonical one."""
    data = bundle.to_bytes()
    for at, value, message in (
        (0, b"NOPE", "not a task bundle"),
        (4, b"\x02\x00", "version 2"),
        (6, b"\x06\x00", "6 sections"),
    ):
        with pytest.raises(WireError, match=message):
            TaskBundle.from_bytes(data[:at] + value + data[at + len(value) :])
    with pytest.raises(WireError, match="section of 4294967295"):
        TaskBundle.from_bytes(struct.pack("<4sHH4I", MAGIC, 1, 4, 0xFFFFFFFF, 0, 0, 0))
    toml = bundle.manifest.to_toml().replace("opset = 20", "opset  =  20").encode()
    header = struct.pack("<4sHH4I", MAGIC, 1, 4, len(toml), len(bundle.score), len(bundle.grad), len(bundle.predict))
    with pytest.raises(WireError, match="canonical"):
        TaskBundle.from_bytes(header + toml + bundle.score + bundle.grad + bundle.predict)


@pytest.mark.slow
def test_a_flipped_bit_anywhere_is_refused(bundle):
    """Every byte counts: header, manifest and graphs are all bound by lengths, canonical form or digests."""
    data = bundle.to_bytes()
    rng = np.random.default_rng(1)
    for at in rng.choice(len(data), 300, replace=False):
        damaged = bytearray(data)
        damaged[at] ^= 1 << int(rng.integers(8))
        try:
            other = TaskBundle.from_bytes(bytes(damaged))
        except ShoalError:
            continue
        assert other.digest != bundle.digest
        assert other.to_bytes() == bytes(damaged)


def test_missing_or_large_files_are_refused(bundle, tmp_path, monkeypatch):
    """Missing and oversize files are refused."""
    with pytest.raises(TaskError, match="can't read"):
        TaskBundle.from_dir(tmp_path / "nowhere")
    bundle.to_dir(tmp_path)
    (tmp_path / "task.toml").write_bytes(b"#" * (300 * 1024))
    with pytest.raises(TaskError, match="bigger than"):
        TaskBundle.from_dir(tmp_path)


def test_private_parameters_come_last(tmp_path):
    """Private parameters come last and bring their initial values."""
    bundle = logistic_bundle(segment="shared", private=[1.0, 2.0, 3.0])
    assert [(s.name, s.length) for s in bundle.segments] == [("shared", 12)]
    manifest = bundle.manifest
    assert (bundle.length, manifest.federated_length, manifest.private_length) == (15, 12, 3)
    assert [p.name for p in manifest.private_parameters] == ["bias"]
    assert TaskBundle.from_bytes(bundle.to_bytes()) == bundle
    bundle.to_dir(tmp_path)
    assert TaskBundle.from_dir(tmp_path) == bundle
    assert bundle.digest != logistic_bundle(segment="shared", private=[1.0, 2.0, 4.0]).digest


def test_unfit_private_values_are_refused(tmp_path, bundle):
    """Private values that do not fit are refused."""
    with pytest.raises(TaskError, match="8 bytes of initial values for 3 private"):
        logistic_bundle(private=[1.0, 2.0])
    private = logistic_bundle(private=[1.0, 2.0, 3.0])
    private.to_dir(tmp_path)
    for damaged, message in ((b"", "0 bytes"), (bytes(13), "bigger than 12")):
        (tmp_path / "private.f32").write_bytes(damaged)
        with pytest.raises(TaskError, match=message):
            TaskBundle.from_dir(tmp_path)
    (tmp_path / "private.f32").unlink()
    with pytest.raises(TaskError, match="can't read"):
        TaskBundle.from_dir(tmp_path)
    bundle.to_dir(tmp_path)
    assert TaskBundle.from_dir(tmp_path) == bundle
    parts = bundle._parts()
    fifth = MAGIC + struct.pack("<HH5I", 1, 5, *(len(part) for part in parts[1:]), 0) + b"".join(parts[1:])
    with pytest.raises(WireError, match="empty section"):
        TaskBundle.from_bytes(fifth)
    with pytest.raises(WireError, match="inside its section lengths"):
        TaskBundle.from_bytes(fifth[:24])
