"""The health checks that devices and aggregators share."""

import os
from pathlib import Path

import pytest

from edge_client.config import EdgeConfig
from shoal.address import BrokerAddress
from shoal.membership import doctor
from shoal.membership.doctor import local_checks, membership_checks
from shoal.transport import probe
from shoal.util.console import Check
from tests.helpers.parties import Parties

DAY_S = 86400


@pytest.fixture
def member(tmp_path):
    return Parties(tmp_path, "dev-1").members["dev-1"]


def roster_at(member, now_s):
    return doctor._roster(member.roster, now_s)


def test_directory_as_it_was_made_is_private(member, tmp_path):
    """Cards and the roster may be read by others, and there may be links to a device's model in use."""
    for name in ("dev-1.card", "roster.signed"):
        (member.directory / name).chmod(0o644)
    for name in ("model.onnx", "model.json"):
        (member.directory / name).symlink_to(f"in-use/current/{name}")
    assert [(c.name, c.result) for c in local_checks(member.directory)] == [("directory", "ok"), ("disk", "ok")]
    assert [c.result for c in local_checks(tmp_path / "gone")] == ["failure", "failure"]


@pytest.mark.parametrize("harm", ["mode", "link", "open directory"])
def test_file_that_others_can_reach_is_named(member, harm):
    path = member.directory / "notes.bin"
    if harm == "link":
        path.symlink_to("/etc/hostname")
    else:
        path.write_bytes(b"x")
        path.chmod(0o644 if harm == "mode" else 0o600)
    if harm == "open directory":
        member.directory.chmod(0o777)
    found = local_checks(member.directory)[0]
    assert found.result == "failure"
    assert str(member.directory if harm == "open directory" else path) in found.detail
    assert found.advice


@pytest.mark.parametrize(("free", "result"), [(0, "failure"), (50 << 20, "warning"), (200 << 20, "ok")])
def test_a_disk_without_room(member, monkeypatch, free, result):
    room = os.statvfs_result((1, 1, 0, 0, free, 0, 0, 0, 0, 255))
    monkeypatch.setattr(os, "statvfs", lambda _path: room)
    assert local_checks(member.directory)[1].result == result


def test_rosters_dates_show_a_wrong_clock(member):
    issued_at_s, expires_at_s = member.roster.issued_at_s, member.roster.expires_at_s
    assert roster_at(member, issued_at_s).result == "ok"
    assert roster_at(member, issued_at_s - doctor.CLOCK_SLACK_S).result == "ok"
    behind = roster_at(member, issued_at_s - DAY_S)
    assert behind.result == "failure"
    assert behind.detail.startswith("this machine's clock is at least 1 d behind the owner's")
    soon = roster_at(member, expires_at_s - DAY_S)
    assert (soon.result, "shoal-fleet renew" in soon.advice) == ("warning", True)
    late = roster_at(member, expires_at_s + 1)
    assert late.result == "failure"
    assert "clock" in late.advice


def test_silent_broker_shows_no_secret(member):
    """Nor does an address that is none."""
    url = "mqtt://user:hunter2@127.0.0.1:1"
    roster, broker, tls = membership_checks(member, "dev-1", EdgeConfig(Path(), Path(), broker=url))
    assert roster.result == "ok"
    assert (broker.name, broker.result) == ("broker", "failure")
    assert "mqtt://127.0.0.1:1" in broker.detail
    assert tls == Check("tls", "ok", "none: the broker is on this machine")
    _, none = membership_checks(member, "dev-1", EdgeConfig(Path(), Path(), broker="http://user:hunter2@x"))
    assert (none.name, none.result) == ("broker", "failure")
    assert "hunter2" not in f"{broker}{tls}{none}"


@pytest.mark.parametrize(("left_s", "result"), [(-1, "failure"), (DAY_S, "warning"), (99 * DAY_S, "ok")])
def test_certificates_that_expire(monkeypatch, left_s, result):
    """A connection without TLS to another machine is a warning."""
    monkeypatch.setattr(probe, "certificate_expiry", lambda _address: 10**9 + 99 * DAY_S)
    address = BrokerAddress.parse("mqtts://reef.example")
    assert doctor._tls(address, 10**9).result == "ok"
    monkeypatch.setattr(probe, "own_expiries", lambda _address: {"client": 10**9 + left_s})
    assert doctor._tls(address, 10**9).result == result
    assert doctor._tls(BrokerAddress.parse("mqtt://reef.example"), 0).result == "warning"
