"""Enrolment into a directory that another program changes during the wait."""

import time
from types import SimpleNamespace

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

NOW_S = int(time.time())


@pytest.fixture
def scene(tmp_path):
    """A device that asks an owner's fleet for its place by a token: (owner, broker, transport, asking, complaints)."""
    broker, complaints = LoopbackBroker(), []
    owner = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://loopback")
    grant = owner.add_aggregator(aggregators.init(tmp_path / "server").read_bytes())
    aggregators.join(tmp_path / "server", grant.read_bytes(), owner.fingerprint)
    token = TokenStore(owner).issue(1, 600, NOW_S)[0]
    prepare(tmp_path / "dev-1", "dev-1")
    transport = LoopbackTransport(broker, token_id(token.secret), lambda e: asking.on_event(e, NOW_S))
    asking = Enrolling(tmp_path / "dev-1", token, transport, complaints.append)
    asking.start(NOW_S)
    return SimpleNamespace(
        owner=owner, broker=broker, transport=transport, asking=asking, complaints=complaints, token=token
    )


def test_unstorable_grant_ends_the_wait(tmp_path, monkeypatch, scene):
    """The device was joined by hand during the wait, and runs: the answer is valid, so waiting longer is no use."""
    monkeypatch.setattr(memberships, "WAIT_S", 0.0)
    scene.transport.start()
    scene.broker.pump()
    sitting = LoopbackTransport(scene.broker, "owner", lambda e: registrar.on_event(e, NOW_S))
    registrar = Registrar(scene.owner, sitting)
    registrar.start(NOW_S)
    sitting.start()
    scene.broker.pump()
    registrar.approve_all([fingerprint(Identity.load(tmp_path / "dev-1" / "identity.key").member)], NOW_S)
    with exclusive(tmp_path / "dev-1", wait_s=0, hint="-"), pytest.raises(ConfigError, match="in use by another"):
        scene.broker.pump()
    assert not scene.asking.granted
    assert scene.complaints == []


def test_later_kind_is_no_complaint(scene):
    """Junk is one, on the same topic."""
    topic = Topics("reef").grant(token_id(scene.token.secret))
    scene.asking.on_event(Message(topic, forge(kind=200)), NOW_S)
    assert scene.complaints == []
    scene.asking.on_event(Message(topic, forge(kind=99)), NOW_S)
    assert scene.complaints == ["refused an answer: chunk kind 99 is not known"]
