"""The aggregator's view: the figures of the comparison, and an image that can be read only without a mask."""

from __future__ import annotations

import contextlib
import sqlite3

import numpy as np
import pytest

from aggregator.storage.store import DATABASE
from aggregator.storage.vector_log import checksum
from crypto.mask.derivation import MaskContext, derive
from crypto.mask.masking import mask
from crypto.mask.secret import MaskSecret
from shoal.demo.seen import PSNR_CAP_DB, compare, read_image, stored_update
from shoal.task.bundle import Parameter
from shoal.types import Segment
from tests.helpers.tasks import manifest

SECRET = MaskSecret.from_bytes(bytes(range(32)))
INPUTS, HIDDEN = 64, 10
LENGTH = HIDDEN * INPUTS + HIDDEN


def key_of(length, mode="permutation"):
    return derive(
        SECRET,
        MaskContext(
            fleet="demo",
            run_id=b"r" * 16,
            task_digest=b"t" * 32,
            mode=mode,
            segments=(Segment("cluster", length),),
        ),
    )


def test_true_vector_is_beside_the_masked():
    """Computed by hand: masking 0, 1, 2, ... shows the permutation."""
    key = key_of(40)
    origin = mask(np.arange(40, dtype=np.float32), key).values.astype(int)
    assert sorted(origin) == list(range(40))
    true = np.random.default_rng(1).standard_normal(40).astype(np.float32)
    true[:5] = 0.0
    view = mask(true, key).values
    assert np.array_equal(view, true[origin])
    cosine, share = compare(view, key)
    exact = true.astype(float)
    assert cosine == pytest.approx(exact @ exact[origin] / (exact @ exact), abs=1e-6)
    assert share == sum(origin[i] == i for i in range(5, 40)) / 35


def test_unmoved_coordinates_are_counted():
    """Equal values count as in place even if they moved; zeros are ignored. Without a mask the update itself is seen."""
    key = key_of(40)
    origin = mask(np.arange(40, dtype=np.float32), key).values.astype(int)
    at = int(np.flatnonzero(origin != np.arange(40))[0])
    true = np.zeros(40, np.float32)
    true[at] = 3.0
    assert compare(mask(true, key).values, key) == (0.0, 0.0)
    assert compare(mask(np.ones(40, np.float32), key).values, key) == (pytest.approx(1.0), 1.0)
    clear = key_of(40, "none")
    seen = mask(np.random.default_rng(1).standard_normal(40).astype(np.float32), clear).values
    assert compare(seen, clear) == (pytest.approx(1.0), 1.0)


@pytest.fixture(scope="module")
def attempt():
    """(update, image, manifest) of one step on one image x in a first layer: row j is g_j x, and its bias g_j."""
    rng = np.random.default_rng(2)
    image = rng.random(INPUTS).astype(np.float32)
    gradient = rng.standard_normal(HIDDEN).astype(np.float32)
    update = np.concatenate([np.outer(gradient, image).ravel(), gradient]).astype(np.float32)
    layout = (Parameter("weight", (HIDDEN, INPUTS), "cluster"), Parameter("bias", (HIDDEN,), "cluster"))
    return update, image, manifest(INPUTS, HIDDEN, parameters=layout)


def test_without_mask_image_is_read_exactly(attempt):
    """With it as near as a guess: uniform noise against a uniform image has 10 log10 6 = 7.8 dB."""
    update, image, task = attempt
    reading = read_image(update, task, image)
    assert 100.0 <= reading.psnr_db <= PSNR_CAP_DB
    np.testing.assert_allclose(reading.image, image, atol=1e-6)
    masked = read_image(mask(update, key_of(LENGTH)).values, task, image)
    assert masked.psnr_db <= 15.0
    assert masked.image.min() >= 0.0
    assert masked.image.max() <= 1.0


def test_reading_without_an_error_is_finite(attempt):
    """An exact reading has the figure that stands for it, and an update of zeros divides by nothing."""
    update, _, task = attempt
    exact = read_image(update, task, read_image(update, task, np.zeros(INPUTS, np.float32)).image)
    assert exact.psnr_db == PSNR_CAP_DB
    blank = read_image(np.zeros(LENGTH, np.float32), task, np.full(INPUTS, 0.1, np.float32))
    assert np.array_equal(blank.image, np.zeros(INPUTS))
    assert blank.psnr_db == pytest.approx(20.0, abs=1e-4)


def test_stored_update_is_read_from_the_disk(tmp_path):
    """The first stored one with its round: no report without a vector, no short tail, nothing that another round overwrote."""
    with contextlib.closing(sqlite3.connect(tmp_path / DATABASE)) as database:
        database.execute("CREATE TABLE uploads (round INTEGER, device TEXT, start INTEGER, checksum INTEGER)")
        whole = np.arange(8, dtype="<f4")
        of = {
            1: (0, b""),
            2: (0, bytes(12)),
            3: (0, bytes(16)),
            4: (0, b"another round's"),
            5: (16, whole[4:].tobytes()),
        }
        rows = [(round_, "dev-1", start, checksum(data)) for round_, (start, data) in of.items()]
        database.executemany("INSERT INTO uploads VALUES (?, ?, ?, ?)", rows)
        database.commit()
    assert stored_update(tmp_path, 4) is None
    updates = tmp_path / "updates"
    updates.mkdir()
    (updates / "000001.f32").write_bytes(b"")
    np.ones(3, "<f4").tofile(updates / "000002.f32")
    np.zeros(8, "<f4").tofile(updates / "000003.f32")
    assert stored_update(tmp_path, 4) is None
    whole.tofile(updates / "000004.f32")
    assert stored_update(tmp_path, 4) is None
    whole.tofile(updates / "000005.f32")
    round_, update = stored_update(tmp_path, 4)
    assert (round_, update.tolist()) == (5, [4.0, 5.0, 6.0, 7.0])
