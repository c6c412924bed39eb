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
from shoal.util.files import write_private
from tests.cli.conftest import BROKER
from tests.helpers.trees import ONE_THREAD, ROOT

PASSPHRASE = "correct horse battery"


@pytest.fixture
def line(call, fleet):
    """An enrolment line of the fleet."""
    return call("shoal-fleet", "invite", "owner").out.strip()


def test_device_takes_the_line_from_a_file(call, line):
    """No program listens at the broker's port: keys and fingerprint are there all the same, and the line is nowhere."""
    (call.home / "line").write_text(line + "\n")
    asked = call("shoal-edge", "enrol", "dev-9", "line", status=5)
    assert re.search(r"^fingerprint [a-z2-7-]{29}$", asked.err, re.MULTILINE)
    assert (call.home / "dev-9" / "identity.key").exists()
    assert line not in asked.err + asked.out
    again = call("shoal-edge", "enrol", "dev-9", line, status=5)
    assert asked.err.splitlines()[0] == again.err.splitlines()[0]


def test_an_expired_line_is_refused_at_once(call, line):
    """Status 4, and no keys are made; the line's secret is not repeated. Of one that was cut the checksum notices."""
    old = TokenStore(FleetDirectory(call.home / "owner")).issue(1, 600, 10**9)[0].to_line()
    made = call("shoal-edge", "enrol", "dev-9", old, status=4)
    assert "error: this enrolment line expired on 2001-09-09T01:56:40Z" in made.err
    assert "hint: ask the owner for a new one: `shoal-fleet invite`" in made.err
    assert old not in made.err
    assert "damaged or cut off" in call("shoal-edge", "enrol", "dev-9", line[:-3], status=3).err
    assert not (call.home / "dev-9").exists()


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
    founding = ("shoal-fleet", "init", "owner", "--name", "reef", "--broker", BROKER, "--passphrase")
    write_private(call.home / "other", b"short")
    call(*founding, status=3, SHOAL_PASSPHRASE_FILE="other")
    assert not (call.home / "owner").exists()
    write_private(call.home / "pass", PASSPHRASE.encode() + b"\n")
    write_private(call.home / "other", b"another passphrase")
    made = call(*founding, SHOAL_PASSPHRASE_FILE="pass")
    data = call("shoal-fleet", "show", "owner", "--json", SHOAL_PASSPHRASE_FILE="pass").data
    assert f"owner {data['owner']}" == made.last
    assert data["passphrase"]
    assert "SHOAL_PASSPHRASE_FILE" in call("shoal-fleet", "show", "owner", status=3).err
    wrong = call("shoal-fleet", "show", "owner", status=6, SHOAL_PASSPHRASE_FILE="other")
    assert "passphrase is wrong" in wrong.err
    assert "hint: give it again; " in wrong.err
    missing = call("shoal-fleet", "show", "owner", status=3, SHOAL_PASSPHRASE_FILE="nothing")
    assert "error: SHOAL_PASSPHRASE_FILE: can't read nothing" in missing.err
    assert "hint: check that it exists" in missing.err
    (call.home / "pass").chmod(0o644)
    call("shoal-fleet", "show", "owner", status=3, SHOAL_PASSPHRASE_FILE="pass")
    assert PASSPHRASE not in "\n".join(call.seen)
    assert b"shoal-identity" not in (call.home / "owner" / "owner.key").read_bytes()
    assert b"reef" not in (call.home / "owner" / "secrets.bin").read_bytes()


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
