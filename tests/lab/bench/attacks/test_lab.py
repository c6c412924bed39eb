"""The lab of all attacks: its data, random streams, keys under either lifetime, and measures of a mask and of an attack."""

import dataclasses
import hashlib

import numpy as np
import pytest
import torch
from shoal_lab.bench.attacks import lab as module
from shoal_lab.bench.attacks.lab import (
    FLEET,
    KEY_VERSION,
    LIFETIMES,
    LR,
    RUN_ID,
    FleetKeys,
    Images,
    Picture,
    Result,
    auc,
    balanced_accuracy,
    cosine,
    make_lab,
    psnr_db,
    share_recovered,
)

from crypto.mask.derivation import derive
from crypto.mask.masking import mask
from crypto.mask.modes.registry import MODES
from crypto.mask.schedule import VersionKey
from shoal.types import Segment

pytestmark = pytest.mark.torch
KEEPS = {"none": "order", "permutation": "values", "signed-permutation": "magnitudes", "rotation": "lengths"}
LENGTH = 300


def normal(length):
    return np.random.default_rng(4).standard_normal((1, length)).astype(np.float32)


@pytest.mark.parametrize("mode", MODES)
def test_what_a_mode_preserves(lab, mode):
    """Places by which attacks are judged are those of the real mask, up to sign; a mixture has none."""
    (vector,) = normal(lab.length)
    places, seen = lab.places(mode), lab.masked(vector, mode)
    assert lab.keeps(mode) == KEEPS[mode]
    if mode == "rotation":
        assert (places == -1).all()
        # A mixture belongs to any tensor about equally often: large ones do not dominate.
        assert (np.bincount(lab.layer_of(mode), minlength=4) / lab.length).min() > 0.05
    else:
        assert np.array_equal(np.abs(vector[places]), np.abs(seen))
        assert np.array_equal(lab.layer_of(mode), lab.layers[places])


@pytest.mark.parametrize("lifetime", LIFETIMES)
@pytest.mark.parametrize("mode", MODES)
def test_keys_of_a_run(lab, mode, lifetime):
    """A mask is undone by its round's key; keys change with the round under fresh keys alone; owners have their own."""
    keys, rows = FleetKeys(lab, mode, lifetime, LENGTH), normal(LENGTH)
    assert np.allclose(keys.unmasked(keys.masked(rows, 5), 5), rows, atol=1e-5)
    if mode != "none":
        assert np.array_equal(keys.masked(rows, 1), keys.masked(rows, 2)) == (lifetime == "run")
        other = FleetKeys(lab, mode, lifetime, LENGTH, "another")
        assert not np.array_equal(keys.masked(rows, 1), other.masked(rows, 1))


def test_a_draw_depends_on_its_name_alone(lab):
    one, same, other = (lab.pick(what, 50) for what in ("a", "a", "b"))
    assert np.array_equal(one.x, same.x)
    assert not np.array_equal(one.x, other.x)
    assert len({x.tobytes() for x in one.x}) == 50


def test_fresh_keys_are_the_schedules(lab):
    """A device that takes the rounds one after the other masks alike."""
    mode, rows = "signed-permutation", normal(LENGTH)
    secret = hashlib.sha256(b"shoal bench privacy/fleet").digest()
    chain = VersionKey(FLEET, KEY_VERSION, secret).begin_run(RUN_ID, first_round=1)
    for round_ in (1, 2, 3):
        taken = chain.take()
        key = derive(taken.mask, taken.context(lab.bundle.digest, mode, (Segment("cluster", LENGTH),)))
        made = FleetKeys(lab, mode, "round", LENGTH).masked(rows, round_)
        assert np.array_equal(mask(rows[0], key).values, made[0])


def test_a_one_step_update_is_the_gradient(lab):
    """Times the step size, at the origin, which the module holds."""
    batch, model = lab.pick("a test", 8), lab.module()
    np.testing.assert_allclose(lab.update(batch), -LR * lab.gradient(batch), rtol=1e-6)
    loss = torch.nn.functional.cross_entropy(model(torch.from_numpy(batch.x)), torch.from_numpy(batch.y))
    parts = torch.autograd.grad(loss, list(model.parameters()))
    expected = torch.cat([p.flatten() for p in parts]).numpy()
    np.testing.assert_allclose(lab.gradient(batch), expected, rtol=1e-3, atol=1e-5)


def test_mean_image_is_of_one_class_or_all():
    images = Images(np.array([[0.0, 1.0], [1.0, 1.0], [0.5, 0.0]], np.float32), np.array([4, 4, 7]))
    assert images.mean().tolist() == pytest.approx([0.5, 2 / 3])
    assert images.mean(4).tolist() == [0.5, 1.0]


def test_public_and_private_images_are_apart(monkeypatch):
    """And as many; every image is numbered, and an odd one is left over."""
    x = np.arange(101, dtype=np.float32)[:, None] * np.ones(4, np.float32)
    monkeypatch.setattr(module, "load_images", lambda *_given: (x, np.arange(101) % 10, 2))
    made = make_lab(quick=True)
    mine, yours = (set(images.x[:, 0].tolist()) for images in (made.private, made.public))
    assert len(mine) == len(yours) == 50
    assert not mine & yours
    assert (made.private.y == made.private.x[:, 0] % 10).all()


@pytest.mark.parametrize(
    ("image", "truth", "expected"),
    [
        ([0.6] * 4, [0.5] * 4, 20.0),
        ([1, 0, 0, 0], [0, 0, 0, 0], 10 * np.log10(4)),
        ([1.0], [1.0], 120.0),
        ([1e-9], [0.0], 120.0),
    ],
)
def test_psnr(image, truth, expected):
    """A tenth off everywhere is 20 dB; one of four pixels off by one is 6; exact is the cap."""
    assert psnr_db(np.array(image), np.array(truth)) == pytest.approx(expected)


def test_share_recovered():
    """To a part in 1000, of the coordinates that are not zero."""
    truth = np.array([0, 0, 1, 2, 4], np.float32)
    assert share_recovered(np.array([0, 0, 1.0009, 2, 5], np.float32), truth) == pytest.approx(2 / 3)
    assert share_recovered(-truth, truth) == 0.0
    assert share_recovered(truth, np.zeros(5, np.float32)) == 0.0


def test_cosine_and_auc():
    assert cosine(np.array([1, 0]), np.array([1, 1])) == pytest.approx(2**-0.5)
    assert cosine(np.zeros(2), np.ones(2)) == 0.0
    assert auc([3, 2], [1, 2]) == pytest.approx(3.5 / 4)
    assert auc([1, 2], [3, 4]) == 0.0


def test_balanced_accuracy_is_by_class():
    """Nine of nine and none of one are a half; a class that is only guessed does not count."""
    truth = np.array([0] * 9 + [1])
    assert balanced_accuracy(np.zeros(10, np.int64), truth) == 0.5
    assert balanced_accuracy(np.array([0] * 9 + [7]), truth) == 0.5


def test_a_result_works_beyond_its_margin():
    """Its figures as JSON leave out the pictures."""
    picture = Picture("true", np.zeros((2, 2), np.float32))
    result = Result(
        name="x", attacker="y", success=0.6, chance=0.5, unit="share", margin=0.1, note="z", pictures=(picture,)
    )
    assert result.data() == {
        "name": "x",
        "attacker": "y",
        "success": 0.6,
        "chance": 0.5,
        "unit": "share",
        "works": False,
        "note": "z",
        "keys": "run",
        "devices": 1,
    }
    assert dataclasses.replace(result, success=0.61).works
