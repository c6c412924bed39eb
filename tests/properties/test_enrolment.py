"""Enrolment raises a ShoalError for any invalid line or request, and accepts only a valid proof."""

import dataclasses

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from crypto.seal.identity import Identity
from shoal.errors import ConfigError, ShoalError
from shoal.membership.enrol_requests import make_request
from shoal.owner.enrolment.admission import open_request
from shoal.protocol.enrolment import LINE_PREFIX, Token
from tests.helpers.receiving import RECEIVING

TOKEN = Token(
    fleet="reef",
    broker="mqtts://enrol:word@host:8883",
    owner="owner",
    aggregator="aggregator",
    expires_at_s=1_800_000_000,
    secret=bytes(range(16)),
)
REQUEST = make_request(Identity.generate("dev-1"), TOKEN, 1_799_999_000, RECEIVING.public)


@given(st.text(max_size=200))
def test_any_text_is_no_line(text):
    for candidate in (text, LINE_PREFIX + text):
        with pytest.raises(ConfigError) as refused:
            Token.from_line(candidate)
        assert len(text) < 8 or text not in str(refused.value)


@given(st.integers(1, 2**63), st.binary(min_size=16, max_size=16))
def test_a_line_is_read_back(expires, secret):
    token = dataclasses.replace(TOKEN, expires_at_s=expires, secret=secret)
    assert Token.from_line(f"  {token.to_line()}\n") == token


@given(st.data())
def test_line_with_one_change_is_refused(data):
    """A line with one other character is refused."""
    line = TOKEN.to_line()
    at = data.draw(st.integers(0, len(line) - 2))  # the last character has bits that say nothing
    other = data.draw(st.sampled_from("ABCxyz019-_.").filter(lambda c: c != line[at]))
    with pytest.raises(ConfigError):
        Token.from_line(line[:at] + other + line[at + 1 :])


@given(st.binary(max_size=400))
def test_any_bytes_are_no_request(data):
    with pytest.raises(ShoalError):
        open_request(data, TOKEN)


@settings(max_examples=200)
@given(st.integers(0, len(REQUEST) - 1), st.integers(1, 255))
def test_request_with_one_change_is_refused(at, change):
    """A request with one other byte is refused."""
    altered = bytearray(REQUEST)
    altered[at] ^= change
    with pytest.raises(ShoalError):
        open_request(bytes(altered), TOKEN)


@given(st.integers(0, len(REQUEST) - 1))
def test_a_request_cut_short_is_refused(length):
    with pytest.raises(ShoalError):
        open_request(REQUEST[:length], TOKEN)
