"""Attacks succeed or fail under each mask mode as docs/threat-model.md says."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.features import WAYS
from shoal_lab.bench.attacks.registry import ATTACKS

from crypto.mask.modes.registry import MODES
from tests.helpers.cases import with_long

pytestmark = pytest.mark.torch

MASKS = tuple(m for m in MODES if m != "none")
PERMUTING = tuple(m for m in MASKS if "permutation" in m)
MIXING = tuple(m for m in MASKS if m not in PERMUTING)
RECOVERY_DB = 12.0


def test_every_result_is_a_finite_figure_in_range(attacked):
    """Shares, accuracies and AUCs are in [0, 1], cosines in [-1, 1]; names don't repeat; the attacker is named."""
    rows = []
    for attack in ATTACKS:
        for result in attacked.every(attack.name, "permutation"):
            rows.append(result.row)
            assert np.isfinite([result.success, result.chance]).all()
            low, high = {"dB": (0, 120), "cosine": (-1, 1), "ARI": (-1, 1)}.get(result.unit, (0, 1))
            assert low <= result.success <= high
            assert low <= result.chance <= high
            assert len(result.attacker) > 20
    assert len(set(rows)) == len(rows)
    assert all(attack.source and attack.attacker for attack in ATTACKS)


def test_labels_are_counted_without_a_mask(attacked):
    assert attacked.result("label counts", "none", "label counts of a batch").success >= 0.95


@pytest.mark.parametrize("mode", MASKS)
def test_labels_are_guessed_under_a_mask(attacked, mode):
    result = attacked.result("label counts", mode, "label counts of a batch")
    assert abs(result.success - result.chance) <= 0.1


def test_an_image_is_read_without_a_mask(attacked):
    """One image exactly, sixteen well; sixty-four mixed images are hardly better than a lookalike."""
    found = attacked.results("first-layer input", "none")
    assert found["first-layer input, batch 1"].success >= 40
    assert found["first-layer input, batch 16"].works
    assert found["first-layer input, batch 64"].success > found["first-layer input, batch 64"].chance


@pytest.mark.parametrize("mode", MASKS)
@pytest.mark.parametrize("batch", [1, 16, 64])
def test_no_image_is_read_under_a_mask(attacked, mode, batch):
    result = attacked.result("first-layer input", mode, f"first-layer input, batch {batch}")
    assert result.success <= RECOVERY_DB
    assert result.success < result.chance


def test_gradient_matching_finds_the_image_without_a_mask(attacked):
    assert attacked.result("gradient matching", "none", "DLG, MLP").success >= 30


@pytest.mark.parametrize("mode", MASKS)
def test_gradient_matching_finds_no_more_than_the_label_tells_under_a_mask(attacked, mode):
    """Nor do its variants that match invariants of the mask: sorted values, absolute values, the norm."""
    found = attacked.results("gradient matching", mode)
    assert len(found) == 4
    assert not any(r.works for r in found.values())
    assert found["DLG, MLP"].success <= RECOVERY_DB


@pytest.mark.parametrize("mode", MODES)
def test_grey_levels_of_an_image_survive_permutations(attacked, mode):
    """The set of values of a one-image update holds its histogram, in any order and with any signs."""
    result = attacked.result("value multiset", mode, "grey levels of an image")
    if mode in MIXING:
        assert result.success < result.chance
    else:
        assert result.success >= 0.9


@pytest.mark.parametrize("mode", MODES)
def test_membership_is_told_without_a_mask_only(attacked, mode):
    result = attacked.result("membership", mode, "membership of an image")
    assert result.success >= 0.6 if mode == "none" else abs(result.success - 0.5) <= 0.07


@pytest.mark.parametrize("rounds", ["1 round", "10 rounds"])
def test_permutations_show_layers_and_rotation_does_not(attacked, rounds):
    """Signs don't help: the features are of absolute values."""
    found = {m: attacked.result("layer from statistics", m, f"layer of a coordinate, {rounds}") for m in MODES}
    assert all(found[m].success >= found[m].chance + 0.15 for m in ("none", *PERMUTING))
    assert all(abs(found[m].success - found[m].chance) <= 0.05 for m in MIXING)


def test_rounds_under_one_key_help_to_link_coordinates_under_permutations_alone(attacked):
    """Few coordinates are placed exactly, but two hundred times as many as by chance, and more with every round."""
    for mode in PERMUTING:
        found = attacked.results("shadow matching", mode)
        one, ten = (found[f"shadow matching, {n}, last layer"] for n in ("1 round", "10 rounds"))
        assert ten.success > 2 * one.success
        assert ten.success > 50 * ten.chance
        assert ten.success < 0.2
    for mode in MIXING:
        assert all(r.success <= 0.01 for r in attacked.results("shadow matching", mode).values())


@pytest.mark.parametrize("mode", MASKS)
def test_one_known_pair_opens_permutations_and_not_rotation(attacked, mode):
    found = attacked.results("known pair", mode)
    places, opened = found["known pair: places of coordinates"], found["known pair: another update opened"]
    if mode in PERMUTING:
        assert places.success >= 0.95
        assert opened.success >= 0.99
    else:
        assert places.success <= 0.01
        assert not opened.works


@pytest.mark.parametrize("mode", MASKS)
def test_one_known_mean_opens_permutations_and_not_rotation(attacked, mode):
    result = attacked.result("known mean", mode, "known mean: an update opened")
    assert (result.success >= 0.98) == (mode in PERMUTING)
    assert result.works == (mode in PERMUTING)


@pytest.mark.parametrize(
    ("attack", "name"),
    [
        ("known mean", "nine updates known: the tenth projected"),
        ("dot products", "a device's main class, from dot products"),
        ("identification by norm", "which of 300 images, by norm"),
        ("identification by norm", "which of 40 data sets, by norm"),
        ("identification by norm", "the same, by the loss beside it"),
        ("identification by norm", "data sets, blurred, 10 rounds"),
        ("active aggregator", "false count: a device reads another's update"),
        ("collusion", "collusion: coordinates of an update"),
        ("collusion", "collusion: an image"),
        pytest.param("curious broker", "broker: groups by model topic", marks=pytest.mark.long),
    ],
)
def test_what_no_mask_stops(attacked, attack, name):
    """Under every mode, and equally well: norms, dot products, a shared secret and topics don't depend on the mask."""
    found = [attacked.result(attack, mode, name) for mode in MODES]
    assert all(r.works for r in found)
    assert max(r.success for r in found) - min(r.success for r in found) <= 0.02 * abs(found[0].success)


@pytest.mark.parametrize("mode", MODES)
def test_guessing_by_norm_succeeds(attacked, mode):
    found = attacked.results("identification by norm", mode)
    assert found["which of 300 images, by norm"].success >= 0.95
    assert found["which of 40 data sets, by norm"].success >= 0.95


@pytest.mark.parametrize("mode", MODES)
def test_blurred_norms_single_out_few_until_they_are_averaged(attacked, mode):
    """One per cent takes most of it in one round and nothing over ten; the loss in the upload names the image as before."""
    found = attacked.results("identification by norm", mode)
    assert found["the same, norm noise of 1%"].success <= 0.1
    assert found["data sets, norm noise of 1%"].success <= 0.4
    assert found["data sets, blurred, 10 rounds"].success >= 0.95
    assert found["the same, by the loss beside it"].success >= 0.9


@pytest.mark.parametrize("mode", MODES)
def test_one_device_opens_all(attacked, mode):
    found = attacked.results("collusion", mode)
    assert found["collusion: coordinates of an update"].success >= 0.99
    assert found["collusion: an image"].success >= 40


@pytest.mark.parametrize("mode", MASKS)
def test_probing_shows_layers_under_permutations_and_not_under_rotation(attacked, mode):
    result = attacked.result("active aggregator", mode, "probing: layer of a coordinate")
    if mode in PERMUTING:
        assert result.success >= 0.5
    else:
        assert abs(result.success - result.chance) <= 0.12


@pytest.mark.parametrize("mode", MASKS)
def test_statistics_are_read_under_a_mask_alone_and_not_behind_the_dense_matrix(attacked, mode):
    """The rotation's blocks give them to a few hundredths of their spread, its integers relations; the matrix leaves neither."""
    found = attacked.results("feature statistics", mode)
    alone, sent = (found[f"statistics-blocks, p 8, {way}"] for way in WAYS)
    assert alone.works
    assert alone.success >= 0.5
    assert sent.success == sent.chance == 0
    if mode in MIXING:
        assert alone.success == 1
        alone, sent = (found[f"statistics-lattice, p 4, {way}"] for way in WAYS)
        assert alone.success == 1
        assert max(sent.success, sent.chance) <= 0.1


def test_dot_products_tell_the_statistics_of_few_features(attacked):
    """All of one or two features, part of four, none of eight."""
    found = attacked.results("feature statistics", "rotation")
    shares = [found[f"statistics-gram, p {p}"].success for p in (1, 2, 4, 8)]
    assert shares[0] == 1
    assert shares[1] >= 0.75
    assert shares[2] <= 0.5
    assert shares[3] == found["statistics-gram, p 8"].chance == 0


@pytest.mark.parametrize("mode", with_long(MODES, "rotation"))
def test_the_broker_sees_no_update_but_who_shares_a_model(attacked, mode):
    found = attacked.results("curious broker", mode)
    assert found["broker: bytes of updates"].success == 0
    assert found["broker: groups by model topic"].success == 1
    assert found["broker: who uploads when"].success == 1


@pytest.mark.parametrize("mode", ["permutation", "rotation"])
def test_newcomers_and_thieves_open_no_earlier_round(attacked, mode):
    """A device opens the rounds since it was in step."""
    rows = {r.name: r.success for name in ("past rounds", "rounds since") for r in attacked.every(name, mode)}
    assert rows["past-rounds-newcomer"] == rows["past-rounds-stolen"] == 0
    assert rows["past-rounds-absent"] == rows["colluding-device"] == 1


def test_a_restored_owner_repeats_no_mask(attacked):
    assert [(r.keys, r.success) for r in attacked.every("restored owner", "permutation")] == [("round", 0)]
