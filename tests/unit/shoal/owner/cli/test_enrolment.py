"""The owner's commands at the broker: their lines, and the next step if the broker is away."""

import contextlib
import json
import time
import types

import pytest

from crypto.seal.identity import Identity, fingerprint
from shoal.errors import BrokerUnreachableError, ConfigError, UsageError
from shoal.membership.enrol_requests import token_id
from shoal.owner.cli import enrolment
from shoal.owner.enrolment.admission import Refused, Request
from shoal.owner.enrolment.tokens import TokenStore
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol.enrolment import Token
from tests.helpers.receiving import device_card, founded

AGGREGATOR, DEVICE = Identity.generate("aggregator"), Identity.generate("dev-1")
NO_BROKER = "mqtt://127.0.0.1:1"
"""No broker listens on port 1."""


@pytest.fixture
def fleet(tmp_path):
    return founded(tmp_path / "owner", NO_BROKER, DEVICE, aggregator=AGGREGATOR)


def request(name, *, token="0" * 16, asked_at_s=0):
    return Request(
        name=name, fingerprint=f"print-of-{name}", token=token, asked_at_s=asked_at_s, card=b"", answered=False
    )


def registrar(*pending, refused=()):
    return types.SimpleNamespace(pending={r.fingerprint: r for r in pending}, refused={r.token: r for r in refused})


def test_token_is_on_stdout_terms_on_stderr(fleet, capsys):
    """A token is one line on stdout and its terms are on stderr."""
    began = int(time.time())
    enrolment.invite(fleet.path, expires="12h")
    out, err = capsys.readouterr()
    token = Token.from_line(out)
    assert out.count("\n") == 1
    assert began + 43_200 <= token.expires_at_s <= time.time() + 43_200
    assert TokenStore(fleet).find(token_id(token.secret)).token == token
    assert f"owner {fleet.fingerprint}, aggregator {fingerprint(AGGREGATOR.member)}, broker {NO_BROKER}" in err
    assert "holds for 12h, one line for one device" in err
    assert out.strip() not in err


def test_many_lines_are_all_different(fleet, capsys):
    """Many lines at once are all different and stored; a duration that is none issues no line."""
    with pytest.raises(UsageError, match="'soon' is not a duration"):
        enrolment.invite(fleet.path, expires="soon")
    assert not (fleet.path / "tokens").exists()
    enrolment.invite(fleet.path, 5, json=True)
    found = json.loads(capsys.readouterr().out)["data"]
    ids = {token_id(Token.from_line(line).secret) for line in found["lines"]}
    assert len(ids) == 5
    assert {path.stem for path in (fleet.path / "tokens").iterdir()} == ids
    enrolment.invite(fleet.path, 2)
    out, err = capsys.readouterr()
    assert len({Token.from_line(text).secret for text in out.splitlines()}) == 2
    assert f"next: shoal-fleet approve {fleet.path} --all-invited" in err


@pytest.mark.parametrize(("fingerprints", "every"), [([], False), (["abcd"], True)])
def test_approve_takes_fingerprints_or_all(fleet, fingerprints, every):
    with pytest.raises(UsageError, match="fingerprints or --all-invited"):
        enrolment.approve(fleet.path, fingerprints, every)


def test_watching_as_json_is_refused_first(tmp_path):
    """Watching as json is refused before the fleet is opened."""
    with pytest.raises(UsageError, match="--watch prints lines, --json one object"):
        enrolment.devices(tmp_path / "none", watch=True, json=True)


def test_listing_has_all_kinds_of_devices(fleet, monkeypatch):
    """The listing has pending refused and enrolled devices."""
    fleet.add_device(device_card(Identity.generate("dev-0")))
    fleet.revoke("dev-0")
    monkeypatch.setattr(time, "time", lambda: 1_000.0)
    found = enrolment._listing(
        fleet,
        registrar(
            request("dev-9", asked_at_s=400),
            request("dev-3", token="1" * 16, asked_at_s=5_000),
            refused=(Refused("dev-5", "b" * 16, "the line has expired"), Refused("?", "a" * 16, "junk")),
        ),
    )
    assert json.loads(json.dumps(found)) == found
    assert (found["fleet"], found["roster"]) == ("reef", fleet.roster.sequence)
    assert [(r["name"], r["age_s"]) for r in found["pending"]] == [("dev-3", 0), ("dev-9", 600)], (
        "a fast clock: 0 s ago"
    )
    assert [r["token"] for r in found["refused"]] == ["a" * 16, "b" * 16]
    assert [(d["name"], d["revoked"]) for d in found["devices"]] == [("dev-1", False), ("dev-0", True)]
    assert enrolment._lines(found) == [
        f"pending dev-3 print-of-dev-3 line {'1' * 16} asked 0 s ago",
        f"pending dev-9 print-of-dev-9 line {'0' * 16} asked 600 s ago",
        f"refused ? line {'a' * 16}: junk",
        f"refused dev-5 line {'b' * 16}: the line has expired",
        f"enrolled dev-1 {fingerprint(DEVICE.member)}",
        f"revoked dev-0 {found['devices'][1]['fingerprint']}",
    ]


def test_second_device_of_a_name_is_told(fleet):
    """`approve` refuses it: its way in is `replace`."""
    found = enrolment._listing(fleet, registrar(request("dev-1", asked_at_s=5_000)))
    assert enrolment._lines(found)[0].endswith(
        f"; the fleet has a dev-1: shoal-fleet replace {fleet.path} dev-1 puts this one in its place"
    )


def test_requests_are_told_apart():
    """A second device may ask with the same line, and a device with two lines."""
    asked = [enrolment._asked({"token": t, "fingerprint": f, "name": "n", "age_s": 1}) for t in "ab" for f in "xy"]
    assert len(set(asked)) == 4
    assert asked[0] == enrolment._asked({"token": "a", "fingerprint": "x", "name": "n", "age_s": 99})


@pytest.mark.parametrize(("own", "hint"), [("first", "first; then"), ("", "then")])
def test_a_hint_is_added_to_the_errors_own(own, hint):
    error = ConfigError("x", hint=own)
    enrolment.add_hint(error, "then")
    assert error.hint == hint


def test_a_revocation_offline_is_signed(fleet, capsys, monkeypatch):
    """And draws new secrets; with users at the broker only then the device is shut out."""
    monkeypatch.setenv("SHOAL_FLEET_OFFLINE", "1")
    fleet.users.make()
    enrolment.revoke(fleet.path, "dev-1")
    out, err = capsys.readouterr()
    after = FleetDirectory(fleet.path)
    assert out == f"dev-1 revoked by roster {after.roster.sequence}\n"
    assert after.roster.revoked == ("dev-1",)
    assert f"next: shoal-fleet publish {fleet.path}, or carry roster.signed and grants/" in err
    assert "only then the broker shuts dev-1 out" in err
    enrolment.rotate(fleet.path)
    rotated = FleetDirectory(fleet.path)
    assert rotated.secrets.version_secret != after.secrets.version_secret
    assert rotated.secrets.broadcast_key != after.secrets.broadcast_key
    assert capsys.readouterr().out == f"new secrets since roster {rotated.roster.keys_since}\n"


@pytest.mark.parametrize(
    "command",
    [lambda path: enrolment.revoke(path, "dev-1"), enrolment.rotate],
    ids=["revoke", "rotate"],
)
def test_change_without_broker_is_signed(fleet, capsys, command):
    """The person must not take the error for a change that did not happen."""
    with pytest.raises(BrokerUnreachableError) as caught:
        command(fleet.path)
    assert caught.value.hint.endswith(
        f"it is signed and stored: shoal-fleet publish {fleet.path} when the broker is back"
    )
    assert FleetDirectory(fleet.path).roster.sequence == fleet.roster.sequence + 1
    assert "roster" in capsys.readouterr().out


def test_broker_config_warns_of_clear_text(fleet, tmp_path, capsys):
    """Broker config prints its file and warns about passwords in the clear, unless the address is one of TLS."""
    enrolment.broker_config(fleet.path, tmp_path / "broker", device=["dev-2"])
    out, err = capsys.readouterr()
    assert out == f"{tmp_path / 'broker' / 'shoal.conf'}\n"
    assert (tmp_path / "broker" / "shoal.conf").exists()
    assert "users: owner, enrol, aggregator, dev-1, dev-2" in err
    assert "warning: the fleet's broker address begins with mqtt://" in err
    assert "passwords are sent unencrypted" in err
    users = FleetDirectory(fleet.path).users
    assert [u for u in ("owner", "enrol", "aggregator", "dev-1", "dev-2") if users.password(u) in out + err] == []
    assert users.password("dev-1") in (tmp_path / "broker" / "clients" / "dev-1.url").read_text()
    enrolment.broker_config(founded(tmp_path / "secure", "mqtts://localhost").path, tmp_path / "other")
    assert "warning" not in capsys.readouterr().err


def test_replace_waits_for_the_request(fleet, monkeypatch):
    """Each message of the broker makes a new set of requests."""
    found, ended = registrar(), []

    def listen(_seconds, enough):
        found.pending = {"print": request("dev-1")}
        ended.append(enough())

    connection = types.SimpleNamespace(registrar=found, listen=listen, replace=lambda *_: DEVICE.member)
    monkeypatch.setattr(enrolment, "_connected", lambda _: contextlib.nullcontext(connection))
    monkeypatch.setattr(enrolment, "broker_users", lambda *_, **_options: None)
    monkeypatch.setattr(enrolment.schedules, "send_again", lambda _: None)
    enrolment.replace(fleet.path, "dev-1")
    assert ended == [True]


def test_names_and_labels_are_signed(fleet, capsys):
    """Offline the roster is signed and the next step said; `name` is no label, and a bad one changes nothing."""
    (fleet.path / "settings.toml").write_text("[fleet]\noffline = true\n")
    enrolment.rename(fleet.path, "dev-1", "Gate 7")
    enrolment.label(fleet.path, ["gate 7"], ["site=berlin", "line=3"], json=True)
    out, err = capsys.readouterr()
    assert out.splitlines()[0] == "dev-1 is shown as Gate 7"
    assert "shoal-fleet publish" in err
    assert json.loads(out.splitlines()[1])["data"]["labels"] == {"dev-1": "line=3,name=Gate 7,site=berlin"}
    enrolment.label(fleet.path, ["dev-1"], ["line="])
    enrolment.rename(fleet.path, "Gate 7", "dev-1")
    for labels in (["name=x"], ["site"], ["site=a\n"]):
        with pytest.raises(UsageError):
            enrolment.label(fleet.path, ["dev-1"], labels)
    made = FleetDirectory(fleet.path)
    assert (made.roster.labels, made.roster.keys_since) == (("site=berlin",), 0)
    assert f"{fingerprint(DEVICE.member)} site=berlin" in enrolment._lines(enrolment._listing(made, registrar()))[0]
