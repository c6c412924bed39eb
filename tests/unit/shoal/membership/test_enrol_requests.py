"""A device's side of enrolment requests; tests/unit/shoal/owner/enrolment/test_admission.py has the owner's."""

from crypto.seal.identity import Identity
from shoal.membership.enrol_requests import make_request, token_id
from tests.helpers.enrolments import TOKEN
from tests.helpers.receiving import RECEIVING

DEVICE = Identity.generate("dev-1")


def test_the_token_stays_secret():
    """The topic names the token, and anyone on an open broker reads the request."""
    request = make_request(DEVICE, TOKEN, 1_234, RECEIVING.public)
    assert TOKEN.secret not in request
    assert TOKEN.secret.hex() not in token_id(TOKEN.secret)
    assert b"owner-print" not in request


def test_id_follows_from_the_secret():
    """A known answer: devices and owner compute the topic independently of each other."""
    assert token_id(bytes(range(16))) == "de9b2d7495fab7ba"
    assert token_id(bytes(16)) != token_id(bytes(15) + b"\1")
