"""The enrolment line: one word that survives copying, and an error that never repeats the secret in it."""

import base64
import dataclasses
import hashlib

import pytest

from shoal.errors import ConfigError, WireError
from shoal.protocol.codec import decode, encode
from shoal.protocol.enrolment import LINE_PREFIX, MAX_CA_BYTES, MAX_LINE_CHARS, EnrolStatement, Token

TOKEN = Token(
    fleet="reef",
    broker="mqtts://enrol:pass-word@broker.example",
    owner="owner-print",
    aggregator="aggregator-print",
    expires_at_s=1_800_000_000,
    secret=bytes(range(16)),
)
LINE = TOKEN.to_line()


def line_of(data, check=None):
    """Return a line with any contents and, by default, their right checksum."""
    check = hashlib.sha256(data).digest()[:4] if check is None else check
    return LINE_PREFIX + base64.urlsafe_b64encode(data + check).decode().rstrip("=")


def test_line_is_one_word():
    """It gives its token, which shows neither its secret nor the broker's password."""
    assert LINE.startswith("shoal1-")
    assert len(LINE.split()) == 1
    assert "=" not in LINE
    assert Token.from_line(LINE) == Token.from_line(f" \t{LINE}\r\n") == TOKEN
    assert line_of(encode(TOKEN)) == LINE
    shown = repr(TOKEN)
    assert [secret for secret in ("pass-word", "secret", repr(TOKEN.secret)) if secret in shown] == []


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("", "this is no enrolment line"),
        (LINE.removeprefix(LINE_PREFIX), "this is no enrolment line"),
        (LINE.replace("shoal1-", "shoal2-"), "this is no enrolment line"),
        (LINE + "A" * MAX_LINE_CHARS, "longer than 4096 characters"),
        (LINE[:20] + " " + LINE[20:], "2 words where one enrolment line belongs"),
        (f"{LINE}\n{LINE}\n{LINE}\n", "3 words where one enrolment line belongs"),
        (LINE[:20] + "\u00e9" + LINE[21:], "characters that do not belong"),
        (LINE[:20] + "." + LINE[21:], "characters that do not belong"),
        (LINE_PREFIX, "damaged or cut off"),
        (LINE[:-4], "damaged or cut off"),
        (line_of(encode(TOKEN), check=b"1234"), "damaged or cut off"),
        (line_of(b""), "damaged or cut off"),
        (line_of(b"no message"), "can't be read"),
        (line_of(encode(TOKEN)[:-1]), "can't be read"),
        (line_of(encode(TOKEN) + b"x"), "can't be read"),
    ],
)
def test_other_text_is_not_repeated(line, message):
    """Any other text is refused without repeating it."""
    with pytest.raises(ConfigError, match=message) as caught:
        Token.from_line(line)
    assert caught.value.hint.startswith("copy the whole line that `shoal-fleet invite` printed")
    assert LINE[10:20] not in str(caught.value)


def test_longest_line_is_read():
    """The limit is checked before anything is decoded."""
    longest = TOKEN
    while len((longer := dataclasses.replace(longest, owner=longest.owner + "o" * 9)).to_line()) <= MAX_LINE_CHARS:
        longest = longer
    assert Token.from_line(longest.to_line()) == longest
    with pytest.raises(ConfigError, match="longer than"):
        Token.from_line(longer.to_line())


def test_largest_certificate_fits() -> None:
    largest = dataclasses.replace(
        TOKEN, broker=f"wss://enrol:{'p' * 43}@{'b' * 63}.example/mqtt", broker_ca=bytes(MAX_CA_BYTES)
    )
    assert Token.from_line(largest.to_line()) == largest
    larger = encode(TOKEN).replace(bytes(4), (MAX_CA_BYTES + 1).to_bytes(4, "little") + bytes(MAX_CA_BYTES + 1), 1)
    with pytest.raises(ConfigError, match="CA's certificate of 2049 bytes"):
        Token.from_line(line_of(larger))


@pytest.mark.parametrize("changes", [{"fleet": "No Name"}, {"broker": "http://broker.example"}, {"broker": ""}])
def test_invalid_fleet_or_address(changes):
    """Tokens are also decoded from files, where a ConfigError would name the wrong file."""
    with pytest.raises(WireError):
        dataclasses.replace(TOKEN, **changes)


def test_invalid_address_on_decoding():
    """A token with an invalid address is refused on decoding, and so is a statement for an invalid fleet name."""
    data = encode(TOKEN).replace(b"mqtts://", b"https://")
    with pytest.raises(WireError, match="the broker's URL"):
        decode(data, Token)
    with pytest.raises(ConfigError, match="can't be read: the broker's URL"):
        Token.from_line(line_of(data))
    with pytest.raises(WireError, match="fleet name 'A/B' is not a valid name"):
        EnrolStatement(
            fleet="A/B", owner="o", aggregator="a", token="0" * 16, expires_at_s=1, asked_at_s=1, card=b"card"
        )
