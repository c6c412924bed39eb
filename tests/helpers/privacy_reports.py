"""Reports of the privacy benchmark with figures made up by hand."""

import numpy as np
from shoal_lab.bench.attacks.base import Picture, Result
from shoal_lab.bench.privacy.benchmark import ModeReport, PrivacyReport
from shoal_lab.bench.privacy.cost import Computed, Cost


def mode_report(mode="rotation", success=0.9, **can):
    square = np.linspace(0, 1, 9, dtype=np.float32).reshape(3, 3)
    pictures = (Picture("true", square), Picture("got", 1 - square))
    result = Result(
        name="labels <1>",
        attacker="an aggregator & others",
        success=success,
        chance=0.5,
        unit="share",
        margin=0.1,
        note="a 'note'",
        pictures=pictures,
    )
    seen = {"sees_updates": False, "sees_values": False, "sees_magnitudes": False} | can
    costs = (
        Cost(d=100_000, derive_ms=1.0, apply_ms=0.1, invert_ms=0.2, apply_memcpy_ratio=3.0, bytes=400_000),
        Cost(d=1_000_000, derive_ms=10.0, apply_ms=1.5, invert_ms=2.0, apply_memcpy_ratio=4.0, bytes=4_000_000),
    )
    attacked = {
        "counting": (result, Result(name="again", attacker="x", success=0.1, chance=0.5, unit="dB")),
        "other": (Result(name="y", attacker="z", success=0.0, chance=0.0, unit="AUC"),),
    }
    return ModeReport(mode, costs, Computed(1e-7, 2e-7, seen), attacked)


def whole(*modes):
    return PrivacyReport(
        modes=modes,
        dataset="digits",
        coordinates=4810,
        quick=True,
        seal={"seal_ms_per_mb": 1, "open_ms_per_mb": 2, "bytes_added": 162},
        seconds=3,
    )
