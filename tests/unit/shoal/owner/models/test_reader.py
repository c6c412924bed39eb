"""`ModelReader` on a loopback fleet: what it subscribes to, and messages that it must not trust."""

import pytest

from crypto.seal.identity import Identity
from shoal.errors import NotReadyError, ShoalError, UntrustedError
from shoal.owner.keys.run_list import signed_plans
from shoal.owner.models.reader import ModelReader
from shoal.protocol.chunking import ChunkKind
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport.base import Message
from tests.helpers.chunks import forge
from tests.helpers.fleets import make_fleet, tell
from tests.helpers.owner_models import reader_of


class Asked:
    """A transport that records subscriptions."""

    def __init__(self):
        self.filters = []

    def subscribe(self, topic_filter):
        self.filters.append(topic_filter)

    def unsubscribe(self, topic_filter):
        self.filters.remove(topic_filter)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    """A fleet whose run under round keys has finished."""
    with make_fleet(tmp_path_factory.mktemp("reader") / "fleet", mode="rotation") as made:
        made.run(20)
        yield made


def retained(fleet):
    """Return the announcements and checkpoints on the broker, in that order, as messages."""
    topics = Topics(fleet.plan.fleet)
    found = [Message(topic, data, retained=True) for topic, data in fleet.broker.retained.items()]
    found = [m for m in found if m.topic == topics.round or m.topic.startswith(topics.model("x")[:-1])]
    return sorted(found, key=lambda m: m.topic != topics.round)


def asking(fleet, run=0):
    owner = fleet.stage.fleet
    transport = Asked()
    reader = ModelReader(owner, signed_plans(owner, lambda _: None), transport, run)
    reader.start()
    return reader, transport


def test_asks_for_the_announced_run_only(fleet):
    """It asks for the checkpoints of the announced run only."""
    reader, transport = asking(fleet)
    assert transport.filters == [Topics("demo").filter(TopicKind.STATE), f"{Topics('demo').round}/#"]
    assert not reader.complete
    announcement, *models = retained(fleet)
    reader.on_event(announcement, 0.0)
    (ref,) = reader.last.wanted().values()
    labels = [ref.label, *(spare.label for spare in reader.last.spares())]
    assert sorted(transport.filters[2:]) == sorted(f"{Topics('demo').model(label)}/#" for label in labels)
    assert len(labels) == 3
    assert reader.progress == (0, 1)
    for message in models:
        reader.on_event(message, 0.0)
    assert reader.complete
    assert reader.progress == (1, 1)
    assert len(reader.finished_run().models) == 1


def test_later_kind_is_no_error(fleet):
    """Without an announcement nothing is ready; an optional kind of a later version does not take the place of an error."""
    reader, _ = asking(fleet)
    with pytest.raises(NotReadyError, match="no round is announced at the broker"):
        reader.finished_run()
    for kind in (99, 200):
        reader.on_event(Message(Topics("demo").round, forge(kind=kind)), 0.0)
    with pytest.raises(ShoalError, match="chunk kind 99 is not known"):
        reader.finished_run()


@pytest.mark.parametrize("run", [None, 2])
def test_list_fetches_no_checkpoint(fleet, run):
    """No checkpoint is fetched for a list or another run."""
    reader, transport = asking(fleet, run)
    reader.on_event(retained(fleet)[0], 0.0)
    assert len(transport.filters) == 2
    assert reader.complete


def test_torn_checkpoint_is_the_reason(fleet):
    """A torn checkpoint is the reason why its model is missing."""
    reader, _ = asking(fleet)
    announcement, *models = retained(fleet)
    reader.on_event(announcement, 0.0)
    wanted = Topics("demo").model(next(iter(reader.last.wanted().values())).label)
    (message,) = [m for m in models if m.topic == wanted]
    reader.on_event(Message(message.topic, message.payload[:-1] + b"?", retained=True), 0.0)
    assert reader.progress == (1, 1)
    with pytest.raises(UntrustedError, match="no model of run 1 can be had; model 0: "):
        reader.finished_run()
    reader.on_event(message, 0.0)
    assert len(reader.finished_run().models) == 1, "the right one may follow"


def test_a_forged_announcement_is_refused(tmp_path):
    with make_fleet(tmp_path / "fleet", mode="rotation") as fleet:
        fleet.run(20)
        tell(fleet, Topics("demo").round, "announcement", b"?", ChunkKind.ROUND, signer=Identity.generate("aggregator"))
        fleet.broker.pump()
        with pytest.raises(UntrustedError, match="did not sign"):
            reader_of(fleet).finished_run()
