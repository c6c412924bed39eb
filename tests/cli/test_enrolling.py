"""token, enrol, devices, approve, revoke, publish, broker-config and the passphrase, as people see them."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys

import pytest

from shoal.owner.enrolment.tokens import TokenStore
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol.enrolment import Token
from shoal.util.files import write_private
from tests.cli.conftest import BROKER
from tests.helpers.trees import ONE_THREAD, ROOT

PASSPHRASE = "correct horse battery"


@pytest.fixture
def line(call, fleet):
    """An enrolment line of the fleet."""
    return call("shoal-fleet", "invite", "owner").out.strip()


def test_token_is_one_line(call, fleet):
    """Broker, fleet, both fingerprints and a secret; stderr repeats all but the secret."""
    made = call("shoal-fleet", "invite", "owner", "--expires", "2h")
    (text,) = made.out.splitlines()
    token = Token.from_line(text)
    assert (token.fleet, token.broker, token.owner) == ("reef", BROKER, fleet)
    assert token.aggregator in made.err
    assert text not in made.err
    assert "holds for 2h" in made.err


def test_earlier_name_still_works(call, fleet):
    """It is an alias that --help does not list."""
    assert Token.from_line(call("shoal-fleet", "invite", "owner").out.strip()).fleet == "reef"
    assert "token " not in call("shoal-fleet", "--help").out


def test_many_lines_are_one_a_device(call, fleet):
    made = call("shoal-fleet", "invite", "owner", "--count", "3")
    assert len({Token.from_line(text).secret for text in made.out.splitlines()}) == 3
    assert "next: shoal-fleet approve owner --all-invited" in made.err
    assert len(call("shoal-fleet", "invite", "owner", "--count", "2", "--json").data["lines"]) == 2
    call("shoal-fleet", "invite", "owner", "--count", "0", status=2)


@pytest.mark.parametrize("span", ["0m", "30", "m", "31d", "-5m", "1e3s"])
def test_span_that_is_none_is_a_usage_error(call, fleet, span):
    """And no token is made."""
    call("shoal-fleet", "invite", "owner", f"--expires={span}", status=2)
    assert not (call.home / "owner" / "tokens").exists()


def test_device_takes_the_line_from_a_file(call, line):
    """No program listens at the broker's port: keys and fingerprint are there all the same, and the line is nowhere."""
    (call.home / "line").write_text(line + "\n")
    asked = call("shoal-edge", "enrol", "dev-9", "line", status=5)
    assert re.search(r"^fingerprint [a-z2-7-]{29}$", asked.err, re.MULTILINE)
    assert (call.home / "dev-9" / "identity.key").exists()
    assert line not in asked.err + asked.out
    again = call("shoal-edge", "enrol", "dev-9", line, status=5)
    assert asked.err.splitlines()[0] == again.err.splitlines()[0]


@pytest.mark.parametrize("text", ["", "shoal1-", "shoal1-AAAA", "shoal1-!!!", "nothing"])
def test_bad_line_is_not_repeated(call, fleet, text):
    """Stdin is empty here."""
    made = call("shoal-edge", "enrol", "dev-9", *([text] if text else []), status=3)
    assert "line" in made.err
    assert not (call.home / "dev-9").exists()


def test_a_cut_line_is_refused(call, line):
    """The checksum notices."""
    made = call("shoal-edge", "enrol", "dev-9", line[:-3], status=3)
    assert "damaged or cut off" in made.err


def test_an_expired_line_is_refused_at_once(call, fleet):
    """Status 4, and no keys are made; the line's secret is not repeated."""
    old = TokenStore(FleetDirectory(call.home / "owner")).issue(1, 600, 10**9)[0].to_line()
    made = call("shoal-edge", "enrol", "dev-9", old, status=4)
    assert "error: this enrolment line expired on 2001-09-09T01:56:40Z" in made.err
    assert "hint: ask the owner for a new one: `shoal-fleet invite`" in made.err
    assert not (call.home / "dev-9").exists()
    assert old not in made.err


def test_who_has_joined_can_not_enrol(call, line):
    """Its directory belongs to a fleet."""
    made = call("shoal-edge", "enrol", "dev-1", line, status=3)
    assert "belongs to a fleet already" in made.err


@pytest.mark.parametrize("command", [("devices",), ("approve", "aaaa"), ("publish",)])
def test_without_a_broker_the_owner_is_told(call, fleet, command):
    """Status 5."""
    call("shoal-fleet", command[0], "owner", *command[1:], status=5)


def test_revocation_holds_without_a_broker(call, fleet):
    """It is signed first and published after."""
    made = call("shoal-fleet", "revoke", "owner", "dev-1", status=5)
    assert made.out.startswith("dev-1 revoked by roster ")
    assert "it is signed and stored: shoal-fleet publish owner when the broker is back" in made.err
    assert "dev-1 " in call("shoal-fleet", "show", "owner").out
    assert call("shoal-fleet", "show", "owner", "--json").data["devices"][0]["revoked"]
    call("shoal-fleet", "revoke", "owner", "dev-1", status=3)
    told = " ".join(call("shoal-fleet", "revoke", "--help").out.split())
    assert "opens the next round under the new keys" in told


def test_rotate_draws_new_secrets(call, fleet):
    """Unreachable broker: signed all the same, and `publish` is named; the roster says since when the secrets hold."""
    before = FleetDirectory(call.home / "owner").secrets
    made = call("shoal-fleet", "rotate", "owner", status=5)
    assert "it is signed and stored: shoal-fleet publish owner" in made.err
    sequence = FleetDirectory(call.home / "owner").roster.sequence
    assert made.out.strip() == f"new secrets since roster {sequence}"
    again = call("shoal-fleet", "rotate", "owner", SHOAL_FLEET_OFFLINE="1")
    assert "shoal-fleet publish owner" in again.err
    after = FleetDirectory(call.home / "owner").secrets
    assert before.version_secret != after.version_secret
    assert before.broadcast_key != after.broadcast_key


def test_damaged_files_say_what_to_do(call, fleet):
    """A token's stops nothing but itself; secrets' and roster's stop everything."""
    call("shoal-fleet", "invite", "owner")
    (file,) = (call.home / "owner" / "tokens").glob("*.token")
    file.write_bytes(b"")
    call("shoal-fleet", "invite", "owner")
    for name in ("roster.signed", "secrets.bin"):
        write_private(call.home / "owner" / name, b"")
        told = call("shoal-fleet", "show", "owner", status=7)
        assert f"owner/{name} is damaged" in told.err
        assert "backup" in told.err


def test_renewing_says_how_rosters_travel(call, fleet):
    """Renewing the roster says how it gets to the others."""
    told = call("shoal-fleet", "renew", "owner")
    assert told.out == "owner/roster.signed\n"
    assert "next: shoal-fleet publish owner" in told.err


def test_broker_config_shows_no_password(call, fleet):
    """And warns of a broker without TLS."""
    made = call("shoal-fleet", "broker-config", "owner", "broker", "--device", "dev-2")
    assert made.out == "broker/shoal.conf\n"
    assert "users: owner, enrol, aggregator, dev-1, dev-2" in made.err
    assert "passwords are sent unencrypted" in made.err
    users = FleetDirectory(call.home / "owner").users
    assert not any(users.password(u) in made.err for u in ("owner", "enrol", "aggregator", "dev-1", "dev-2"))
    assert users.password("dev-1") in (call.home / "broker" / "clients" / "dev-1.url").read_text()
    shown = call("shoal-fleet", "show", "owner", "--json")
    assert shown.data["broker"] == BROKER


def test_broker_learns_who_comes_and_goes(call, fleet):
    """Once it has users, it admits only those in its files."""
    call("shoal-edge", "init", "dev-2", "--name", "dev-2")
    added = ("shoal-fleet", "add-device", "owner", "dev-2/dev-2.card")
    assert "broker-config" not in call(*added).err
    for _ in range(2):
        call("shoal-fleet", "broker-config", "owner", "broker")
    assert "listener 1 127.0.0.1" in (call.home / "broker/shoal.conf").read_text()
    step = (
        "next: shoal-fleet broker-config owner FOLDER again, then copy the files to the "
        "broker's host and send mosquitto a SIGHUP: only then the broker"
    )
    assert f"{step} accepts dev-2" in call(*added).err
    assert f"{step} shuts dev-2 out" in call("shoal-fleet", "revoke", "owner", "dev-2", SHOAL_FLEET_OFFLINE="1").err


def test_a_passphrase_guards_the_owners_keys(call):
    """From a private file; without it, or with another, nothing opens; it shows nowhere."""
    write_private(call.home / "pass", PASSPHRASE.encode() + b"\n")
    write_private(call.home / "other", b"another passphrase")
    made = call(
        "shoal-fleet", "init", "owner", "--name", "reef", "--broker", BROKER, "--passphrase",
        SHOAL_PASSPHRASE_FILE="pass",
    )  # fmt: skip
    data = call("shoal-fleet", "show", "owner", "--json", SHOAL_PASSPHRASE_FILE="pass").data
    assert f"owner {data['owner']}" == made.last
    assert data["passphrase"]
    refused = call("shoal-fleet", "show", "owner", status=3)
    assert "SHOAL_PASSPHRASE_FILE" in refused.err
    wrong = call("shoal-fleet", "show", "owner", status=6, SHOAL_PASSPHRASE_FILE="other")
    assert "passphrase is wrong" in wrong.err
    assert "hint: give it again; " in wrong.err
    missing = call("shoal-fleet", "show", "owner", status=3, SHOAL_PASSPHRASE_FILE="nothing")
    assert "SHOAL_PASSPHRASE_FILE: can't read nothing" in missing.err
    assert "error: SHOAL_PASSPHRASE_FILE: can't read nothing" in missing.err
    assert "hint: check that it exists" in missing.err
    (call.home / "pass").chmod(0o644)
    call("shoal-fleet", "show", "owner", status=3, SHOAL_PASSPHRASE_FILE="pass")
    assert PASSPHRASE not in "\n".join(call.seen)
    assert b"shoal-identity" not in (call.home / "owner" / "owner.key").read_bytes()
    assert b"reef" not in (call.home / "owner" / "secrets.bin").read_bytes()


def test_a_short_passphrase_is_refused(call):
    """Before anything is written."""
    write_private(call.home / "pass", b"short")
    call(
        "shoal-fleet", "init", "owner", "--name", "reef", "--broker", BROKER, "--passphrase",
        status=3, SHOAL_PASSPHRASE_FILE="pass",
    )  # fmt: skip
    assert not (call.home / "owner").exists()


def test_passphrase_is_asked_for_unseen(call):
    """Twice when it is made; the input is not echoed."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.chdir(call.home)
        os.environ.update(ONE_THREAD, PYTHONPATH=str(ROOT))
        start = "from shoal.owner.cli.main import main; main()"
        arguments = ["init", "owner", "--name", "reef", "--broker", BROKER, "--passphrase"]
        os.execv(sys.executable, [sys.executable, "-c", start, *arguments])
    shown = b""
    for _ in range(2):
        while not shown.rstrip().endswith(b":"):
            shown += os.read(terminal, 1024)
        os.write(terminal, PASSPHRASE.encode() + b"\n")
        shown += b"|"
    try:
        while piece := os.read(terminal, 1024):
            shown += piece
    except OSError:
        pass  # the other side has closed
    os.close(terminal)
    assert os.waitpid(pid, 0)[1] == 0, shown
    assert b"owner " in shown
    assert PASSPHRASE.encode() not in shown
    write_private(call.home / "pass", PASSPHRASE.encode())
    call("shoal-fleet", "show", "owner", SHOAL_PASSPHRASE_FILE="pass")


def test_the_line_is_read_from_stdin(call, line):
    """With - or with nothing at all."""
    for arguments in (["dev-8", "-"], ["dev-8"]):
        done = subprocess.run(
            [sys.executable, "-c", "from edge_client.cli import main; main()", "enrol", *arguments],
            cwd=call.home,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT)},
            input=line + "\n",
            capture_output=True,
            text=True,
            timeout=90,
            check=False,
        )
        assert done.returncode == 5, done.stderr
        assert "fingerprint " in done.stderr
        assert line not in done.stderr + done.stdout
