"""The table of channels: its rows are unique, its formulas are those of the code, and a fleet sends nothing else."""

import re

import pytest
from shoal_lab.loopback.transport import Hop

from aggregator import run_service
from crypto.seal.envelope import GROUP_MAGIC, MEMBER_MAGIC, read_head
from edge_client.learning.data import Dataset
from shoal import limits
from shoal.errors import WireError
from shoal.protocol import channels, sizes
from shoal.protocol.channels import CHANNELS, EVERYONE, Party, Seal, channel_at, read_by, written_by
from shoal.protocol.chunking import ChunkKind, parse
from shoal.protocol.messages import Sealed
from shoal.protocol.requests import RequestAction
from shoal.protocol.topics import TopicKind
from shoal.protocol.topics import parse as parse_topic
from tests.helpers.enrolments import Scene
from tests.helpers.fleets import Wiretap, grouped_data, make_fleet
from tests.helpers.plans import run_plan

ODD, OFF, LOSER = "dev-02", "dev-03", "dev-01"
MAGICS = {Seal.MEMBER: MEMBER_MAGIC, Seal.BROADCAST: GROUP_MAGIC}


def test_names_and_places_are_unique():
    assert len({c.name for c in CHANNELS}) == len({(c.topic, c.kind) for c in CHANNELS}) == len(CHANNELS)
    assert {c.topic for c in CHANNELS} == set(TopicKind)
    assert {c.kind for c in CHANNELS} == set(ChunkKind)


def test_transfer_without_channel_is_refused():
    assert channel_at(TopicKind.MODEL, ChunkKind.MEAN) is channels.MEAN
    with pytest.raises(WireError, match="kind plan on s/round"):
        channel_at(TopicKind.ROUND, ChunkKind.PLAN)


def test_all_of_a_topic_travels_alike():
    """The broker's access list and the subscriptions go by topic. The owner takes only the checkpoints among the models."""
    for topic in TopicKind:
        rows = [c for c in CHANNELS if c.topic is topic and c not in (channels.CHECKPOINT, channels.REFUSAL)]
        assert len({(c.sender, c.receivers, c.retained) for c in rows}) == 1
    assert (channels.CHECKPOINT.sender, channels.CHECKPOINT.retained) == (channels.MEAN.sender, channels.MEAN.retained)
    assert channels.CHECKPOINT.receivers == (Party.OWNER, *channels.MEAN.receivers)


def test_head_names_purpose_and_both_ends():
    assert channels.CONTROL.head("reef", "aggregator", "dev-1") == Sealed("reef", "control", "aggregator", "dev-1")
    assert channels.ROSTER.head("reef", "aggregator").recipient == EVERYONE
    parts = {"role": "device", "keys_since": 7, "receiving": 2}
    assert channels.GRANT.head("reef", "owner", "dev-1", **parts).purpose == "grant/device/7/2"
    assert [c.stem for c in (channels.GRANT, channels.OWNER_ROSTER, channels.RUN)] == ["grant", "roster", "run"]


def test_limit_is_within_the_channels():
    """A limit is never above the largest of the channel."""
    assert channels.CONTROL.limit() == {ChunkKind.CONTROL: limits.MAX_CONTROL_BYTES}
    assert channels.RUN.limit(7) == {ChunkKind.PLAN: 7}
    assert channels.RUN.limit(limits.MAX_TRANSFER_BYTES + 1) == {ChunkKind.PLAN: limits.MAX_TRANSFER_BYTES}


def test_topics_by_party():
    assert written_by(Party.DEVICE) == (TopicKind.UP, TopicKind.PART, TopicKind.STATE, TopicKind.RECEIVING)
    assert written_by(Party.NEWCOMER) == (TopicKind.ENROL,)
    assert read_by(Party.NEWCOMER) == (TopicKind.GRANT,)
    expected = (
        TopicKind.ROUND,
        TopicKind.MODEL,
        TopicKind.STATE,
        TopicKind.RECEIVING,
        TopicKind.ENROL,
        TopicKind.OWNER_ROSTER,
        TopicKind.OWNER_ANSWER,
    )
    assert read_by(Party.OWNER) == expected
    assert TopicKind.RECEIVING not in read_by(Party.AGGREGATOR)
    assert TopicKind.ENROL in written_by(Party.OWNER)  # to clear it


PLAN = run_plan()
VARIABLES = {"d": PLAN.length, "m": PLAN.max_models, "n": 100}
LISTED = VARIABLES["n"] + sizes.FLEET_GROWTH_DEVICES


@pytest.mark.parametrize(
    ("channel", "size"),
    [
        (channels.UPLOAD, sizes.upload_bytes(PLAN)),
        (channels.MEAN, sizes.mean_bytes(PLAN)),
        (channels.ANNOUNCEMENT, sizes.announcement_bytes(LISTED, PLAN.max_models)),
        (channels.REVOCATION, sizes.roster_bytes(LISTED)),
        (channels.ROSTER, sizes.roster_bytes(1)),
        (channels.RUN, limits.FIRST_PACKAGE_BYTES),
    ],
)
def test_formula_gives_the_computed_size(channel, size):
    """Read as on the page: ``66 (n + 8,192)`` is a product."""
    formula = channel.formula.split(", ")[0].split(" for each")[0].replace(",", "")
    assert eval(re.sub(r"(\d) ([(dmn])", r"\1 * \2", formula), {}, VARIABLES) == size


class Ledger:
    """Checks each message that travels against the table; ``seen`` are the channels of all."""

    def __init__(self, party_of):
        self.party_of = party_of
        self.seen = set()

    def take(self, passage):
        topic, party = parse_topic(passage.topic), self.party_of(passage.client)
        if not passage.payload:
            assert party in {
                p for c in CHANNELS if c.topic is topic.kind for p in (c.sender, c.cleared_by, *c.receivers)
            }
            return
        header, body = parse(passage.payload)
        channel = channel_at(topic.kind, header.kind)
        self.seen.add(channel)
        assert party is channel.sender if passage.hop is Hop.UP else party in channel.receivers
        assert header.size <= channel.largest
        if header.index == 0 and channel.seal in MAGICS and channel.kind is not ChunkKind.GRANT:
            assert bytes(body[:4]) == MAGICS[channel.seal]
            head, _ = read_head(bytes(body))
            assert head.purpose.partition("/")[0] == channel.stem
            assert (head.recipient == EVERYONE) is not bool(channel.recipients)
            if channel.recipients and channel.sender is Party.DEVICE:
                assert self.party_of(head.recipient) in channel.recipients


@pytest.mark.slow
def test_fleet_sends_only_what_table_lists(tmp_path, monkeypatch):
    """Enrolment, then a run with a lost upload, an unfit device and a revoked one: each channel is seen, from end to end."""
    tap = Wiretap()
    scene = Scene(tmp_path)
    scene.broker.faults = tap
    scene.enrol("dev-1")
    scene.ask(scene.token(), "dev-2")
    scene.sit().reject("dev-2")
    scene.broker.pump()
    scene.sit().publish_keys()
    parties = {"enrol": Party.NEWCOMER, "owner": Party.OWNER}
    enrolment = Ledger(lambda client: parties[client.split("-")[0]])
    for passage in tap.heard:
        enrolment.take(passage)
    seen = {channels.ENROLMENT, channels.GRANT, channels.REFUSAL, channels.OWNER_ROSTER, channels.KEYS}
    assert enrolment.seen == seen

    # Before the device whose upload is lost sends a reminder.
    monkeypatch.setattr(run_service, "ANNOUNCE_AGAIN_S", 0.5)
    tap = Wiretap()
    data = grouped_data(6)
    data[ODD] = Dataset(data[ODD].x[:, 1:].copy(), data[ODD].y)
    limits_ = {"rounds": 400, "quorum": 0.5, "deadline_s": 20.0}
    with make_fleet(tmp_path / "fleet", data, faults=tap, **limits_) as fleet:
        tap.lose(client=fleet.client_id(LOSER), ending="/up", times=1)
        fleet.run_until(lambda: fleet.closed() >= 1, 60)
        fleet.kill_device(OFF)
        fleet.stage.fleet.revoke(OFF)
        fleet.publish()
        closed = len(fleet.records())
        fleet.run_until(lambda: fleet.closed() >= closed + 2, 120)
        fleet.broker._sessions[fleet.client_id(OFF)].backlog.clear()
        fleet.revive_device(OFF)
        fleet.run_until(lambda: fleet.devices[OFF].runtime.revoked, 5)
        fleet.run_until(lambda: fleet.closed() >= 4, 60)
        clients = {
            fleet.client_id("aggregator"): Party.AGGREGATOR,
            "aggregator": Party.AGGREGATOR,
            "owner": Party.OWNER,
        }
        assert fleet.ask(RequestAction.LIST).answer is not None
        retained = {parse_topic(topic).kind for topic, payload in fleet.broker.retained.items() if payload}
    ledger = Ledger(lambda client: Party.OWNER if client.startswith("owner-") else clients.get(client, Party.DEVICE))
    for passage in tap.heard:
        ledger.take(passage)
    of_workers = {c for c in CHANNELS if Party.WORKER in (c.sender, *c.receivers)} - {channels.KEYS, channels.ROSTER}
    # Only a copy of the aggregator makes it speak of itself.
    assert set(CHANNELS) - of_workers - {channels.SERVER_STATE} == ledger.seen | enrolment.seen
    assert retained == {c.topic for c in ledger.seen if c.retained}
