"""Enrolment requests: only the holder of a token makes a valid one, for its own keys and under the token's own terms."""

import dataclasses

import pytest

from crypto.seal.envelope import seal_to_group
from crypto.seal.identity import Identity
from shoal.errors import UntrustedError, WireError
from shoal.membership import enrol_requests as tokens
from shoal.membership.enrol_requests import make_request
from shoal.membership.grants import AGGREGATOR_ROLE, DEVICE_ROLE, make_card
from shoal.owner.enrolment.admission import open_request
from shoal.protocol.channels import ENROLMENT
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import Card
from shoal.protocol.enrolment import EnrolRequest
from tests.helpers.enrolments import TOKEN, statement_of
from tests.helpers.receiving import RECEIVING, device_card

DEVICE, THIEF = Identity.generate("dev-1"), Identity.generate("dev-1")
UNPROVEN = "the request does not prove the token that it names"


def forge(token=TOKEN, signer=DEVICE, *, card=None, proof=None, raw=None):
    """Return a request by a holder of the line, who may seal any statement."""
    statement = encode(statement_of(token, card or device_card(signer), 1_000))
    raw = statement if raw is None else raw
    proof = tokens.prove(token, raw or b"-") if proof is None else proof
    head = ENROLMENT.head(token.fleet, signer.name, "owner")
    return encode(EnrolRequest(signer.member, seal_to_group(signer, tokens.token_group(token), head, proof + raw)))


def test_request_gives_card_and_time():
    """A request gives the card and the time of its device."""
    card, asked = open_request(make_request(DEVICE, TOKEN, 1_234, RECEIVING.public), TOKEN)
    assert card == Card(DEVICE_ROLE, DEVICE.member, RECEIVING.public)
    assert asked.asked_at_s == 1_234
    assert decode(asked.card[64:], Card) == card


@pytest.mark.parametrize("change", [{"secret": bytes(16)}, {"fleet": "rock"}], ids=["another secret", "another fleet"])
def test_another_tokens_request_is_refused(change):
    """A request under another token is refused."""
    with pytest.raises(UntrustedError):
        open_request(make_request(DEVICE, dataclasses.replace(TOKEN, **change), 1_234, RECEIVING.public), TOKEN)


@pytest.mark.parametrize("change", [{"owner": "eve-print"}, {"aggregator": "eve-print"}, {"expires_at_s": 9_999}])
def test_terms_unlike_the_line_are_refused(change):
    """The device pinned other fingerprints, or its line was given another expiry: the same secret does not help."""
    with pytest.raises(UntrustedError, match="another fleet, owner, aggregator or token than the enrolment line"):
        open_request(make_request(DEVICE, dataclasses.replace(TOKEN, **change), 1_234, RECEIVING.public), TOKEN)


def test_forged_request_with_proof_passes():
    """The tests below can fail: their request differs from this one in one point each."""
    assert open_request(forge(), TOKEN)[0].member == DEVICE.member


@pytest.mark.parametrize("proof", [b"", bytes(31)])
def test_request_lacking_a_statement(proof):
    """A request without a statement is refused."""
    with pytest.raises(WireError, match="an empty enrolment statement"):
        open_request(forge(proof=proof, raw=b""), TOKEN)


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"proof": bytes(32)}, UNPROVEN),
        ({"signer": THIEF, "card": device_card(DEVICE)}, "card does not belong to the keys that sign the request"),
        ({"card": make_card(DEVICE, AGGREGATOR_ROLE)}, "card does not belong"),
    ],
    ids=["wrong proof", "another device's card", "an aggregator's card"],
)
def test_wrong_proof_or_card_is_refused(changes, match):
    """Under the right seal."""
    with pytest.raises(UntrustedError, match=match):
        open_request(forge(**changes), TOKEN)


def test_other_keys_around_it_are_refused():
    """A broker could replace the claimed identity, which is not encrypted."""
    request = decode(make_request(DEVICE, TOKEN, 1_234, RECEIVING.public), EnrolRequest)
    with pytest.raises(UntrustedError, match=UNPROVEN):
        open_request(encode(dataclasses.replace(request, member=THIEF.member)), TOKEN)


def test_other_name_around_it_is_refused():
    """Another name around a request is refused."""
    request = decode(make_request(DEVICE, TOKEN, 1_234, RECEIVING.public), EnrolRequest)
    renamed = dataclasses.replace(request, member=dataclasses.replace(DEVICE.member, name="dev-2"))
    with pytest.raises(UntrustedError, match="a request of 'dev-1' to 'owner' of fleet 'reef'"):
        open_request(encode(renamed), TOKEN)
