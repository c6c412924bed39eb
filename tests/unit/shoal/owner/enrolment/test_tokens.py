"""The owner's tokens: one device each, found by id, forgotten a week after they expire."""

import pytest

from crypto.seal.identity import fingerprint
from shoal.errors import ConfigError, IntegrityError, UntrustedError, UsageError
from shoal.membership.enrol_requests import token_id
from shoal.owner.enrolment.tokens import FORGOTTEN_AFTER_S, MAX_LIFE_S, TOKENS, TokenStore, seconds
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol.enrolment import Token
from tests.helpers.refusals import refused

NOW_S = 1_700_000_000


@pytest.fixture
def tokens(fleet):
    return TokenStore(fleet)


def id_of(token):
    return token_id(token.secret)


def file_of(fleet, token):
    return fleet.path / TOKENS / f"{id_of(token)}.token"


def test_token_names_fingerprints_to_pin(fleet, tokens):
    """It is stored privately and found by its id; with users at the broker it has those of enrolment."""
    token = tokens.issue(1, 600, NOW_S)[0]
    assert (token.fleet, token.broker) == ("reef", "mqtts://broker.example")
    assert (token.owner, token.aggregator) == (fleet.fingerprint, fingerprint(fleet.roster.aggregator))
    assert token.expires_at_s == NOW_S + 600
    assert Token.from_line(token.to_line()) == token
    assert file_of(fleet, token).stat().st_mode & 0o777 == 0o600
    found = TokenStore(FleetDirectory(fleet.path)).find(id_of(token))
    assert (found.token, found.made_at_s, found.used_by) == (token, NOW_S, "")
    fleet.users.make()
    other = tokens.issue(1, 600, NOW_S)[0]
    assert other.broker == f"mqtts://enrol:{fleet.users.password('enrol')}@broker.example"
    assert other.secret != token.secret


def test_without_aggregator_no_token(tmp_path):
    """Devices pin the aggregator's fingerprint when they join."""
    empty = FleetDirectory.create(tmp_path / "empty", "reef", "mqtt://h")
    with refused(ConfigError, "no aggregator yet", hint_is="shoal-fleet add-aggregator first"):
        TokenStore(empty).issue(1, 600, NOW_S)[0]
    assert not (empty.path / TOKENS).exists()


@pytest.mark.parametrize("name", ["0" * 16, "", "0" * 15, "A" * 16, "../owner.key", "../tokens/{}", "{}.token"])
def test_an_unknown_id_is_refused(tokens, name):
    """The id comes from a topic that strangers choose, and must not lead out of the folder."""
    token = tokens.issue(1, 600, NOW_S)[0]
    with pytest.raises(UntrustedError, match="did not issue, or that expired long ago"):
        tokens.find(name.format(id_of(token)))


def test_token_admits_one_device(tokens):
    """However often it asks; the token of a device is found by its fingerprint."""
    token, other = (tokens.issue(1, 600, NOW_S)[0] for _ in range(2))
    for _ in range(2):
        tokens.use(id_of(token), "print-1")
    with pytest.raises(UntrustedError, match="the line was used before, by print-1"):
        tokens.use(id_of(token), "print-2")
    found = tokens.find(id_of(token))
    assert (found.used_by, found.token) == ("print-1", token)
    assert (tokens.used_by("print-1"), tokens.used_by("print-2")) == (id_of(token), "")
    tokens.use(id_of(other), "print-2")
    assert tokens.used_by("print-2") == id_of(other)


def test_tokens_are_old_after_a_week(tokens):
    """Until then a device that joined with one can still be answered."""
    short, long = tokens.issue(1, 600, NOW_S)[0], tokens.issue(1, 6_000, NOW_S)[0]
    end_s = NOW_S + 600 + FORGOTTEN_AFTER_S
    assert tokens.old(end_s, pytest.fail) == []
    assert tokens.old(end_s + 1, pytest.fail) == [id_of(short)]
    assert set(tokens.old(end_s + 10_000, pytest.fail)) == {id_of(short), id_of(long)}


def test_forgotten_tokens_are_unknown(tokens):
    """Forgotten tokens are unknown and the others stay."""
    gone, stays = (tokens.issue(1, 600, NOW_S)[0] for _ in range(2))
    tokens.forget([id_of(gone)])
    tokens.forget([id_of(gone)])
    with pytest.raises(UntrustedError):
        tokens.find(id_of(gone))
    assert tokens.find(id_of(stays)).token == stays


def test_damaged_token_hides_no_other(fleet, tokens):
    """A damaged token is named and hides no other."""
    broken, whole = (tokens.issue(1, 600, NOW_S)[0] for _ in range(2))
    file_of(fleet, broken).write_bytes(b"junk")
    with refused(
        IntegrityError, r"\.token is damaged", hint_is="remove it, and give the device a new line: shoal-fleet invite"
    ):
        tokens.find(id_of(broken))
    complaints = []
    assert tokens.old(NOW_S + 10**7, complaints.append) == [id_of(whole)]
    (complaint,) = complaints
    assert complaint.startswith(f"skipped {id_of(broken)}.token: ")
    assert complaint.endswith("shoal-fleet invite")
    tokens.use(id_of(whole), "print-1")
    assert tokens.used_by("print-1") == id_of(whole)


@pytest.mark.parametrize(
    ("text", "span_s"),
    [("1s", 1), ("90s", 90), ("30m", 1_800), ("12h", 43_200), ("2d", 172_800), (" 30m\n", 1_800), ("30d", MAX_LIFE_S)],
)
def test_a_duration_is_read(text, span_s):
    assert seconds(text) == span_s


@pytest.mark.parametrize(
    "text", ["", "0s", "030m", "-1m", "1.5h", "30", "m", "2w", "1h30m", "3 m", "31d", "721h", "9" * 40 + "s", "\u0661s"]
)
def test_other_durations_are_usage_errors(text):
    """Any other duration is a mistake of usage."""
    with pytest.raises(UsageError) as caught:
        seconds(text)
    assert str(caught.value) == f"{text!r} is not a duration"
    assert "at most 30d" in caught.value.hint
