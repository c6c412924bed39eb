"""One run on a transport: what is durable before it is published, events during a commit, deadlines, and refusals."""

from types import SimpleNamespace

import pytest

from aggregator.rounds.state import DeadlinePassed
from aggregator.run_service import LOOK_S
from edge_client.protocol.presence import presence
from shoal.protocol.topics import TopicKind
from shoal.transport.base import Connected, Disconnected, Message
from tests.helpers.chunks import forge
from tests.helpers.parties import TOPICS, owners_roster
from tests.unit.aggregator.service_scene import DEADLINE_S, Scene


@pytest.fixture
def fresh(tmp_path):
    """A run whose devices are not here yet."""
    made = Scene(tmp_path)
    yield made
    made.service.close()


@pytest.fixture
def scene(fresh):
    """A run whose first round is open."""
    fresh.come("dev-1", "dev-2")
    return fresh


def reasons(caplog):
    return [str(r.kv["reason"]) for r in caplog.records if r.message == "refused"]


def test_new_run_waits_for_its_devices(fresh):
    """A new run is published; its round opens when all are here, and is durable before it is announced."""
    assert f"{TOPICS.at(TopicKind.OWNER_ROSTER)}/#" in fresh.line.filters
    assert {"shoal/v1/reef/d/+/up", "shoal/v1/reef/d/+/state"} <= set(fresh.line.filters)
    topics = fresh.line.take()
    assert topics[-1] == TOPICS.plan
    assert TOPICS.roster in topics
    assert fresh.state.plan is None
    assert fresh.service.status() == "gathering: 0 of 2 devices are here, waiting for dev-1, dev-2"
    fresh.come("dev-1")
    assert fresh.order == []
    fresh.come("dev-2")
    assert (fresh.order, fresh.state.round) == (["snapshot", "announce"], 1)


def test_after_a_complete_round_no_disk_wait(scene):
    """Devices work meanwhile; the uploads from which the closed round follows are durable."""
    scene.order.clear()
    scene.upload("dev-1", "dev-2")
    assert scene.order == ["announce", "snapshot"]
    assert [r["round"] for r in scene.records()] == [1]


def test_after_a_missing_device_disk_first(scene):
    """After a restart the deadline would close that round with other uploads."""
    scene.upload("dev-1")
    scene.order.clear()
    scene.service.tick(DEADLINE_S)
    assert (scene.state.round, scene.order) == (2, ["snapshot", "announce"])
    assert scene.records()[0]["missing"] == ["dev-2"]


def test_deadline_counts_from_the_opening(fresh):
    """The deadline counts from the opening of the round and passes once."""
    fresh.now_s = 5.0
    fresh.come("dev-1", "dev-2")
    fed = []
    feed = fresh.service.feed
    fresh.service.feed = lambda event: (fed.append(event), feed(event))
    for now_s in (DEADLINE_S, 4.9 + DEADLINE_S, 5.0 + DEADLINE_S, 6.0 + DEADLINE_S):
        fresh.service.tick(now_s)
    assert fed == [DeadlinePassed(1)]
    assert fresh.state.deadline_passed


def test_record_has_its_rounds_cost_alone(fresh):
    """The record has the seconds and the bytes of its round alone."""
    fresh.now_s = 2.0
    fresh.come("dev-1", "dev-2")
    for now_s in (7.0, 8.5):
        fresh.now_s = now_s
        fresh.upload("dev-1", "dev-2", commit=False)
        fresh.service.at(now_s)
        fresh.disk.done()
    first, second = fresh.records()
    assert (first["seconds"], second["seconds"]) == (5.0, 1.5)
    assert 0 < second["bytes_up"] < 1.5 * first["bytes_up"] < 10_000


def test_event_closes_nothing_in_a_commit(scene):
    """The deadline passes between the write and the sync: the upload still counts in its round."""
    scene.upload("dev-1", commit=False)
    assert scene.service.uploads.committing
    scene.service.tick(DEADLINE_S)
    assert not scene.state.deadline_passed
    scene.disk.done()
    assert (scene.records()[0]["contributed"], scene.state.round) == (1, 2)


def test_events_keep_their_order(scene):
    """Events that waited for a commit keep their order."""
    scene.upload("dev-1", commit=False)
    topic, chunk = presence(scene.parties.members["dev-2"], 1, online=False)
    scene.service.on_event(Message(topic, chunk), 1.0)
    scene.come("dev-2")
    assert scene.state.awaited == 2
    scene.disk.done()
    assert (scene.state.awaited, scene.state.present) == (1, ("dev-1", "dev-2"))


def test_refused_message_is_logged(scene, caplog):
    """A refused message is logged with its reason and changes nothing."""
    before = scene.state
    for topic in (
        TOPICS.up("stranger"),
        TOPICS.state("dev-1"),
        TOPICS.up("dev-1"),
        TOPICS.at(TopicKind.OWNER_ROSTER),
        "other/topic",
    ):
        scene.service.on_event(Message(topic, b"junk"), 1.0)
    scene.service.on_event(Message(TOPICS.state("stranger"), b""), 1.0)
    assert scene.state is before
    assert len(reasons(caplog)) == 5, "an empty one is not logged"
    assert reasons(caplog)[0] == "stranger is not in the roster"


def test_later_kind_is_skipped(scene, caplog):
    """An optional kind of a later version is skipped."""
    before = scene.state
    for topic in (TOPICS.state("dev-1"), TOPICS.up("dev-1"), TOPICS.at(TopicKind.OWNER_ROSTER)):
        scene.service.on_event(Message(topic, forge(kind=200)), 1.0)
    assert (reasons(caplog), scene.state is before) == ([], True)


def test_retained_again_after_a_loss_only(fresh):
    """Retained messages are published again only after a lost connection."""
    fresh.line.take()
    fresh.service.on_event(Connected(session_present=False), 1.0)
    assert fresh.line.take() == []
    fresh.service.on_event(Disconnected("gone"), 2.0)
    fresh.service.on_event(Connected(session_present=True), 3.0)
    again = fresh.line.take()
    assert TOPICS.plan in again
    assert TOPICS.roster in again
    fresh.service.on_event(Connected(session_present=True), 4.0)
    assert fresh.line.take() == []


def test_unchanged_roster_is_not_published(fresh):
    """A roster that changes nothing is not published again."""
    fresh.line.take()
    fresh.service.reload_roster()
    fresh.service.on_event(Message(TOPICS.at(TopicKind.OWNER_ROSTER), owners_roster(fresh.parties)), 1.0)
    assert fresh.line.take() == []


def test_stalled_transfers_at_intervals(fresh):
    """Stalled transfers are looked for at intervals not on every tick."""
    seen = []
    fresh.service.uploads.tick = seen.append
    for now_s in (0.0, LOOK_S / 2, LOOK_S, 1.5 * LOOK_S, 2.5 * LOOK_S):
        fresh.service.tick(now_s)
    assert seen == [0.0, LOOK_S, 2.5 * LOOK_S]


def test_restart_resumes_durable_uploads(scene):
    """A restart resumes the open round with the uploads that are durable."""
    scene.upload("dev-1")
    plan = scene.state.plan
    scene.service.close()
    scene.service = scene.make()
    scene.service.start(100.0)
    assert (scene.state.plan, set(scene.state.received)) == (plan, {"dev-1"})
    assert scene.state.present == ("dev-1", "dev-2"), "those that were available, until their wills say otherwise"


def test_finished_run_is_answered_for(fresh):
    """It holds no state of its strategy, and publishes no run package, which would send devices back to it."""
    fresh.finish()
    assert fresh.state.strategy is None
    assert fresh.records()[-1]["final"]
    fresh.service.tick(1e9)
    assert fresh.records()[-1]["round"] == 4
    fresh.service.close()
    fresh.line.take()
    fresh.service = fresh.make()
    fresh.service.start(0.0)
    assert fresh.service.finished
    assert not [t for t in fresh.line.take() if t.startswith((TOPICS.plan, TOPICS.round))]
    assert set(fresh.state.received) == {"dev-1", "dev-2"}


def test_unknown_action_is_our_error(fresh):
    """An action that the service does not know is an error of ours."""
    with pytest.raises(AssertionError):
        fresh.service._carry_out((SimpleNamespace(),))
