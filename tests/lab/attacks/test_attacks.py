"""Attacks succeed or fail under each mask mode as docs/threat-model.md says."""

import pytest
from shoal_lab.bench.attacks.features import WAYS
from shoal_lab.bench.privacy.benchmark import ATTACKS

from crypto.mask.modes.registry import MODES
from tests.helpers.cases import with_long

pytestmark = pytest.mark.torch

MASKS = tuple(m for m in MODES if m != "none")
PERMUTING = tuple(m for m in MASKS if "permutation" in m)
MIXING = tuple(m for m in MASKS if m not in PERMUTING)
RECOVERY_DB = 12.0


@pytest.mark.long
def test_every_attack_has_results_of_its_own(attacked):
    """The fixture checks each; those of single attacks are checked by the tests below too."""
    rows = [(r.name, r.keys, r.devices) for attack in ATTACKS for r in attacked.every(attack.name, "permutation")]
    assert len(set(rows)) == len(rows)
    assert all(attack.source and attack.attacker for attack in ATTACKS)


@pytest.mark.parametrize("mode", MODES)
def test_labels_are_counted_unmasked_only(attacked, mode):
    """Labels are counted without a mask only."""
    result = attacked.result("label counts", mode, "label counts of a batch")
    assert result.success >= 0.95 if mode == "none" else abs(result.success - result.chance) <= 0.1


def test_an_image_is_read_without_a_mask(attacked):
    """One image exactly, sixteen well; sixty-four mixed images are hardly better than a lookalike."""
    found = attacked.results("first-layer input", "none")
    assert found["first-layer input, batch 1"].success >= 40
    assert found["first-layer input, batch 16"].works
    assert found["first-layer input, batch 64"].success > found["first-layer input, batch 64"].chance


@pytest.mark.parametrize("mode", MASKS)
def test_no_image_is_read_under_a_mask(attacked, mode):
    assert all(r.success <= min(RECOVERY_DB, r.chance) for r in attacked.every("first-layer input", mode))


def test_gradient_matching_finds_clear_image(attacked):
    assert attacked.result("gradient matching", "none", "DLG, MLP").success >= 30


@pytest.mark.parametrize("mode", with_long(MASKS, "permutation", "rotation"))
def test_gradient_matching_under_a_mask(attacked, mode):
    """It finds no more than the label tells, nor do variants that match the mask's invariants: sorted values, the norm."""
    found = attacked.results("gradient matching", mode)
    assert len(found) == 4
    assert not any(r.works for r in found.values())
    assert found["DLG, MLP"].success <= RECOVERY_DB


@pytest.mark.parametrize("mode", MODES)
def test_grey_levels_survive_permutations(attacked, mode):
    """The set of values of a one-image update holds its histogram, in any order and with any signs."""
    result = attacked.result("value multiset", mode, "grey levels of an image")
    if mode in MIXING:
        assert result.success < result.chance
    else:
        assert result.success >= 0.9


@pytest.mark.parametrize("mode", MODES)
def test_membership_is_told_unmasked_only(attacked, mode):
    """Membership is told without a mask only."""
    result = attacked.result("membership", mode, "membership of an image")
    assert result.success >= 0.6 if mode == "none" else abs(result.success - 0.5) <= 0.07


@pytest.mark.parametrize("rounds", ["1 round", "10 rounds"])
def test_permutations_show_layers(attacked, rounds):
    """Signs don't help: the features are of absolute values."""
    found = {m: attacked.result("layer from statistics", m, f"layer of a coordinate, {rounds}") for m in MODES}
    assert all(found[m].success >= found[m].chance + 0.15 for m in ("none", *PERMUTING))
    assert all(abs(found[m].success - found[m].chance) <= 0.05 for m in MIXING)


def test_one_key_links_coordinates(attacked):
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
def test_known_pair_opens_permutations(attacked, mode):
    """And not a rotation."""
    pair, mean = attacked.results("known pair", mode), attacked.results("known mean", mode)
    places, opened = pair["known pair: places of coordinates"], pair["known pair: another update opened"]
    assert places.success >= 0.95 if mode in PERMUTING else places.success <= 0.01
    for result in (opened, mean["known mean: an update opened"]):
        assert (result.success >= 0.98, result.works) == (mode in PERMUTING,) * 2


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
    assert attack != "collusion" or found[0].success >= {"share": 0.99, "dB": 40}[found[0].unit]


@pytest.mark.parametrize("mode", MODES)
def test_norms_and_losses_name_the_data(attacked, mode):
    """One per cent of noise takes most of it in one round and nothing over ten; the loss names the image as before."""
    found = attacked.results("identification by norm", mode)
    assert found["which of 300 images, by norm"].success >= 0.95
    assert found["which of 40 data sets, by norm"].success >= 0.95
    assert found["the same, norm noise of 1%"].success <= 0.1
    assert found["data sets, norm noise of 1%"].success <= 0.4
    assert found["data sets, blurred, 10 rounds"].success >= 0.95
    assert found["the same, by the loss beside it"].success >= 0.9


@pytest.mark.parametrize("mode", MASKS)
def test_probing_shows_permuted_layers(attacked, mode):
    """Probing shows layers of permutations."""
    result = attacked.result("active aggregator", mode, "probing: layer of a coordinate")
    if mode in PERMUTING:
        assert result.success >= 0.5
    else:
        assert abs(result.success - result.chance) <= 0.12


@pytest.mark.parametrize("mode", MASKS)
def test_statistics_are_read_if_masked(attacked, mode):
    """Not behind the dense matrix. The rotation's blocks give them almost exactly, its integers relations."""
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


def test_dot_products_tell_few_features(attacked):
    """All of one or two features, part of four, none of eight."""
    found = attacked.results("feature statistics", "rotation")
    shares = [found[f"statistics-gram, p {p}"].success for p in (1, 2, 4, 8)]
    assert shares[0] == 1
    assert shares[1] >= 0.75
    assert shares[2] <= 0.5
    assert shares[3] == found["statistics-gram, p 8"].chance == 0


@pytest.mark.parametrize("mode", with_long(MODES, "rotation"))
def test_the_broker_sees_who_shares_a_model(attacked, mode):
    """And no byte of an update."""
    found = attacked.results("curious broker", mode)
    assert found["broker: bytes of updates"].success == 0
    assert found["broker: groups by model topic"].success == 1
    assert found["broker: who uploads when"].success == 1
