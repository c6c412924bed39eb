"""One lab for the whole folder: attacks run against the real masks on scikit-learn's digits, and each result is cached."""

import pytest

from shoal.bench.attacks.lab import make_lab
from shoal.bench.attacks.registry import ATTACKS
from shoal.bench.privacy.benchmark import one_thread


class Range:
    """Runs attacks, each once a mode."""

    def __init__(self, lab):
        self.lab = lab
        self._done = {}
        self._attacks = {attack.name: attack for attack in ATTACKS}

    def every(self, attack, mode):
        """Return all results of the attack, a list."""
        if (attack, mode) not in self._done:
            with one_thread():
                self._done[attack, mode] = self._attacks[attack].run(self.lab, mode)
        return self._done[attack, mode]

    def results(self, attack, mode):
        """Return the attack's results by their names, those with one key a run where there are two."""
        return {r.name: r for r in reversed(self.every(attack, mode))}

    def result(self, attack, mode, name):
        return self.results(attack, mode)[name]


@pytest.fixture(scope="session")
def attacked():
    with one_thread():
        lab = make_lab(quick=True)
        assert lab.length == lab.origin.size
    return Range(lab)
