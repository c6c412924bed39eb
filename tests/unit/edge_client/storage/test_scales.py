"""The files of scales: durable, checked, and removed with their runs."""

from __future__ import annotations

import hashlib

import pytest

from edge_client.storage.scales import FOLDER, Scale, Scales
from shoal.errors import ConfigError, IntegrityError
from shoal.protocol.codec import encode

RUN, OTHER = b"r" * 16, b"o" * 16
SCALE = Scale(RUN, (1.5, -2.0), (0.25, 1.0))


@pytest.fixture
def scales(tmp_path):
    return Scales(tmp_path)


def path(tmp_path, run_id=RUN):
    return tmp_path / FOLDER / f"scale-{run_id.hex()}.bin"


def test_a_scale_is_read_back_and_private(scales, tmp_path):
    assert scales.load(RUN) is None
    scales.save(SCALE)
    assert Scales(tmp_path).load(RUN) == SCALE
    assert path(tmp_path).stat().st_mode & 0o077 == 0
    changed = Scale(RUN, (0.0,), (2.0,))
    scales.save(changed)
    assert scales.load(RUN) == changed


def test_those_of_other_runs_are_removed(scales, tmp_path):
    scales.keep_only(frozenset())
    for run_id in (RUN, OTHER, bytes(16)):
        scales.save(Scale(run_id, (), ()))
    scales.keep_only(frozenset({RUN, bytes(16)}))
    assert [scales.load(run_id) is None for run_id in (RUN, OTHER, bytes(16))] == [False, True, False]


@pytest.mark.parametrize("keep", [0, 10, -1])
def test_a_damaged_file_is_refused(scales, tmp_path, keep):
    scales.save(SCALE)
    data = path(tmp_path).read_bytes()
    path(tmp_path).write_bytes(data[:keep])
    with pytest.raises(IntegrityError, match="is damaged") as caught:
        scales.load(RUN)
    assert "remove it" in caught.value.hint


@pytest.mark.parametrize(
    "wrong",
    [Scale(OTHER, (1.0,), (1.0,)), Scale(RUN, (1.0,), ()), Scale(RUN, (1.0,), (0.0,)), Scale(RUN, (1.0,), (-1.0,))],
)
def test_file_of_another_run_is_refused(scales, tmp_path, wrong):
    """A file of another run or with no scale is refused."""
    scales.save(SCALE)
    head = encode(wrong)
    path(tmp_path).write_bytes(head + hashlib.sha256(head).digest())
    with pytest.raises(IntegrityError):
        scales.load(RUN)


def test_impossible_folder_is_named(tmp_path):
    """A folder that can't be made is named."""
    (tmp_path / FOLDER).write_text("")
    with pytest.raises(ConfigError, match=FOLDER):
        Scales(tmp_path).save(SCALE)
