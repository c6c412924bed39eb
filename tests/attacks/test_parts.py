"""The attacks' parts against answers known by hand: an attack that fails must fail for the mask's sake, not for a fault."""

import dataclasses

import numpy as np
import pytest

from crypto.mask.modes.registry import MODES
from shoal.bench.attacks.base import Result, auc, balanced_accuracy, cosine, psnr_db, share_recovered
from shoal.bench.attacks.broker import found_in, groups_seen
from shoal.bench.attacks.gram_matching import assign
from shoal.bench.attacks.known_mean import project
from shoal.bench.attacks.known_pair import read_map, undo
from shoal.bench.attacks.protocol import device_model, signed_plan
from shoal.bench.attacks.shadow_matching import closest, paths
from shoal.errors import UntrustedError
from shoal.transport.faults import Hop, Passage

RNG_SEED = 5


def normal(*shape, seed=RNG_SEED):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_quality_of_an_image_by_hand():
    """A tenth off everywhere is 20 dB; exact is the cap."""
    assert psnr_db(np.full(4, 0.6), np.full(4, 0.5)) == pytest.approx(20.0)
    assert psnr_db(np.ones(4), np.ones(4)) == 120.0


def test_shares_count_non_zero_coordinates_only():
    truth = np.array([0, 0, 1, 2, 4], np.float32)
    assert share_recovered(np.array([0, 0, 1, 2, 5], np.float32), truth) == pytest.approx(2 / 3)
    assert share_recovered(truth, np.zeros(5, np.float32)) == 0.0


def test_cosine_auc_and_balanced_accuracy_by_hand():
    assert cosine(np.array([1, 0]), np.array([1, 1])) == pytest.approx(2**-0.5)
    assert cosine(np.zeros(2), np.ones(2)) == 0.0
    assert auc([3, 2], [1, 2]) == pytest.approx(3.5 / 4)
    assert balanced_accuracy(np.array([0, 0, 0, 0]), np.array([0, 0, 0, 1])) == 0.5


def test_an_attack_works_only_beyond_its_margin():
    result = Result(name="x", attacker="y", success=0.6, chance=0.5, unit="share", margin=0.1)
    assert not result.works
    assert dataclasses.replace(result, success=0.61).works


@pytest.mark.parametrize("flip", [False, True])
def test_a_map_is_read_from_a_pair_and_undoes_it(flip):
    """With signs and without, on a permutation made here."""
    rng = np.random.default_rng(RNG_SEED)
    clear, other, order = normal(300), normal(300, seed=6), rng.permutation(300)
    sign = np.where(rng.random(300) < 0.5, -1, 1).astype(np.float32) if flip else np.ones(300, np.float32)
    places, signs = read_map(clear, (clear * sign)[order], "magnitudes" if flip else "values")
    assert np.array_equal(places, order)
    assert np.array_equal(undo((other * sign)[order], places, signs), other)


def test_a_projection_gives_what_lies_in_the_span_and_no_more():
    known = [normal(50, seed=s) for s in (1, 2)]
    turn = np.linalg.qr(normal(50, 50).astype(float))[0].astype(np.float32)
    inside = 2 * known[0] - known[1]
    masked = [turn @ k for k in known]
    assert np.allclose(project(known, masked, turn @ inside), inside, atol=1e-4)
    outside = normal(50, seed=9).astype(float)
    for axis in np.linalg.qr(np.stack(known).T.astype(float))[0].T:
        outside -= (outside @ axis) * axis
    assert np.linalg.norm(project(known, masked, (turn @ outside).astype(np.float32))) < 1e-3


def test_swaps_find_a_hidden_assignment():
    gram = normal(8, 8).astype(float)
    gram = gram @ gram.T
    order = np.random.default_rng(3).permutation(8)
    found = assign(gram[np.ix_(order, order)], gram, np.random.default_rng(0))
    assert np.array_equal(found, order)


def test_paths_are_matched_whatever_their_signs():
    values = normal(6, 3, 40)
    flipped = values * np.where(np.arange(40) % 2, -1, 1).astype(np.float32)
    one = np.ones(6)
    assert np.array_equal(closest(paths(flipped, one, signed=False), paths(values, one, signed=False)), np.arange(40))
    assert not np.array_equal(closest(paths(flipped, one, signed=True), paths(values, one, signed=True)), np.arange(40))


def test_bytes_of_an_update_are_found_where_they_are():
    """The broker's search can succeed: in clear traffic it does."""
    vector = normal(500)
    raw = vector.astype("<f4").tobytes()
    assert found_in(vector, b"head" + raw + b"tail")
    assert not found_in(vector, normal(500, seed=8).tobytes())
    assert not found_in(np.zeros(500, np.float32), bytes(5000))


def test_groups_are_those_of_the_last_model_sent():
    def sent(client, label):
        return Passage(Hop.DOWN, client, f"shoal/v1/lab/s/model/{label}", b"")

    heard = [sent("a", "0" * 16), sent("b", "0" * 16), sent("b", "1" * 16)]
    assert groups_seen(heard) == {"a": "0" * 16, "b": "1" * 16}


@pytest.mark.torch
@pytest.mark.parametrize("mode", MODES)
def test_the_lab_knows_where_coordinates_went(attacked, mode):
    """Places by which attacks are judged are those of the real mask, and a mixture has none."""
    lab = attacked.lab
    vector = lab.rng("a test").standard_normal(lab.length).astype(np.float32)
    places, seen = lab.places(mode), lab.masked(vector, mode)
    if lab.keeps(mode) == "lengths":
        assert (places == -1).all()
    else:
        assert np.array_equal(np.abs(vector[places]), np.abs(seen))


@pytest.mark.torch
def test_a_device_checks_what_an_active_aggregator_sends(attacked):
    """The checks of the real policy stand between: too long an offset and too few contributors are refused."""
    lab = attacked.lab
    plan = signed_plan(lab, "permutation")
    spike = np.zeros(lab.length, np.float32)
    spike[7] = 20.0
    assert np.count_nonzero(device_model(lab, "permutation", spike) != lab.origin) == 1
    with pytest.raises(UntrustedError, match="beyond"):
        device_model(lab, "permutation", np.full(lab.length, 10 * plan.norm_limit, np.float32))
    with pytest.raises(UntrustedError, match="a mean of 2 devices"):
        device_model(lab, "permutation", spike, contributors=2)


@pytest.mark.torch
def test_public_and_private_images_are_apart(attacked):
    """The attacker's own data holds none of the devices'."""
    theirs = {x.tobytes() for x in attacked.lab.private.x}
    assert not theirs & {x.tobytes() for x in attacked.lab.public.x}
