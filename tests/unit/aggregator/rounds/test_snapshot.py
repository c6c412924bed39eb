"""The strategy's state and the models in one snapshot."""

import dataclasses
import json

import numpy as np
import pytest

from aggregator.rounds.snapshot import dump, load
from aggregator.strategies.base import ClusterModel
from aggregator.strategies.cfl.state import CflState, Cluster
from aggregator.strategies.fedavg import FedAvgState
from shoal.errors import DocumentError
from tests.helpers.held import rounds
from tests.helpers.plans import contribution


def same(one, other):
    """Whether two values are equal, arrays among them compared by their bytes."""
    if isinstance(one, np.ndarray):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if dataclasses.is_dataclass(one):
        return all(same(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


def test_the_models_come_back_as_they_were():
    held = rounds(3, seal=lambda r: f"dev-{r}")
    encoded = dump(FedAvgState(("dev-1",)), held)
    document = json.loads(json.dumps(encoded.document))
    state, found = load(FedAvgState, document, encoded.arrays, None, has_models=True)
    assert state == FedAvgState(("dev-1",))
    assert same(found, held)
    assert {a.dtype.name for a in encoded.arrays.values()} == {"float32", "uint8"}


def test_an_update_that_the_strategy_remembers_without_its_vector_comes_back_without_it():
    """The store still has the vector, masked under the key of a past round."""
    update = contribution("dev-1")
    before = CflState({0: Cluster(0, ("dev-1",), ClusterModel())}, newest={"dev-1": update})
    encoded = dump(before, rounds(1))
    assert encoded.keys == frozenset()
    document = json.loads(json.dumps(encoded.document))
    assert load(CflState, document, encoded.arrays, None, has_models=True)[0] == before


def test_a_run_with_one_key_has_the_strategys_state_alone():
    encoded = dump(FedAvgState(("dev-1",)), None)
    assert load(FedAvgState, encoded.document, encoded.arrays, None, has_models=False) == (
        FedAvgState(("dev-1",)),
        None,
    )


@pytest.mark.parametrize("document", [{}, [], {"strategy": 1}])
def test_a_snapshot_without_its_parts_is_refused(document):
    with pytest.raises(DocumentError):
        load(FedAvgState, document, {}, None, has_models=True)
