"""Public seeds."""

from __future__ import annotations

from shoal.protocol.precision.seeds import mean_seed, upload_seed


def test_every_transfer_has_its_own_seed():
    """Every upload and mean has its own seed."""
    run, other = bytes(16), bytes(15) + b"\1"
    found = [
        upload_seed(*at)
        for at in ((run, 1, 1, "a"), (other, 1, 1, "a"), (run, 2, 1, "a"), (run, 1, 2, "a"), (run, 1, 1, "b"))
    ]
    found += [mean_seed(run, 1, 1), mean_seed(run, 2, 1), mean_seed(run, 1, 2), mean_seed(other, 1, 1)]
    assert len(set(found)) == len(found)
    assert {len(seed) for seed in found} == {32}
