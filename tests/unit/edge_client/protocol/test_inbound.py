"""The device's size limits: a chunk takes memory only on a subscribed topic, and within the limits of the run plan."""

import pytest

from edge_client.protocol.inbound import allowed
from shoal import limits
from shoal.membership.roster_changes import roster_change
from shoal.protocol import sizes
from shoal.protocol.chunking import MIN_CHUNK_BYTES, ChunkKind
from shoal.protocol.reassembly import cost_bytes
from shoal.protocol.topics import TopicKind, Topics, chunk_topic
from shoal.transport.base import Message
from tests.helpers.fleets import Wiretap, make_fleet
from tests.helpers.floods import MIB, claim, claims

TOPICS = Topics("demo")
NAME = "dev-01"
DEVICES = 3


@pytest.fixture
def fleet(tmp_path):
    """A fleet in round 1 that waits for one upload, and devices that have followed the run."""
    tap = Wiretap()
    with make_fleet(tmp_path / "fleet", faults=tap, rounds=2, quorum=1.0) as made:
        rule = tap.lose(client=made.client_id("dev-02"), ending="/up")
        made.run_until(lambda: tap.sent(client=made.client_id("dev-02"), ending="/up"), 5)
        made.settle()
        made.release = lambda: tap.forgive(rule)
        yield made


def flood(fleet, topic, chunks):
    """Pass chunks to a device without regard to its subscriptions, as a faulty broker can."""
    runtime = fleet.devices[NAME].runtime
    for chunk in chunks:
        runtime.on_event(Message(topic, chunk), fleet.now_s)
    return runtime._chunks.held_bytes


@pytest.mark.parametrize(
    "topic",
    [
        TOPICS.up(NAME),
        TOPICS.state(NAME),
        TOPICS.ctl("dev-02"),
        TOPICS.keys("dev-02"),
        TOPICS.enrol("abc"),
        TOPICS.grant("abc"),
        TOPICS.at(TopicKind.OWNER_ROSTER),
        TOPICS.roster,
        chunk_topic(TOPICS.model("0123456789abcdef"), 3),
    ],
)
def test_unsubscribed_topic_takes_nothing(fleet, topic):
    """A topic that the device has not subscribed to takes nothing."""
    assert flood(fleet, topic, claims()) == 0


def test_unfollowed_labels_take_nothing(fleet):
    """However many; a control message has a limit of its own."""
    small = claim(ChunkKind.MEAN, 2000, 1)
    too_large = claim(ChunkKind.CONTROL, limits.MAX_CONTROL_BYTES + 1, 1)
    for topic, chunk in [*((TOPICS.model(f"{n:016x}"), small) for n in range(300)), (TOPICS.ctl(NAME), too_large)]:
        assert flood(fleet, topic, [chunk]) == 0
    assert flood(fleet, TOPICS.ctl(NAME), [claim(ChunkKind.CONTROL, limits.MAX_CONTROL_BYTES, 1)]) > 0


@pytest.mark.parametrize(
    ("topic", "kind", "most"),
    [
        (TOPICS.ctl(NAME), ChunkKind.ROSTER, sizes.roster_bytes(DEVICES + sizes.FLEET_GROWTH_DEVICES)),
        (TOPICS.keys(NAME), ChunkKind.GRANT, limits.MAX_RENEWAL_BYTES),
        (TOPICS.plan, ChunkKind.PLAN, limits.FIRST_PACKAGE_BYTES),
        (TOPICS.roster_change, ChunkKind.ROSTER, limits.MAX_ROSTER_CHANGE_BYTES),
    ],
)
def test_each_topic_takes_one_transfer(fleet, topic, kind, most):
    """Each topic takes one transfer of its largest size at most."""
    assert flood(fleet, topic, [*claims(), claim(kind, most + 1, 1)]) <= 8 * (MIN_CHUNK_BYTES + 2048)
    whole = [claim(kind, most, n, index=i) for n in range(3) for i in range(most // MIN_CHUNK_BYTES - 1)]
    assert most < flood(fleet, topic, whole) <= cost_bytes(most)


def test_all_topics_take_below_32_mib(fleet):
    """The sum of the largest sizes, in the shortest chunks, and room to join the largest of them."""
    runtime = fleet.devices[NAME].runtime
    bases = (TOPICS.plan, TOPICS.round, TOPICS.roster_change, TOPICS.ctl(NAME), TOPICS.keys(NAME))
    bases += tuple(TOPICS.model(label) for label in runtime.session.labels)
    most = [max(allowed(TOPICS.parse(base), runtime.session, DEVICES).values()) for base in bases]
    assert sum(map(cost_bytes, most)) + max(most) < 32 * MIB


def test_run_goes_on_through_a_flood(fleet):
    """The run goes on through a flood of everything."""
    for base in (TOPICS.plan, TOPICS.round, TOPICS.roster_change, TOPICS.ctl(NAME)):
        assert flood(fleet, base, claims()) < MIB
    fleet.release()
    assert [r["contributed"] for r in fleet.run(60)] == [3, 3, 3]


@pytest.mark.parametrize("kind", [ChunkKind.MEAN, ChunkKind.CHECKPOINT], ids=["mean", "checkpoint"])
def test_unfollowed_chunks_are_released(fleet, kind):
    """Chunks of a model that is no longer followed are released."""
    runtime = fleet.devices[NAME].runtime
    for label in ("feed0", "feed1"):
        runtime._go_on(runtime.session._followed((label,)))
        assert flood(fleet, TOPICS.model(label), [claim(kind, 2000, 1)]) > 0
        runtime._go_on(runtime.session._followed(()))
        assert runtime._chunks.held_bytes == 0


def test_larger_package_is_fetched_later(tmp_path, monkeypatch, caplog):
    """A device that does not know the run can't tell how large its package is: the aggregator signs the size."""
    monkeypatch.setattr(limits, "FIRST_PACKAGE_BYTES", MIN_CHUNK_BYTES)
    with make_fleet(tmp_path / "fleet", rounds=2) as fleet:
        records = fleet.run(100)
        assert [r["contributed"] for r in records] == [3, 3, 3]
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_large_change_leaves_members_out(tmp_path, monkeypatch):
    """Devices then ask for the whole roster, whose size follows from the change."""
    monkeypatch.setattr(limits, "MAX_ROSTER_CHANGE_BYTES", limits.SEALED_HEAD_BYTES + 400)
    with make_fleet(tmp_path / "fleet", rounds=2, quorum=0.5) as fleet:
        fleet.run_until(lambda: fleet.records(), 30)
        for number in range(10):
            fleet.stage.add_device(f"new-{number}")
        whole = roster_change(None, fleet.stage.fleet.roster, fleet.stage.fleet.roster_bytes)
        assert whole.members == ()
        fleet.publish()
        fleet.run_until(
            lambda: all(
                device.runtime._membership.roster_bytes == fleet.stage.fleet.roster_bytes
                for device in fleet.devices.values()
            ),
            60,
        )
        assert sizes.roster_bytes(13) >= len(fleet.stage.fleet.roster_bytes)
