"""One lab for the whole folder: attacks run against the real masks on scikit-learn's digits, and each result is cached."""

import numpy as np
import pytest
from shoal_lab.bench.attacks.lab import make_lab
from shoal_lab.bench.numerics.kernels import one_thread
from shoal_lab.bench.privacy.benchmark import ATTACKS

RANGES = {"dB": (0, 120), "cosine": (-1, 1), "ARI": (-1, 1), "masks": (0, 10)}


class Range:
    """Runs attacks, each once a mode in all processes of the session, and checks every result.

    Figures are finite; shares, accuracies and AUCs are in [0, 1], cosines in [-1, 1]; names don't repeat; the attacker is named.
    """

    def __init__(self, lab, once):
        self.lab = lab
        self._once = once
        self._done = {}
        self._attacks = {attack.name: attack for attack in ATTACKS}

    def every(self, attack, mode):
        """Return all results of the attack, a list."""
        if (attack, mode) not in self._done:
            with one_thread():
                run = lambda: self._attacks[attack].run(self.lab, mode)  # noqa: E731
                found = self._done[attack, mode] = self._once(f"attack {attack} in mode {mode}", run)
            assert len({(r.name, r.keys, r.devices) for r in found}) == len(found)
            for result in found:
                low, high = RANGES.get(result.unit, (0, 1))
                assert np.isfinite([result.success, result.chance]).all(), result.name
                assert low <= min(result.success, result.chance) <= max(result.success, result.chance) <= high, (
                    result.name
                )
                assert len(result.attacker) > 20
        return self._done[attack, mode]

    def results(self, attack, mode):
        """Return the attack's results by their names, those with one key a run where there are two."""
        return {r.name: r for r in reversed(self.every(attack, mode))}

    def result(self, attack, mode, name):
        return self.results(attack, mode)[name]


@pytest.fixture(scope="session")
def attacked(once, compile_once):
    with one_thread(), pytest.MonkeyPatch.context() as patch:
        patch.setattr("shoal_lab.bench.attacks.lab.compile_task", compile_once)
        lab = make_lab(quick=True)
        assert lab.length == lab.origin.size
    return Range(lab, once)
