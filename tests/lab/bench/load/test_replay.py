"""The replaying process: every prepared upload once as soon as its round is announced, and again if rounds stall."""

import types
from contextlib import nullcontext

import pytest
from shoal_lab.bench.load import replay as load_replay
from shoal_lab.bench.load.replay import (
    COORDINATOR,
    PRESENCES_FILE,
    Item,
    Replay,
    _round_file,
    read_items,
    write_items,
)

from crypto.seal.envelope import seal_to_group
from crypto.seal.identity import Identity
from shoal import limits
from shoal.membership.directory import KEY_FILE
from shoal.protocol import channels
from shoal.protocol.chunking import ChunkKind, parse, split
from shoal.protocol.codec import encode
from shoal.protocol.messages import Action, Control
from shoal.protocol.topics import Topics
from shoal.simulation.process_fleet import Stage
from shoal.transport.base import Connected, Message

TOPICS = Topics("load")
DEVICES = ("dev-a", "dev-b")
LONG = 3 * limits.CHUNK_BYTES


class Recorder:
    """A transport that records publishes."""

    chunk_bytes = limits.CHUNK_BYTES

    def __init__(self, *_arguments, **_options):
        self.sent = []

    together = staticmethod(nullcontext)

    def publish(self, topic, payload, *, retain=False, qos=1):
        self.sent.append((topic, parse(bytes(payload))[0], retain, qos))

    def pending(self):
        return 0


class Place:
    """A replay of two devices and two rounds, in the second of which each upload takes three chunks."""

    def __init__(self, root):
        self.root = root
        self.stage = Stage(root, "mqtt://127.0.0.1:1", ("dev-a",), "load")
        (root / "prepared").mkdir()
        for name, size in ((PRESENCES_FILE, 10), (_round_file(1), 100), (_round_file(2), LONG)):
            self.write(name, *(Item(device, device[-1:].encode() * 16, bytes(size)) for device in DEVICES))
        joined, prepared = str(self.stage.device_dir("dev-a")), str(root / "prepared")
        self.replay = Replay(types.SimpleNamespace(joined=joined, prepared=prepared, devices=2))

    def write(self, name, *items):
        write_items(self.root / "prepared" / name, items)

    def announce(self, round_, *, index=0, total=1):
        """Hand over one chunk of an announcement."""
        size = limits.CHUNK_BYTES * (total - 1) + 5
        self.replay._take(Message(TOPICS.round, split(bytes(size), kind=ChunkKind.ROUND, round=round_)[index]))

    def answer(self, device, action, round_=1):
        """Hand over the aggregator's answer to a device."""
        server = Identity.load(self.stage.aggregator_dir / KEY_FILE)
        control = Control(
            fleet="load", device=device, action=action, run=1, round=round_, transfer=bytes(16), missing=(), reason=""
        )
        head = channels.CONTROL.head("load", server.name, device)
        sealed = seal_to_group(server, self.stage.fleet.broadcast, head, encode(control))
        self.replay._take(Message(TOPICS.ctl(device), *split(sealed, kind=ChunkKind.CONTROL, round=round_)))

    def sent(self):
        found, self.replay._transport.sent = self.replay._transport.sent, []
        return found


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.setattr(load_replay, "MqttTransport", Recorder)
    return Place(tmp_path)


def test_items_are_read_back_from_their_file(tmp_path):
    items = [Item(f"dev-{n}", bytes([n]) * 16, b"x" * 1000 * n, n) for n in range(4)]
    write_items(tmp_path / "round", items)
    assert list(read_items(tmp_path / "round")) == items


def test_each_connection_retains_presences(place):
    place.replay._take(None)
    for _ in range(2):
        place.replay._take(Connected(session_present=False))
        assert [(topic, head.kind, retain, qos) for topic, head, retain, qos in place.sent()] == [
            (TOPICS.state(device), ChunkKind.STATE, True, 1) for device in DEVICES
        ]


def test_uploads_follow_an_announcement_once(place, monkeypatch):
    """At QoS 0 where the broker takes a round at once, since it drops what is above its receive maximum."""
    monkeypatch.setattr(limits, "RECEIVE_MAXIMUM", 5)
    place.announce(1, index=0, total=2)
    assert place.sent() == []
    place.announce(1, index=1, total=2)
    assert [(topic, head.round, head.transfer_id, qos) for topic, head, _, qos in place.sent()] == [
        (TOPICS.up(device), 1, device[-1:].encode() * 16, 0) for device in DEVICES
    ]
    place.announce(1)
    assert place.sent() == [], "announced again after a reconnection"
    place.announce(2)
    assert [(head.round, qos) for _, head, _, qos in place.sent()] == [(2, 1)] * 6
    assert place.replay.report()["uploads"] == 4


def test_unanswered_uploads_are_sent_again(place):
    """The report counts requests for missing chunks."""
    place.announce(1)
    place.sent()
    place.answer("dev-a", Action.ACK)
    place.answer("dev-b", Action.NACK, round_=2)
    assert place.replay._publish_round(1, again=True) == 1
    assert [(topic, qos) for topic, _, _, qos in place.sent()] == [(TOPICS.up("dev-b"), 1)]
    assert place.replay.report()["nacks"] == 1


def test_parts_go_to_their_workers(place):
    """And count as one upload."""
    items = [Item("dev-a", bytes([receiver & 0xFF]) * 16, bytes(10), receiver) for receiver in (COORDINATOR, 0, 1)]
    place.write(_round_file(1), *items)
    place.announce(1)
    assert [(topic, head.kind) for topic, head, _, _ in place.sent()] == [
        (TOPICS.up("dev-a"), ChunkKind.UPLOAD),
        (TOPICS.part("dev-a", 0), ChunkKind.PART),
        (TOPICS.part("dev-a", 1), ChunkKind.PART),
    ]
    place.answer("dev-a", Action.ACK)
    assert place.replay._publish_round(1, again=True) == 0
    assert (place.replay.report()["uploads"], place.sent()) == (1, [])
