"""The strategy's state and the models in one snapshot."""

import pytest

from aggregator.rounds.snapshot import load
from aggregator.strategies.fedavg import FedAvgState
from shoal.errors import DocumentError


@pytest.mark.parametrize("document", [{}, [], {"strategy": 1}])
def test_snapshot_lacking_parts_is_refused(document):
    """A snapshot without its parts is refused."""
    with pytest.raises(DocumentError):
        load(FedAvgState, document, {})
