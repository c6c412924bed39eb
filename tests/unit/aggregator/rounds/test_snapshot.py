"""The strategy's state and the models in one snapshot."""

import json

import pytest

from aggregator.rounds.snapshot import dump, load
from aggregator.strategies.fedavg import FedAvgState
from shoal.errors import DocumentError
from tests.helpers.held import rounds
from tests.properties.states import same


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
