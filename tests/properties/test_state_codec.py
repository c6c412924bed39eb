"""Every stored state is restored as it was, and a damaged document raises IntegrityError, and no other exception."""

import dataclasses
import json
from collections.abc import Mapping

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from aggregator.storage.store import SnapshotHead
from aggregator.strategies.base import ClientUpdate, UploadKey
from aggregator.strategies.registry import STRATEGIES
from shoal.errors import IntegrityError
from shoal.protocol.messages import Phase
from shoal.simulation.engine.checkpoint import ResumePoint
from shoal.util.state_codec import Stored, decode_state, encode_state
from tests.helpers.states import damaged, instances, places, same

STATES = sorted({s.state_type for s in STRATEGIES.values()}, key=lambda t: t.__name__)
BY_KEY = Stored(ClientUpdate, UploadKey)
BLANK = ClientUpdate(round=1, phase=Phase.TRAIN, device="dev-1", model=0, samples=10, loss=1.0, key_id=bytes(16))
some = settings(deadline=None, max_examples=25, suppress_health_check=list(HealthCheck))


def fetch(_key):
    return BLANK


def inside(value, kind):
    """Return everything of a kind that a state refers to, however deep."""
    if isinstance(value, kind):
        yield value
    if dataclasses.is_dataclass(value):
        for f in dataclasses.fields(value):
            yield from inside(getattr(value, f.name), kind)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from inside(part, kind)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from inside(part, kind)


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


@pytest.mark.parametrize("cls", STATES, ids=lambda t: t.__name__)
@some
@given(data=st.data())
def test_uploads_are_found_again_by_their_keys(cls, data):
    """Of two uploads under one key, which no run has, either may come back."""
    state = data.draw(instances(cls))
    by_value = encode_state(state)
    found = list(inside(state, ClientUpdate))
    uploads = {c.key: c for c in found}
    encoded = encode_state(state, BY_KEY)
    assert encoded.keys == set(uploads)
    assert len(encoded.arrays) <= len(by_value.arrays)
    stored = dataclasses.replace(BY_KEY, fetch=uploads.__getitem__)
    again = decode_state(cls, through_json(encoded.document), encoded.arrays, stored)
    assert len(uploads) < len(found) or same(again, state)
    assert encode_state(again, BY_KEY).document == encoded.document


@pytest.mark.parametrize("cls", [*STATES, SnapshotHead, ResumePoint], ids=lambda t: t.__name__)
@some
@given(data=st.data())
def test_a_damaged_document_is_refused(cls, data):
    stored = dataclasses.replace(BY_KEY, fetch=fetch)
    encoded = encode_state(data.draw(instances(cls)), stored)
    document = through_json(encoded.document)
    path, hint = data.draw(st.sampled_from(places(cls, document, stored)))
    with pytest.raises(IntegrityError):
        decode_state(cls, damaged(document, path, hint, data.draw), encoded.arrays, stored)
