"""Hostile requests of every kind to the owner: none waits for approval, and the rightful one still does.

Finer variants: tests/unit/shoal/owner/enrolment/test_admission.py. A request names no mask mode, so none can be downgraded.
"""

import dataclasses

import pytest
from shoal_lab.loopback.transport import LoopbackBroker, LoopbackTransport

from aggregator import membership as aggregators
from crypto.seal.identity import Identity, fingerprint
from shoal import limits
from shoal.membership.enrol_requests import make_request, token_id
from shoal.owner.enrolment.admission import Registrar
from shoal.owner.enrolment.tokens import TokenStore
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol.chunking import HEADER, MAGIC, VERSION, ChunkKind, split
from shoal.protocol.topics import Topics
from shoal.transport.base import Message
from tests.helpers.receiving import RECEIVING

TOPICS = Topics("demo")


class Enrolment:
    """An owner who reads the enrolment topics, and one device with a valid request."""

    def __init__(self, root):
        self.owner = FleetDirectory.create(root / "owner", "demo", "mqtt://loopback")
        self.owner.add_aggregator(aggregators.init(root / "server").read_bytes())
        self.token = TokenStore(self.owner).issue(1, 600, 1000)[0]
        self.device = Identity.generate("dev-1")
        self.request = make_request(self.device, self.token, 1000, RECEIVING.public)

    def look(self, *payloads, chunks=None):
        """Return the registrar after it has seen the payloads in turn."""
        transport = LoopbackTransport(LoopbackBroker(), "owner", lambda _event: None)
        registrar = Registrar(self.owner, transport)
        registrar.start(1000)
        made = [c for p in payloads for c in split(p, kind=ChunkKind.ENROL, round=0)] if chunks is None else chunks
        for chunk in made:
            registrar.on_event(Message(TOPICS.enrol(token_id(self.token.secret)), chunk), 1000)
        return registrar

    def flipped(self):
        broken = bytearray(self.request)
        broken[len(broken) // 2] ^= 1
        return bytes(broken)

    def large(self):
        size = limits.MAX_TRANSFER_BYTES + 1
        return [HEADER.pack(MAGIC, VERSION, int(ChunkKind.ENROL), 0, 0, 0, 9, 0, size, bytes(16)) + bytes(1024)]


def elsewhere(enrolment):
    return make_request(enrolment.device, dataclasses.replace(enrolment.token, fleet="other"), 1000, RECEIVING.public)


def unproven(enrolment):
    return make_request(
        Identity.generate("dev-1"), dataclasses.replace(enrolment.token, secret=bytes(16)), 1000, RECEIVING.public
    )


ON_THE_DESK = {
    "forged": (lambda d: d.look(d.flipped()), "does not prove the token"),
    "truncated": (lambda d: d.look(d.request[:-9]), "message ends early"),
    "oversized": (lambda d: d.look(chunks=d.large()), "1073741825 bytes is not between"),
    "wrong fleet": (lambda d: d.look(elsewhere(d)), "of fleet 'other'"),
    "self-signed": (lambda d: d.look(unproven(d)), "does not prove the token"),
}


@pytest.mark.parametrize("kind", ON_THE_DESK)
def test_hostile_request_awaits_no_approval(tmp_path, kind):
    """Listed with its reason, and a valid request after it still waits for the owner."""
    enrolment = Enrolment(tmp_path)
    act, expected = ON_THE_DESK[kind]
    registrar = act(enrolment)
    (refused,) = registrar.refused.values()
    assert expected in refused.reason
    assert registrar.pending == {}
    assert enrolment.owner.roster.devices == ()
    (request,) = enrolment.look(enrolment.request).pending.values()
    assert request.name == "dev-1"


def test_replayed_request_adds_nobody(tmp_path):
    """Nor does another device that asks with the spent token."""
    enrolment = Enrolment(tmp_path)
    registrar = enrolment.look(enrolment.request)
    registrar.approve_all([fingerprint(enrolment.device.member)], 1000)
    roster = enrolment.owner.roster
    assert enrolment.look(enrolment.request, enrolment.request).pending == {}
    late = make_request(Identity.generate("dev-2"), enrolment.token, 1000, RECEIVING.public)
    (refused,) = enrolment.look(late).refused.values()
    assert "the line was used before" in refused.reason
    assert enrolment.owner.roster == roster


def test_overtaking_requests_are_one(tmp_path):
    """A device asked twice, and the older request arrives last: the owner sees one, and lets one device in."""
    enrolment = Enrolment(tmp_path)
    again = make_request(enrolment.device, enrolment.token, 1005, RECEIVING.public)
    registrar = enrolment.look(again, enrolment.request)
    (request,) = registrar.pending.values()
    registrar.approve_all([request.fingerprint], 1000)
    assert [d.name for d in enrolment.owner.roster.devices] == ["dev-1"]
