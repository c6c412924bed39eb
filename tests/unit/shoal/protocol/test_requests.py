"""The owner's requests: which fields belong to which action."""

import dataclasses

import pytest

from shoal.errors import WireError
from shoal.protocol.codec import decode, encode
from shoal.protocol.requests import LATEST_RECORDS, OF_ONE_RUN, OwnerRequest, RequestAction
from tests.helpers.owner_requests import request_of


@pytest.mark.parametrize("action", RequestAction)
def test_each_action_survives_the_wire(action):
    request = request_of(action, run=3 if action in OF_ONE_RUN else 0, records=5 if action is RequestAction.LOGS else 0)
    assert decode(encode(request), OwnerRequest) == request


@pytest.mark.parametrize(
    ("action", "changes"),
    [
        (RequestAction.LIST, {"run": 1}),
        (RequestAction.STOP, {"run": 0}),
        (RequestAction.LIST, {"sequence": 0}),
        (RequestAction.LIST, {"now": True}),
        (RequestAction.LIST, {"records": 1}),
        (RequestAction.LOGS, {"records": LATEST_RECORDS + 1}),
        (RequestAction.LOGS, {"records": 0}),
        (RequestAction.LIST, {"fleet": "../reef"}),
    ],
)
def test_fields_of_other_action_are_refused(action, changes):
    """Fields that do not belong to the action are refused."""
    right = request_of(action, run=3 if action in OF_ONE_RUN else 0, records=5 if action is RequestAction.LOGS else 0)
    with pytest.raises(WireError):
        dataclasses.replace(right, **changes)


def test_later_action_is_read():
    """So that the aggregator can answer that it does not know it."""
    request = dataclasses.replace(request_of(RequestAction.LIST), action=200, run=7, now=True, records=1 << 31)
    assert decode(encode(request), OwnerRequest) == request
    assert (request.known, request.words) == (None, "do 200")
    known = decode(encode(request_of(RequestAction.LIST)), OwnerRequest)
    assert (known.known, known.words) == (RequestAction.LIST, "list")
