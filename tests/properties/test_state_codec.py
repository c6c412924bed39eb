"""Every stored state is restored as it was, and a damaged document raises IntegrityError, and no other exception."""

import json

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aggregator.storage.store import SnapshotHead
from aggregator.strategies.registry import STRATEGIES
from shoal.errors import IntegrityError
from shoal.simulation.engine.checkpoint import ResumePoint
from shoal.util.state_codec import decode_state, encode_state
from tests.properties.states import damaged, instances, places, same

STATES = sorted({s.state_type for s in STRATEGIES.values()}, key=lambda t: t.__name__)
some = settings(
    deadline=None, max_examples=settings.default.max_examples // 10, suppress_health_check=list(HealthCheck)
)


def through_json(document):
    return json.loads(json.dumps(document))


@pytest.mark.parametrize("cls", [*STATES, SnapshotHead, ResumePoint], ids=lambda t: t.__name__)
@some
@given(data=st.data())
def test_every_state_comes_back_as_it_was(cls, data):
    state = data.draw(instances(cls))
    encoded = encode_state(state)
    found = decode_state(cls, through_json(encoded.document), encoded.arrays)
    assert same(found, state)
    assert encode_state(found).document == encoded.document


@pytest.mark.parametrize("cls", [*STATES, SnapshotHead, ResumePoint], ids=lambda t: t.__name__)
@some
@given(data=st.data())
def test_a_damaged_document_is_refused(cls, data):
    encoded = encode_state(data.draw(instances(cls)))
    document = through_json(encoded.document)
    path, hint = data.draw(st.sampled_from(places(cls, document)))
    with pytest.raises(IntegrityError):
        decode_state(cls, damaged(document, path, hint, data.draw), encoded.arrays)
