"""The strategy's state and the models in one snapshot."""

import dataclasses
import json

import numpy as np
import pytest

from aggregator.rounds.snapshot import dump, load
from aggregator.strategies.fedavg import FedAvgState
from shoal.errors import DocumentError
from tests.helpers.held import rounds


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
    state, found = load(FedAvgState, json.loads(json.dumps(encoded.document)), encoded.arrays)
    assert state == FedAvgState(("dev-1",))
    assert same(found, held)
    assert {a.dtype.name for a in encoded.arrays.values()} == {"float32", "uint8"}


@pytest.mark.parametrize("document", [{}, [], {"strategy": 1}])
def test_snapshot_lacking_parts_is_refused(document):
    """A snapshot without its parts is refused."""
    with pytest.raises(DocumentError):
        load(FedAvgState, document, {})
