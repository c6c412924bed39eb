"""Enrolment into a directory that another program changes during the wait."""

import time

import pytest
from shoal_lab.loopback.transport import LoopbackBroker, LoopbackTransport

from aggregator import membership as aggregators
from crypto.seal.identity import Identity, fingerprint
from edge_client.enrolment import Enrolling, prepare
from shoal.errors import ConfigError
from shoal.membership import directory as memberships
from shoal.membership.enrol_requests import token_id
from shoal.owner.enrolment.admission import Registrar
from shoal.owner.enrolment.tokens import TokenStore
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol.topics import Topics
from shoal.transport.base import Message
from shoal.util.files import exclusive
from tests.helpers.chunks import forge


def test_unstorable_grant_ends_the_wait(tmp_path, monkeypatch):
    """The device was joined by hand during the wait, and runs: the answer is valid, so waiting longer is no use."""
    monkeypatch.setattr(memberships, "WAIT_S", 0.0)
    now_s, broker, complaints = int(time.time()), LoopbackBroker(), []
    owner = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://loopback")
    grant = owner.add_aggregator(aggregators.init(tmp_path / "server").read_bytes())
    aggregators.join(tmp_path / "server", grant.read_bytes(), owner.fingerprint)
    token = TokenStore(owner).issue(1, 600, now_s)[0]
    prepare(tmp_path / "dev-1", "dev-1")
    transport = LoopbackTransport(broker, token_id(token.secret), lambda e: asking.on_event(e, now_s))
    asking = Enrolling(tmp_path / "dev-1", token, transport, complaints.append)
    asking.start(now_s)
    transport.start()
    broker.pump()
    sitting = LoopbackTransport(broker, "owner", lambda e: registrar.on_event(e, now_s))
    registrar = Registrar(owner, sitting)
    registrar.start(now_s)
    sitting.start()
    broker.pump()
    registrar.approve_all([fingerprint(Identity.load(tmp_path / "dev-1" / "identity.key").member)], now_s)
    with exclusive(tmp_path / "dev-1", wait_s=0, hint="-"), pytest.raises(ConfigError, match="in use by another"):
        broker.pump()
    assert not asking.granted
    assert complaints == []


def test_later_kind_is_no_complaint(tmp_path):
    """Junk is one, on the same topic."""
    broker, complaints, now_s = LoopbackBroker(), [], int(time.time())
    owner = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://loopback")
    owner.add_aggregator(aggregators.init(tmp_path / "server").read_bytes())
    token = TokenStore(owner).issue(1, 600, now_s)[0]
    prepare(tmp_path / "dev-1", "dev-1")
    transport = LoopbackTransport(broker, token_id(token.secret), lambda _: None)
    asking = Enrolling(tmp_path / "dev-1", token, transport, complaints.append)
    asking.start(now_s)
    topic = Topics("reef").grant(token_id(token.secret))
    asking.on_event(Message(topic, forge(kind=200)), now_s)
    assert complaints == []
    asking.on_event(Message(topic, forge(kind=99)), now_s)
    assert complaints == ["refused an answer: chunk kind 99 is not known"]
