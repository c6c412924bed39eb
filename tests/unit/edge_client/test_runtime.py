"""One device on a transport: the messages it takes and refuses, a disk that fails, and how it closes."""

import pytest
from shoal_lab.loopback.transport import LoopbackTransport

from crypto.seal.envelope import open_from_group, open_from_member, read_head, seal_to_member
from crypto.seal.identity import Identity
from edge_client.protocol.presence import PRESENCE_AGAIN_S
from edge_client.protocol.session import ANNOUNCED_WITHIN_S
from edge_client.vitals import EVERY_S
from shoal.errors import ConfigError, DataError, StorageError
from shoal.protocol import channels
from shoal.protocol.chunking import split
from shoal.protocol.codec import decode, encode
from shoal.protocol.messages import Action, Control, Decline, DeclineReason, Presence, Vitals
from shoal.protocol.reassembly import Reassembler
from shoal.protocol.topics import TopicKind
from shoal.transport.base import Connected, Disconnected, Message
from tests.helpers.announced import TRAINING, announcement
from tests.helpers.chunks import forge
from tests.helpers.fleets import make_fleet
from tests.helpers.parties import TOPICS, Line, Parties, broadcast
from tests.helpers.sessions import IdleWorker, new_runtime

FULL = StorageError("can't write run.package: No space left on device", hint="free some space")
FORGED = "a sealed message was refused: the signature on this control is not its sender's"
CONNECTED = Connected(session_present=False)


class Place:
    """A device that follows no run yet, on a line that records."""

    def __init__(self, root, **settings):
        self.parties, self.line, self.worker = Parties(root, "dev-1", "dev-2"), Line(), IdleWorker()
        self.member = self.parties.members["dev-1"]
        self.runtime = new_runtime(self.member, self.line, self.worker, **settings)
        self.runtime.start()

    def hear(self, topic, chunk, now_s=0.0):
        self.runtime.on_event(Message(topic, chunk), now_s)

    def announce(self, now_s=0.0, **changes):
        plain = encode(announcement(roster_sequence=self.parties.owner.roster.sequence, **changes))
        self.hear(TOPICS.round, broadcast(self.parties, channels.ANNOUNCEMENT, plain), now_s)

    def declines(self):
        """Return (nonce, reason) of each decline that was sent."""
        found = []
        for topic, chunk, _ in self.line.sent:
            if topic == TOPICS.up("dev-1"):
                payload = Reassembler().add("x", chunk, 0.0).payload
                head, at = read_head(payload)
                key = self.member.identity.member.sign_key
                plain, _ = open_from_member(self.parties.server.identity, payload, head, at, key)
                note = decode(plain, Decline)
                found.append((note.nonce, note.reason))
        return found

    def disk_fails(self, monkeypatch):
        """Let every message but an announcement fail on the disk."""
        take = self.runtime._on_message

        def on_message(topic, payload):
            if topic != TOPICS.round:
                raise FULL
            take(topic, payload)

        monkeypatch.setattr(self.runtime, "_on_message", on_message)


@pytest.fixture
def place(tmp_path):
    return Place(tmp_path)


def reasons(caplog):
    return [str(r.kv["reason"]) for r in caplog.records if r.message == "refused"]


# ---------------------------------------------------------------------------------------------------------- messages


def test_device_listens_to_its_topics_alone(place):
    """A device listens to what is for all and to its own topics alone."""
    read = (TopicKind.ROSTER_CHANGE, TopicKind.PLAN, TopicKind.ROUND, TopicKind.NOTICE)
    own = {TOPICS.ctl("dev-1"), f"{TOPICS.keys('dev-1')}/#"}
    assert set(place.line.filters) == {TOPICS.filter(kind) for kind in read} | own
    assert place.line.sent == [], "nothing is published before the connection"


def test_connection_publishes_twice(place):
    """A connection publishes presence and receiving keys now and once more."""
    both = [TOPICS.state("dev-1"), TOPICS.receiving("dev-1")]
    place.runtime.on_event(CONNECTED, 10.0)
    assert place.line.take() == both
    place.runtime.tick(10.0 + PRESENCE_AGAIN_S)
    assert place.line.take() == both
    place.runtime.tick(99.0)
    assert place.line.take() == []


def told_vitals(place):
    """Return the vitals in each presence that was published since the last time."""
    member, found = place.member, []
    sent, place.line.sent = place.line.sent, []
    for topic, chunk, _ in sent:
        if topic == TOPICS.state("dev-1"):
            payload = Reassembler().add("x", chunk, 0.0).payload
            head, at = read_head(payload)
            plain = open_from_group(member.group, payload, head, at, member.identity.member.sign_key)
            found.append(decode(plain, Presence).vitals)
    return found


def test_vitals_while_connected(tmp_path, monkeypatch):
    uptimes = iter(range(9))
    monkeypatch.setattr("edge_client.runtime.measure", lambda _folder: Vitals(uptime_s=next(uptimes)))
    place = Place(tmp_path, vitals=True)
    runtime = place.runtime
    runtime.on_event(CONNECTED, 10.0)
    runtime.tick(10.0 + PRESENCE_AGAIN_S)
    runtime.tick(10.0 + EVERY_S)
    assert [v.uptime_s for v in told_vitals(place)] == [0, 1], "once more after a connection, and not yet again"
    runtime.tick(10.0 + PRESENCE_AGAIN_S + EVERY_S)
    assert [v.uptime_s for v in told_vitals(place)] == [2]
    runtime.on_event(Disconnected("gone"), 700.0)
    runtime.tick(700.0 + 9 * EVERY_S)
    assert told_vitals(place) == []
    runtime.on_event(CONNECTED, 700.0 + 9 * EVERY_S)
    assert [v.uptime_s for v in told_vitals(place)] == [3]


def test_without_option_no_vitals_are_told(place):
    place.runtime.on_event(CONNECTED, 10.0)
    assert told_vitals(place) == [None]


def control(device="dev-1", fleet="reef"):
    return encode(
        Control(
            fleet=fleet, device=device, action=Action.ACK, run=1, round=1, transfer=bytes(16), missing=(), reason=""
        )
    )


@pytest.mark.parametrize(
    ("channel", "plain", "changes", "reason"),
    [
        (channels.CONTROL, control(), {"signer": Identity.generate("aggregator")}, FORGED),
        (
            channels.CONTROL,
            control(),
            {"purpose": "announcement"},
            "a message of purpose 'announcement' on the channel 'control'",
        ),
        (channels.CONTROL, control("dev-2"), {}, "a control message for 'dev-2'"),
        (channels.CONTROL, control(fleet="atoll"), {}, "a control message for 'dev-1'"),
    ],
    ids=["signer", "purpose", "device", "fleet"],
)
def test_foreign_message_is_refused(place, caplog, channel, plain, changes, reason):
    """A message that is not for us is refused with its reason."""
    before = place.runtime.session.round
    place.hear(TOPICS.ctl("dev-1"), broadcast(place.parties, channel, plain, recipient="dev-1", **changes))
    assert reasons(caplog) == [reason]
    assert place.runtime.session.round is before


@pytest.mark.parametrize(
    ("chunk", "refused"), [(b"junk", 5), (forge(kind=200), 0)], ids=["junk", "an optional kind of a later version"]
)
def test_junk_raises_nothing(place, caplog, chunk, refused):
    """Junk on every topic is refused and raises nothing; an optional kind of a later version is skipped."""
    before = place.runtime.session.round
    for topic in (TOPICS.round, TOPICS.plan, TOPICS.roster_change, TOPICS.keys("dev-1"), TOPICS.ctl("dev-1")):
        place.hear(topic, chunk)
    assert len(reasons(caplog)) == refused
    assert place.runtime.session.round is before
    assert place.runtime.following is None


def test_cleared_message_is_ignored(place, caplog):
    """A cleared message is ignored and not logged; junk on no topic is refused."""
    place.hear(TOPICS.round, b"")
    place.runtime.on_event(Disconnected("gone"), 0.0)
    assert reasons(caplog) == []
    place.hear("no/topic", b"junk")
    assert len(reasons(caplog)) == 1


def test_revoked_device_sends_nothing(place):
    """A revoked device ignores all events and sends nothing."""
    place.parties.owner.revoke("dev-1")
    head = channels.REVOCATION.head("reef", "aggregator", "dev-1")
    key, signed = place.member.identity.member.seal_key, place.parties.owner.roster_bytes
    (chunk,) = split(
        seal_to_member(place.parties.server.identity, key, head, signed), kind=channels.REVOCATION.kind, round=0
    )
    place.hear(TOPICS.ctl("dev-1"), chunk)
    assert place.runtime.revoked
    assert place.worker.cancelled
    place.line.take()
    place.runtime.on_event(CONNECTED, 1.0)
    place.announce()
    place.runtime.tick(99.0)
    assert place.line.take() == []


@pytest.mark.parametrize(
    ("changes", "handled"),
    [({}, True), ({"nonce": b"o" * 16}, False), ({"round": 2}, False), ({"run": 2}, False)],
    ids=["this round", "another nonce", "another round", "another run"],
)
def test_result_of_another_round_is_dropped(place, changes, handled):
    """A newer round was announced while the job ran."""
    mark = place.runtime.session.round.mark
    fields = {"run": mark.run, "round": mark.round, "nonce": mark.nonce, **changes}
    place.runtime.on_result(announcement(**fields), TRAINING, DataError("the job failed"), {})
    assert place.declines() == ([(mark.nonce, DeclineReason.DATA)] if handled else [])


# -------------------------------------------------------------------------------------------------- a disk that fails


def test_failing_disk_declines_next_round(place, monkeypatch):
    """The aggregator then knows why the device is missing."""
    place.disk_fails(monkeypatch)
    place.hear(TOPICS.plan, b"x", 5.0)
    assert place.worker.cancelled == 1
    place.runtime.tick(5.0 + 0.9 * ANNOUNCED_WITHIN_S)
    assert place.declines() == []
    with pytest.raises(StorageError) as caught:
        place.announce(nonce=b"a" * 16)
    assert caught.value is FULL
    assert place.declines() == [(b"a" * 16, DeclineReason.DISK)]


def test_without_a_next_round_it_ends(place, monkeypatch):
    """After a while; a result that comes meanwhile is dropped."""
    place.disk_fails(monkeypatch)
    place.hear(TOPICS.plan, b"x", 5.0)
    mark = place.runtime.session.round.mark
    current = announcement(run=mark.run, round=mark.round, nonce=mark.nonce)
    place.runtime.on_result(current, TRAINING, DataError("x"), {})
    assert place.declines() == []
    with pytest.raises(StorageError) as caught:
        place.runtime.tick(5.0 + ANNOUNCED_WITHIN_S)
    assert caught.value is FULL


def test_closing_device_says_goodbye(place):
    """A device that closes stops its work says goodbye and disconnects."""
    place.runtime.close()
    assert (place.worker.closed, place.line.closed) == (True, True)
    assert place.line.take() == [TOPICS.state("dev-1")]


# ------------------------------------------------------------------------------------------------------------ the end


def test_taken_over_device_ends_well(tmp_path):
    """A device that was taken over ends without an error."""
    with make_fleet(tmp_path / "fleet") as fleet:
        fleet.run(100)
        device = fleet.devices["dev-01"]
        twin = LoopbackTransport(fleet.broker, fleet.client_id("dev-01"), lambda _event: None)
        twin.start()
        fleet.broker.pump()
        device.runtime.close()
        twin.close()


def test_goodbye_without_a_written_model(tmp_path, monkeypatch):
    """A device says goodbye even if its model can t be written."""
    with make_fleet(tmp_path / "fleet") as fleet:
        fleet.run_until(lambda: fleet.records(), 100)
        device = fleet.devices["dev-01"]

        def full(*_arguments, **_options):
            raise ConfigError("no space left")

        monkeypatch.setattr(device.runtime._files, "save_model", full)
        with pytest.raises(ConfigError, match="no space left"):
            device.runtime.close()
        assert fleet.client_id("dev-01") not in fleet.broker.connected()
        del fleet.devices["dev-01"]
