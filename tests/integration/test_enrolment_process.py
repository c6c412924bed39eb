"""Enrolment at a real broker; tests/integration/test_key_life_cycle.py lets devices join as people do it."""

from __future__ import annotations

import time

import pytest

from aggregator import membership as aggregator_membership
from edge_client import enrolment as joining
from shoal.errors import NotEnrolledError
from shoal.owner.enrolment.tokens import TokenStore
from shoal.owner.keys.directory import FleetDirectory
from shoal.transport.local_broker import find_mosquitto, start_broker

pytestmark = [pytest.mark.broker, pytest.mark.process, pytest.mark.timeout(300)]


def test_a_line_that_expires_ends_the_wait(tmp_path, monkeypatch):
    """It can't be answered any more, and an earlier answer would have arrived by now."""
    if find_mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    monkeypatch.setattr(joining, "LATE_S", 0.5)
    with start_broker("mosquitto", tmp_path) as broker:
        owner = FleetDirectory.create(tmp_path / "owner", "reef", broker.url)
        owner.add_aggregator(aggregator_membership.init(tmp_path / "server").read_bytes())
        token = TokenStore(owner).issue(1, 1, int(time.time()))[0]
        joining.prepare(tmp_path / "dev-1", "dev-1")
        with pytest.raises(NotEnrolledError, match="this enrolment line expired on "):
            joining.enrol(tmp_path / "dev-1", token, ca=None, cert=None, key=None, complain=pytest.fail)
