"""`shoal-fleet status`: the aggregator's answer beside the owner's knowledge, and a plain statement without an answer.

`shoal-fleet report`: the page of a run as a file, as a line and as JSON.
"""

import contextlib
import json
from types import SimpleNamespace

import pytest
from typer.testing import CliRunner

from shoal.errors import BrokerUnreachableError, NotReadyError
from shoal.owner.cli.main import app
from tests.helpers.fleets import make_exact_fleet

KEYS = {
    "fleet",
    "running",
    "connected",
    "broker",
    "since",
    "problems",
    "run",
    "devices",
    "version",
    "wire",
    "workers",
    "chunk_bytes",
}


@pytest.fixture
def fleet(tmp_path):
    with make_exact_fleet(tmp_path / "fleet", rounds=4) as made:
        yield made


@pytest.fixture
def call(fleet, monkeypatch):
    """Call `status`; ``silent`` and ``down`` are the errors to meet, and ``pending`` the requests on the broker."""
    faults = SimpleNamespace(silent=None, down=None, pending={})

    def ask(_fleet, _wait, _tell, action, **parts):
        if faults.silent:
            raise faults.silent
        question = fleet.ask(action, **parts)
        return question.document(), question.answer.answered_at_s

    @contextlib.contextmanager
    def connection(*_arguments, **_options):
        if faults.down:
            raise faults.down
        registrar = SimpleNamespace(pending=faults.pending)
        yield SimpleNamespace(listen=lambda *_: None, registrar=registrar)

    monkeypatch.setattr("shoal.owner.console.asking.ask", ask)
    monkeypatch.setattr("shoal.owner.enrolment.connection.OwnerConnection", connection)

    def invoke(*options):
        done = CliRunner().invoke(app, ["status", str(fleet.stage.fleet.path), *options])
        assert done.exit_code == 0, done.output
        return done.stdout

    invoke.faults = faults
    return invoke


def test_owner_sees_both_records(fleet, call):
    """The owner sees the aggregators record and his own."""
    call.faults.pending["x"] = SimpleNamespace(name="dev-9", fingerprint="abcd-efgh", asked_at_s=1_795_000_000)
    data = json.loads(call("--json"))["data"]
    assert data.keys() == KEYS | {"owner"}
    # No daemon holds the lock of a loopback fleet's aggregator.
    assert (data["fleet"], data["running"]) == ("demo", False)
    assert [d["name"] for d in data["devices"]] == list(fleet.stage.devices)
    owner = data["owner"]
    assert (owner["roster"], owner["key_version"], owner["last_signed_run"]) == (5, 0, 1)
    assert owner["pending"] == [{"name": "dev-9", "fingerprint": "abcd-efgh", "asked_at": "2026-11-18T11:06:40Z"}]
    assert owner["answered_at"].endswith("Z")
    text = call()
    assert text.startswith("fleet demo, aggregator: not running\n")
    assert "run 1: fedavg, not served, round 0 of 4\n" in text
    assert "pending approvals: 1\n  dev-9 abcd-efgh, asked 2026-11-18T11:06:40Z\n    hint: shoal-fleet approve" in text


def test_status_names_a_standing_order(call, monkeypatch):
    assert "standing order" not in call()
    plan = SimpleNamespace(run=5, schedule=SimpleNamespace(count=3))
    monkeypatch.setattr("shoal.owner.runs.standing.order_in_force", lambda _fleet: plan)
    assert "standing order, runs 5 to 7: shoal-fleet schedule list" in call()


@pytest.mark.parametrize("kind", ["silent", "down"])
def test_silence_blames_no_device(fleet, call, kind):
    """Without an answer the state is unknown and no device is blamed."""
    if kind == "silent":
        call.faults.silent = NotReadyError("the aggregator did not answer within 10 s", hint="look there")
    else:
        call.faults.down = BrokerUnreachableError("no MQTT broker can be used at mqtt://b")
    data = json.loads(call("--json"))["data"]
    assert data.keys() == KEYS | {"owner"}
    assert (data["running"], data["connected"], data["since"], data["run"]) == (None, None, None, None)
    assert [(d["online"], d["reason"]) for d in data["devices"]] == [(None, "")] * 3
    assert data["owner"]["answered_at"] is None
    assert (data["owner"]["pending"] is None) is (kind == "down")
    (problem,) = data["problems"]
    assert problem["reason"].endswith("the state of aggregator, run and devices is unknown")
    assert problem["advice"].startswith("look there" if kind == "silent" else "start the broker")
    text = call()
    assert text.startswith("fleet demo, aggregator: no answer\nproblem: ")
    assert not any(name in text for name in fleet.stage.devices)
    assert ("pending approvals: unknown" in text) is (kind == "down")


def test_an_expired_roster_has_a_hint(call, monkeypatch):
    monkeypatch.setattr("shoal.owner.cli.status.time.time", lambda: 2e10)
    assert "expired 2" in call()
    assert "hint: shoal-fleet renew" in call()
