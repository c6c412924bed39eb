"""The lab of all attacks: its data, its random streams, its keys, and its measures of a mask."""

import dataclasses

import numpy as np
import pytest
import torch
from shoal_lab.bench.attacks import lab as module
from shoal_lab.bench.attacks.lab import LR, ONE_EPOCH, Images, load, make_lab

from crypto.mask.modes.registry import MODES

pytestmark = pytest.mark.torch
KEEPS = {"none": "order", "permutation": "values", "signed-permutation": "magnitudes", "rotation": "lengths"}


@pytest.mark.parametrize("mode", MODES)
def test_the_lab_knows_where_coordinates_went(lab, mode):
    """Places by which attacks are judged are those of the real mask, and a mixture has none."""
    vector = lab.rng("a test").standard_normal(lab.length).astype(np.float32)
    places, seen = lab.places(mode), lab.masked(vector, mode)
    if lab.keeps(mode) == "lengths":
        assert (places == -1).all()
    else:
        assert np.array_equal(np.abs(vector[places]), np.abs(seen))


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_preserves_its_part_of_a_vector(lab, mode):
    assert lab.keeps(mode) == KEEPS[mode]


@pytest.mark.parametrize("mode", ["permutation", "signed-permutation"])
def test_a_copied_coordinate_belongs_to_its_own_tensor(lab, mode):
    assert np.array_equal(lab.layer_of(mode), lab.layers[lab.places(mode)])


def test_a_mixture_belongs_to_any_tensor_about_equally_often(lab):
    """In proportion to nothing but chance: large tensors do not dominate."""
    share = np.bincount(lab.layer_of("rotation"), minlength=4) / lab.length
    assert share.min() > 0.05


def test_tensors_are_numbered_in_the_models_order(lab):
    sizes = [p.length for p in lab.bundle.manifest.parameters]
    assert np.bincount(lab.layers).tolist() == sizes
    assert (np.diff(lab.layers) >= 0).all()


def test_a_round_and_a_fleet_have_masks_of_their_own(lab):
    vector = lab.rng("a test").standard_normal(lab.length).astype(np.float32)
    first, second = (lab.masked(vector, "permutation", round_=r) for r in (1, 2))
    assert not np.array_equal(first, second)
    assert np.array_equal(first, lab.masked(vector, "permutation"))
    assert lab.key("permutation").key_id != lab.key("permutation", owner="another").key_id


def test_a_draw_depends_on_its_name_alone(lab):
    one, same, other = (lab.pick(what, 50) for what in ("a", "a", "b"))
    assert np.array_equal(one.x, same.x)
    assert not np.array_equal(one.x, other.x)
    assert len({x.tobytes() for x in one.x}) == 50
    theirs = {x.tobytes() for x in lab.public.x}
    assert {x.tobytes() for x in lab.pick("a", 50, lab.public).x} <= theirs


def test_a_one_step_update_is_the_gradient_times_the_step_size(lab):
    batch = lab.pick("a test", 8)
    np.testing.assert_allclose(lab.update(batch), -LR * lab.gradient(batch), rtol=1e-6)
    module_ = lab.module()
    loss = torch.nn.functional.cross_entropy(module_(torch.from_numpy(batch.x)), torch.from_numpy(batch.y))
    parts = torch.autograd.grad(loss, list(module_.parameters()))
    expected = torch.cat([p.flatten() for p in parts]).numpy()
    np.testing.assert_allclose(lab.gradient(batch), expected, rtol=1e-3, atol=1e-5)


def test_a_device_trains_from_the_model_and_by_the_seed_given(lab):
    batch = lab.pick("a test", 30)
    moved = lab.origin + np.float32(0.1)
    plain, again, other, elsewhere = (
        lab.update(batch, ONE_EPOCH, **given) for given in ({}, {}, {"seed": 1}, {"theta": moved})
    )
    assert np.array_equal(plain, again)
    assert not np.array_equal(plain, other)
    assert not np.allclose(plain, elsewhere, atol=1e-4)


def test_the_module_holds_the_origin_and_a_loaded_one_its_theta(lab):
    flat = torch.cat([p.detach().flatten() for p in lab.module().parameters()]).numpy()
    np.testing.assert_array_equal(flat, lab.origin)
    model, theta = lab.module(), np.arange(lab.length, dtype=np.float32)
    load(model, theta)
    np.testing.assert_array_equal(torch.cat([p.detach().flatten() for p in model.parameters()]).numpy(), theta)


def test_results_of_a_mode_are_forgotten_and_others_stay(lab):
    made = dataclasses.replace(lab, _cache={})
    calls = []
    for key in ("shared", ("run", "rotation"), ("run", "permutation")):
        for _ in range(2):
            assert made.once(key, lambda k=key: calls.append(k) or k) == key
    assert calls == ["shared", ("run", "rotation"), ("run", "permutation")]
    made.forget("rotation")
    assert set(made._cache) == {"shared", ("run", "permutation")}


def test_a_quick_lab_tries_less(lab):
    assert lab.trials(20, 5) == 5
    assert dataclasses.replace(lab, quick=False).trials(20, 5) == 20


def test_the_mean_image_is_of_one_class_or_of_all():
    images = Images(np.array([[0.0, 1.0], [1.0, 1.0], [0.5, 0.0]], np.float32), np.array([4, 4, 7]))
    assert images.mean().tolist() == pytest.approx([0.5, 2 / 3])
    assert images.mean(4).tolist() == [0.5, 1.0]
    assert images.rows(np.array([2, 0])).y.tolist() == [7, 4]
    assert len(images) == 3


def test_public_and_private_images_are_apart_and_as_many(monkeypatch):
    """Every image is numbered; an odd one is left over."""
    x = np.arange(101, dtype=np.float32)[:, None] * np.ones(4, np.float32)
    asked = []
    monkeypatch.setattr(module, "load_images", lambda *given: asked.append(given) or (x, np.arange(101) % 10, 2))
    made = make_lab(quick=True)
    mine, yours = (set(images.x[:, 0].tolist()) for images in (made.private, made.public))
    assert len(mine) == len(yours) == 50
    assert not mine & yours
    assert (made.private.y == made.private.x[:, 0] % 10).all()
    assert asked == [("digits", None)]
    assert (made.name, made.quick, made.side) == ("digits", True, 2)
