"""Shards and populations: defaults, and the checks that refuse parts which do not fit."""

import numpy as np
import pytest

from shoal.errors import DataError
from shoal.simulation.data import Population, Shard, shards_of

X, Y = np.arange(24, dtype=np.float32).reshape(2, 3, 4), np.arange(6).reshape(2, 3)
TRAIN = shards_of(X, Y)


def test_a_shard_has_a_label_for_each_sample():
    assert len(Shard(X[0], Y[0])) == 3
    assert len(Shard.none()) == 0
    with pytest.raises(DataError, match="a shard of 3 samples and 2 labels"):
        Shard(X[0], Y[0, :2])


def test_missing_shares_are_empty():
    """Shares and names that are not given are empty and numbered."""
    population = Population(TRAIN)
    assert population.names == ("dev-0000", "dev-0001")
    assert [len(s) for s in (*population.validation, *population.test)] == [0, 0, 0, 0]
    assert len(population) == 2
    assert population.samples.tolist() == [3, 3]
    assert population.groups is None


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"train": ()}, "every simulated device needs at least one training sample"),
        ({"train": (TRAIN[0], Shard.none())}, "every simulated device needs at least one training sample"),
        ({"groups": (1,)}, r"a population of 2 devices with shares, names or groups for \[1, 2\]"),
        ({"test": TRAIN[:1]}, r"a population of 2 devices .* for \[1, 2\]"),
        ({"validation": (*TRAIN, *TRAIN)}, r"a population of 2 devices .* for \[2, 4\]"),
        ({"names": ("a", "b", "c")}, r"a population of 2 devices .* for \[2, 3\]"),
        ({"names": ("b", "a")}, "device names must differ and be in ascending order"),
        ({"names": ("a", "a")}, "device names must differ and be in ascending order"),
        ({"probes": TRAIN, "probe_groups": (0,)}, "2 probes with 1 groups"),
    ],
)
def test_unfit_population_is_refused(fields, message):
    """A population whose parts do not fit is refused."""
    with pytest.raises(DataError, match=message):
        Population(**{"train": TRAIN, **fields})


def test_stacked_and_cut_samples_are_views():
    for shards in (TRAIN, shards_of(X.reshape(6, 4), Y.reshape(6), (3, 3))):
        assert all(np.shares_memory(s.x, X) and np.shares_memory(s.y, Y) for s in shards)
        assert [s.y.tolist() for s in shards] == [[0, 1, 2], [3, 4, 5]]
    assert [s.y.tolist() for s in shards_of(X.reshape(6, 4), Y.reshape(6), (2, 4))] == [[0, 1], [2, 3, 4, 5]]


@pytest.mark.parametrize(("cuts", "total"), [((2, 3), 5), ((2, 5), 7), ((), 0)])
def test_cuts_use_every_sample(cuts, total):
    with pytest.raises(DataError, match=f"6 samples cut into {total}"):
        shards_of(X.reshape(6, 4), Y.reshape(6), cuts)
    with pytest.raises(ValueError, match="zip"):
        shards_of(X, Y[:1])


def test_some_devices_keep_their_names():
    """Some devices keep their names groups and shares."""
    people = Population(TRAIN, TRAIN[::-1], groups=(4, 7))
    last = people.of([1])
    assert (last.names, last.groups, len(last)) == (("dev-0001",), (7,), 1)
    assert last.train[0] is TRAIN[1]
    assert last.validation[0] is TRAIN[0]
    assert Population(TRAIN).of([0]).groups is None
