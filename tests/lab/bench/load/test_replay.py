"""The replaying process: every prepared upload once as soon as its round is announced, and again if rounds stall."""

import pytest
from shoal_lab.bench.load import replay as load_replay
from shoal_lab.bench.load.replay import (
    COORDINATOR,
    PRESENCES_FILE,
    Item,
    Replay,
    ReplaySpec,
    _round_file,
    read_items,
    write_item,
)

from aggregator import membership as aggregators
from crypto.seal.envelope import seal_to_group
from crypto.seal.identity import Identity
from edge_client import membership as enrolment
from shoal import limits
from shoal.membership.directory import KEY_FILE
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol import channels
from shoal.protocol.chunking import ChunkKind, parse, split
from shoal.protocol.codec import encode
from shoal.protocol.messages import Action, Control
from shoal.protocol.topics import Topics
from shoal.transport.base import Connected, Message


def test_prepared_messages_are_read_back_from_their_file(tmp_path):
    items = [Item(f"dev-{n}", bytes([n]) * 16, b"x" * 1000 * n, n) for n in range(4)]
    with (tmp_path / "round").open("wb") as file:
        for item in items:
            write_item(file, item)
    assert list(read_items(tmp_path / "round")) == items


TOPICS = Topics("load")
DEVICES = ("dev-a", "dev-b")
LONG = 3 * limits.CHUNK_BYTES


class Recorder:
    """A transport that records publishes."""

    chunk_bytes = limits.CHUNK_BYTES

    def __init__(self, *_arguments, **_options):
        self.sent = []

    def publish(self, topic, payload, *, retain=False, qos=1):
        self.sent.append((topic, parse(payload)[0], retain, qos))

    def pending(self):
        return 0


@pytest.fixture
def fleet(tmp_path):
    made = FleetDirectory.create(tmp_path / "owner", "load", "mqtt://127.0.0.1:1")
    grant = made.add_aggregator(aggregators.init(tmp_path / "server").read_bytes())
    aggregators.join(tmp_path / "server", grant.read_bytes(), made.fingerprint)
    grant = made.add_device(enrolment.init(tmp_path / "dev-a", "dev-a").read_bytes())
    enrolment.join(tmp_path / "dev-a", grant.read_bytes(), made.fingerprint)
    return made


@pytest.fixture
def replay(fleet, tmp_path, monkeypatch):
    """A replay of two devices and two rounds, in the second of which each upload takes three chunks."""
    monkeypatch.setattr(load_replay, "MqttTransport", Recorder)
    folder = tmp_path / "prepared"
    folder.mkdir()
    for name, size in ((PRESENCES_FILE, 10), (_round_file(1), 100), (_round_file(2), LONG)):
        with (folder / name).open("wb") as file:
            for number, device in enumerate(DEVICES):
                write_item(file, Item(device, bytes([number + 1]) * 16, bytes(size)))
    return Replay(ReplaySpec(joined=str(tmp_path / "dev-a"), prepared=str(folder), devices=2, report="r"))


def announcement(round_, *, index=0, total=1):
    """Return the event of one chunk of an announcement."""
    size = limits.CHUNK_BYTES * (total - 1) + 5
    chunk = split(bytes(size), kind=ChunkKind.ROUND, round=round_)[index]
    return Message(TOPICS.round, chunk)


def answer(fleet, tmp_path, device, action, round_=1):
    """Return the event of the aggregator's answer to a device."""
    server = Identity.load(tmp_path / "server" / KEY_FILE)
    control = Control(
        fleet="load", device=device, action=action, run=1, round=round_, transfer=bytes(16), missing=(), reason=""
    )
    head = channels.CONTROL.head("load", server.name, device)
    (chunk,) = split(
        seal_to_group(server, fleet.broadcast, head, encode(control)), kind=ChunkKind.CONTROL, round=round_
    )
    return Message(TOPICS.ctl(device), chunk)


def sent(replay):
    found, replay._transport.sent[:] = list(replay._transport.sent), []
    return found


def test_presences_are_retained_at_each_connection(replay):
    for _ in range(2):
        replay._take(Connected(session_present=False))
        found = sent(replay)
        assert [(topic, head.kind, retain, qos) for topic, head, retain, qos in found] == [
            (TOPICS.state(device), ChunkKind.STATE, True, 1) for device in DEVICES
        ]


def test_uploads_follow_the_last_chunk_of_their_rounds_announcement_once(replay):
    replay._take(announcement(1, index=0, total=2))
    assert sent(replay) == []
    replay._take(announcement(1, index=1, total=2))
    found = sent(replay)
    assert [(topic, head.round, head.transfer_id) for topic, head, _, _ in found] == [
        (TOPICS.up("dev-a"), 1, b"\1" * 16),
        (TOPICS.up("dev-b"), 1, b"\2" * 16),
    ]
    replay._take(announcement(1))
    assert sent(replay) == [], "announced again after a reconnection"
    replay._take(announcement(2))
    assert [head.round for _, head, _, _ in sent(replay)] == [2] * 6
    assert replay.report().uploads == 4


def test_a_round_that_the_broker_takes_at_once_is_sent_at_qos_0_and_a_larger_one_is_not(replay, monkeypatch):
    """At QoS 0 the broker drops what is above its receive maximum."""
    monkeypatch.setattr(limits, "RECEIVE_MAXIMUM", 5)
    replay._take(announcement(1))
    assert {qos for *_, qos in sent(replay)} == {0}
    replay._take(announcement(2))
    assert {qos for *_, qos in sent(replay)} == {1}


def test_parts_go_to_the_topics_of_their_workers_and_count_as_one_upload(replay, fleet, tmp_path):
    with (tmp_path / "prepared" / _round_file(1)).open("wb") as file:
        for receiver in (COORDINATOR, 0, 1):
            write_item(file, Item("dev-a", bytes([receiver & 0xFF]) * 16, bytes(10), receiver))
    replay._take(announcement(1))
    assert [(topic, head.kind) for topic, head, _, _ in sent(replay)] == [
        (TOPICS.up("dev-a"), ChunkKind.UPLOAD),
        (TOPICS.part("dev-a", 0), ChunkKind.PART),
        (TOPICS.part("dev-a", 1), ChunkKind.PART),
    ]
    replay._take(answer(fleet, tmp_path, "dev-a", Action.ACK))
    assert replay._publish_round(1, again=True) == 0
    assert replay.report().uploads == 1
    assert sent(replay) == []


def test_only_uploads_without_an_answer_are_sent_again(replay, fleet, tmp_path):
    replay._take(announcement(1))
    sent(replay)
    replay._take(answer(fleet, tmp_path, "dev-a", Action.ACK))
    replay._take(answer(fleet, tmp_path, "dev-b", Action.ACK, round_=2))
    assert replay._publish_round(1, again=True) == 1
    assert [(topic, qos) for topic, _, _, qos in sent(replay)] == [(TOPICS.up("dev-b"), 1)]


def test_the_report_counts_requests_for_missing_chunks(replay, fleet, tmp_path):
    for device, action in (("dev-a", Action.ACK), ("dev-b", Action.NACK), ("dev-a", Action.NACK)):
        replay._take(answer(fleet, tmp_path, device, action))
    report = replay.report()
    assert (report.uploads, report.nacks, report.reminders) == (0, 2, 0)


def test_cleared_topics_and_other_events_are_passed_over(replay):
    replay._take(None)
    replay._take(Message(TOPICS.round, b""))
    assert sent(replay) == []
    assert replay._heard_s == 0.0
