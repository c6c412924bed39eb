"""The data of tables, apart from their runs."""

import numpy as np
import pytest
from shoal_lab.experiments.data.text import Person
from shoal_lab.experiments.studies.tasks import lower_case

from shoal.errors import DataError
from shoal.simulation.data import Shard


def test_lower_case_letters_become_0_to_25():
    def shard(*labels):
        return Shard(np.array(labels, np.float32)[:, None], np.array(labels, np.int64))

    people = (Person("a", shard(0, 36, 35, 61), shard(40)), Person("b", shard(3), shard(50)))
    kept = lower_case(people)
    assert [p.name for p in kept] == ["a"]
    assert kept[0].train.y.tolist() == [0, 25]
    assert kept[0].train.x[:, 0].tolist() == [36, 61]
    assert kept[0].test.y.tolist() == [4]
    with pytest.raises(DataError, match="lower-case"):
        lower_case(people[1:])
