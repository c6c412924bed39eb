"""Sizes of a quick and of a full run."""

from types import SimpleNamespace

from shoal_lab.bench.attacks.structure import sizes


def a_lab(*, quick, length=4810):
    return SimpleNamespace(quick=quick, length=length, trials=lambda full, few: few if quick else full)


def test_a_quick_run_is_small_and_a_full_one_has_all_fleets():
    lab, full = a_lab(quick=True), a_lab(quick=False)
    assert sizes.fleets(lab, many=True) == sizes.QUICK
    assert sizes.fleets(full) == (15, 100, 450)
    assert sizes.fleets(full, many=True) == (15, 100, 450, 500, 2000)
    assert sizes.rounds(full, 450)[-1] == 200
    assert len(sizes.rounds(full, 450)) == 8
    assert sizes.rounds(full, 2000) == [2]
    assert sizes.rounds(lab, 15)[-1] == sizes.QUICK_ROUNDS


def test_fleets_beyond_a_tenth_of_the_coordinates_are_marked():
    assert sizes.beyond(a_lab(quick=False), 450) == ""
    assert "tenth" in sizes.beyond(a_lab(quick=False), 500)


def test_large_models_are_not_attacked():
    assert sizes.fleets(a_lab(quick=True, length=101_770)) == ()
