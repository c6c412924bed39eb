"""The table of mask modes' costs."""

import pytest
from shoal_lab.bench.numerics.mask_modes import main, mode_costs

from crypto.mask.modes.registry import MODES
from shoal.errors import ConfigError


def test_every_mode_is_measured_and_exact_modes_have_no_error():
    costs = mode_costs(sizes=(20_000,), turns=1)
    assert [(c.mode, c.d) for c in costs] == [(mode, 20_000) for mode in MODES]
    for cost in costs:
        assert min(cost.derive_ms, cost.apply_ms, cost.invert_ms, cost.apply_memcpy_ratio) > 0
        assert cost.cosine_error < 1e-6
        assert cost.mean_error == 0 if MODES[cost.mode].exact else 0 < cost.mean_error < 1e-6


def test_one_mode_can_be_asked_for_and_an_unknown_one_is_refused():
    assert [c.mode for c in mode_costs(["rotation"], (100,), turns=1)] == ["rotation"]
    with pytest.raises(ConfigError, match="'rot13'"):
        mode_costs(["rot13"], (100,), turns=1)


@pytest.mark.slow
def test_the_table_has_a_line_a_mode(capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["mask_modes", "--quick"])
    main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == list(MODES)
    assert all("memcpy" in line and "d=100000" in line for line in lines)
