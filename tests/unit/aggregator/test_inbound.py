"""The aggregator's limits: no chunk takes memory unless its sender is in the roster and its size can be."""

import dataclasses
from types import SimpleNamespace

import pytest

from shoal import limits
from shoal.errors import UntrustedError
from shoal.protocol import sizes
from shoal.protocol.chunking import MIN_CHUNK_BYTES, ChunkKind, split
from shoal.protocol.reassembly import TooLargeError
from shoal.protocol.topics import TopicKind, Topics, chunk_topic
from shoal.transport.base import Message
from tests.helpers.fleets import Wiretap, make_fleet, open_upload, seal_upload, uploads_of
from tests.helpers.floods import MIB, claim, claims

TOPICS = Topics("demo")
D = 28
VICTIM = "dev-02"


@pytest.fixture
def waiting(tmp_path):
    """A fleet in round 1 that waits for the victim's upload, which is withheld."""
    tap = Wiretap()
    with make_fleet(tmp_path / "fleet", faults=tap, rounds=1, quorum=1.0) as fleet:
        rule = tap.lose(client=fleet.client_id(VICTIM), ending="/up")
        fleet.run_until(lambda: uploads_of(fleet, tap, VICTIM), 5)
        fleet.settle()
        yield SimpleNamespace(fleet=fleet, tap=tap, rule=rule, service=fleet.service)


def most_of(plan):
    """Return the largest upload of a run: update, margins, and a statement about two states of each model."""
    statement = sizes.STATEMENT_BYTES + sizes.STATE_BYTES * 2 * (plan.max_models + 1)
    return limits.SEALED_HEAD_BYTES + 4 * D + 8 * plan.max_models + statement


def held(service):
    return service._inbound.chunks.held_bytes + service._mail._chunks.held_bytes


def flood(waiting, topic, chunks):
    for chunk in chunks:
        waiting.fleet.broker.submit("stranger", Message(topic, chunk), lambda: None)
    waiting.fleet.broker.pump()


@pytest.mark.slow
def test_unlisted_name_takes_nothing(waiting):
    """Whatever it sends: every kind, sizes it makes up, and an upload that is well formed."""
    good = split(bytes(3000), kind=ChunkKind.UPLOAD, round=1, chunk_bytes=MIN_CHUNK_BYTES)
    for number in range(50):
        for topic in (TOPICS.up(f"ghost-{number}"), TOPICS.state(f"ghost-{number}")):
            flood(waiting, topic, claims() + good)
    assert held(waiting.service) == 0
    listed = {device.sign_key for device in waiting.service._membership.roster.devices}
    assert waiting.service._presences._births.keys() <= listed


def test_unread_topic_takes_nothing(waiting):
    """A topic that the aggregator does not read takes nothing."""
    others = [TOPICS.round, TOPICS.plan, TOPICS.ctl(VICTIM), TOPICS.enrol("abc"), TOPICS.model("abc")]
    for topic in (*others, chunk_topic(TOPICS.keys(VICTIM), 0)):
        for chunk in claims():
            waiting.service.on_event(Message(topic, chunk), 1.0)
    assert held(waiting.service) == 0


def test_topic_takes_its_budget_at_most(waiting):
    """Under a name of the roster on an open broker: any size, any number of transfers."""
    plan, service = waiting.fleet.plan, waiting.service
    most = most_of(plan)
    assert service._inbound.upload_bytes(VICTIM, service.state) == most
    for number in range(300):
        flood(waiting, TOPICS.up(VICTIM), [claim(ChunkKind.UPLOAD, most, number, round_=number)])
    flood(waiting, TOPICS.up(VICTIM), claims())
    flood(waiting, TOPICS.state(VICTIM), claims())
    assert 0 < held(service) <= service._inbound.chunks.budget_bytes(most)


def test_true_upload_arrives_once_flood_ends(waiting):
    """Chunks under the device's name, with the ids of its own upload among them: they delay it and change nothing."""
    fleet, service = waiting.fleet, waiting.service
    (sealed,) = uploads_of(fleet, waiting.tap, VICTIM)[:1]
    true_id = split(sealed, kind=ChunkKind.UPLOAD, round=1)[0][36:52]
    size = len(sealed)
    fakes = [claim(ChunkKind.UPLOAD, n, int.from_bytes(true_id, "little")) for n in (size + 1000, size + 1001)]
    flood(waiting, TOPICS.up(VICTIM), [claim(ChunkKind.UPLOAD, 2100, n) for n in range(20)] + fakes)
    waiting.tap.forgive(waiting.rule)
    assert [r["contributed"] for r in fleet.run(60)] == [3, 3]
    assert held(service) <= service._inbound.chunks.budget_bytes(most_of(fleet.plan))


def test_too_large_upload_is_refused_at_once(waiting, caplog):
    """An upload above the plans size is refused at its first chunk."""
    fleet = waiting.fleet
    upload, body = open_upload(fleet, VICTIM, uploads_of(fleet, waiting.tap, VICTIM)[0])
    big = seal_upload(fleet, VICTIM, dataclasses.replace(upload, attached=4000), body + bytes(4000))
    before = dict(waiting.service._inbound.chunks.refused).get("oversized", 0)
    flood(waiting, TOPICS.up(VICTIM), split(big, kind=ChunkKind.UPLOAD, round=1, chunk_bytes=MIN_CHUNK_BYTES)[:1])
    assert waiting.service._inbound.chunks.refused["oversized"] == before + 1
    assert held(waiting.service) == 0


def test_owners_topics_are_bounded(waiting):
    """The owners topics are bounded and only the aggregators own."""
    mail = waiting.service._mail
    for chunk in claims((ChunkKind.ROSTER, ChunkKind.GRANT), sizes=(limits.MAX_GRANT_BYTES, 900 * MIB)):
        for topic in (chunk_topic(TOPICS.at(TopicKind.OWNER_ROSTER), 0), TOPICS.keys("aggregator")):
            waiting.service.on_event(Message(topic, chunk), 1.0)
    assert held(waiting.service) <= 5 * (MIN_CHUNK_BYTES + 2048)
    with pytest.raises(UntrustedError, match="has not subscribed"):
        mail.take(TOPICS.keys(VICTIM), claims()[0], 1.0)
    with pytest.raises(TooLargeError):
        mail.take(TOPICS.keys("aggregator"), claim(ChunkKind.GRANT, limits.MAX_RENEWAL_BYTES + 1, 1), 1.0)


def test_a_revoked_device_holds_nothing(waiting):
    service = waiting.service
    flood(waiting, TOPICS.up(VICTIM), [claim(ChunkKind.UPLOAD, 2100, 1)])
    assert held(service) > 0
    waiting.fleet.stage.fleet.revoke(VICTIM)
    waiting.fleet.publish()
    waiting.fleet.settle()
    assert held(service) == 0
