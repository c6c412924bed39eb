"""Membership by the cosine of an image's gradient and the update, on a lab made by hand."""

import numpy as np
from shoal_lab.bench.attacks.lab import Images
from shoal_lab.bench.attacks.membership import SAMPLES, run


class Bench:
    """Image i is the unit vector i, which is its gradient too; an update is the sum of its images' negative gradients."""

    def __init__(self, *, hidden=False):
        self.hidden = hidden
        self.rounds, self.seeds = [], []

    def trials(self, _full, quick):
        return quick

    def pick(self, what, n):
        order = np.random.default_rng(sum(what.encode())).permutation(n)
        return Images(np.eye(n, dtype=np.float32)[order], np.zeros(n, np.int64))

    def gradient(self, images):
        return images.x.sum(0)

    def update(self, images, _settings, *, seed):
        self.seeds.append(seed)
        assert len(images) == SAMPLES
        return -self.gradient(images)

    def masked(self, vector, _mode, round_):
        self.rounds.append(round_)
        return np.zeros_like(vector) if self.hidden else vector


def test_members_are_nearer_to_the_update_than_others():
    """The update points against the gradients of its own images."""
    (result,) = run(Bench(), "none")
    assert (result.success, result.chance, result.unit) == (1.0, 0.5, "AUC")


def test_an_update_that_shows_nothing_leaves_a_guess():
    (result,) = run(Bench(hidden=True), "rotation")
    assert result.success == 0.5
    assert not result.works


def test_every_device_has_a_mask_and_a_seed_of_its_own():
    bench = Bench()
    run(bench, "none")
    assert bench.seeds == list(range(12))
    assert bench.rounds == list(range(1, 13))
