"""The loopback broker keeps MQTT's rules on virtual time, and its faults are reproducible."""

import pytest
from shoal_lab.loopback.transport import Hop, LoopbackBroker, LoopbackTransport, Passage

from shoal import limits
from shoal.errors import UsageError, WireError
from shoal.transport.base import Connected, Disconnected, Message, TakenOver, TransportEvent
from tests.helpers.broker_restarts import restart
from tests.scenarios.faults import FaultRule, RuledFaults


class Peer:
    """A loopback client with its events in a list."""

    def __init__(self, broker: LoopbackBroker, name: str, *filters: str, will: tuple[str, bytes] | None = None) -> None:
        self.broker, self.name, self.events = broker, name, list[TransportEvent]()
        self.transport = LoopbackTransport(broker, name, self.events.append, will)
        for topic_filter in filters:
            self.transport.subscribe(topic_filter)
        self.transport.start()
        broker.pump()

    def say(self, topic: str, payload: bytes, *, qos: int = 1, retain: bool = False) -> None:
        """Publish a message and let it arrive."""
        self.transport.publish(topic, payload, qos=qos, retain=retain)
        self.broker.pump()

    def come_back(self) -> None:
        """Connect again, and take what came meanwhile."""
        self.broker.reconnect(self.name)
        self.broker.pump()

    def messages(self) -> list[Message]:
        """Take the messages that arrived."""
        found = [event for event in self.events if isinstance(event, Message)]
        self.events.clear()
        return found


@pytest.fixture
def broker() -> LoopbackBroker:
    return LoopbackBroker()


def test_nothing_moves_before_pump(broker: LoopbackBroker) -> None:
    reader, writer = Peer(broker, "r", "t/+"), Peer(broker, "w")
    writer.transport.publish("t/1", b"x")
    assert reader.messages() == []
    assert writer.transport.pending() == 1
    broker.pump()
    assert reader.messages() == [Message("t/1", b"x")]
    assert writer.transport.pending() == 0
    assert writer.transport.bytes_sent == reader.transport.bytes_received == 1
    with pytest.raises(WireError, match="above the limit"):
        writer.transport.publish("t", bytes(limits.MAX_PACKET_BYTES))


def test_retained_reach_late_subscribers(broker: LoopbackBroker) -> None:
    """Retained messages reach late subscribers and can be cleared."""
    writer = Peer(broker, "w")
    writer.transport.publish("keep", b"old", retain=True)
    writer.say("keep", b"new", retain=True)
    assert Peer(broker, "r", "keep").messages() == [Message("keep", b"new", retained=True)]
    writer.say("keep", b"", retain=True)
    assert Peer(broker, "s", "keep").messages() == []
    assert broker.retained == {}


def test_overlapping_filters_deliver_once(broker: LoopbackBroker) -> None:
    """Overlapping filters deliver once and unsubscribe works."""
    reader = Peer(broker, "r", "t/#", "t/+")
    reader.say("t/1", b"x")
    assert len(reader.messages()) == 1
    reader.transport.unsubscribe("t/#")
    reader.transport.unsubscribe("t/+")
    reader.say("t/1", b"x")
    assert reader.messages() == []


def test_lost_connection_publishes_the_will(broker: LoopbackBroker) -> None:
    """A lost connection publishes the will and a goodbye does not."""
    reader = Peer(broker, "r", "will/+")
    for name in ("a", "b", "c"):
        Peer(broker, name, will=(f"will/{name}", b"dead"))
    broker.disconnect("a")
    broker.disconnect("b", graceful=True)
    broker.pump()
    assert reader.messages() == [Message("will/a", b"dead")]
    assert broker.retained == {"will/a": b"dead"}
    assert broker.connected() == ("c", "r")
    with pytest.raises(UsageError):
        broker.disconnect("a")
    with pytest.raises(UsageError):
        broker.reconnect("nobody")


@pytest.mark.parametrize("queue_offline", [True, False])
def test_session_keeps_what_came_meanwhile(queue_offline: bool) -> None:
    """A session keeps what came while its client was away, unless the broker queues nothing for it."""
    broker = LoopbackBroker(queue_offline=queue_offline)
    reader, writer = Peer(broker, "r", "t"), Peer(broker, "w")
    broker.disconnect("r")
    assert reader.events[-1] == Disconnected("connection lost")
    writer.say("t", b"1")
    reader.events.clear()
    reader.come_back()
    assert reader.events == [Connected(session_present=True), *[Message("t", b"1")] * queue_offline]


def test_qos_0_passes_by_an_absent_client(broker: LoopbackBroker) -> None:
    """At qos 0 a message passes by a client that is away."""
    reader, writer = Peer(broker, "r", "t"), Peer(broker, "w")
    writer.say("t", b"here", qos=0)
    assert reader.messages() == [Message("t", b"here")]
    broker.disconnect("r")
    writer.transport.publish("t", b"passed by", qos=0)
    writer.say("t", b"kept")
    assert writer.transport.pending() == 0
    reader.come_back()
    assert reader.messages() == [Message("t", b"kept")]


@pytest.mark.parametrize("loss", ["lost", "goodbye", "restart"])
def test_qos_0_is_lost_with_the_connection(loss: str) -> None:
    """A goodbye does not: it goes the same way behind it."""
    broker = LoopbackBroker(RuledFaults([FaultRule(hop=Hop.UP, delay_s=(1.0, 1.0))], seed=0))
    reader, writer = Peer(broker, "r", "t"), Peer(broker, "w")
    writer.transport.publish("t", b"once", qos=0)
    writer.transport.publish("t", b"assured")
    broker.advance(0.5)
    if loss == "restart":
        restart(broker)
    else:
        broker.disconnect("w", graceful=loss == "goodbye")
    broker.advance(2.0)
    expected = [b"once", b"assured"] if loss == "goodbye" else [b"assured"]
    assert [message.payload for message in reader.messages()] == expected
    assert writer.transport.pending() == 0


def test_publishes_wait_for_their_client(broker: LoopbackBroker) -> None:
    """Publishes of a disconnected client wait for it."""
    reader, writer = Peer(broker, "r", "t"), Peer(broker, "w")
    broker.disconnect("w")
    writer.transport.publish("t", b"1")
    broker.advance(60.0)
    assert writer.transport.pending() == 1
    assert reader.messages() == []
    writer.come_back()
    assert reader.messages() == [Message("t", b"1")]
    assert writer.transport.pending() == 0


def test_retained_again_for_a_new_process(broker: LoopbackBroker) -> None:
    """Retained messages are sent again to a new process but not after a reconnection."""
    Peer(broker, "w").transport.publish("keep", b"x", retain=True)
    reader = Peer(broker, "r", "keep")
    reader.messages()
    broker.disconnect("r")
    reader.come_back()
    assert reader.messages() == []
    reader.transport.close()
    assert Peer(broker, "r", "keep").messages() == [Message("keep", b"x", retained=True)]


def test_changed_subscriptions_hold(broker: LoopbackBroker) -> None:
    """Subscriptions changed while away hold after the reconnection."""
    Peer(broker, "w").transport.publish("anew", b"x", retain=True)
    reader = Peer(broker, "r", "anew", "gone")
    reader.messages()
    broker.disconnect("r")
    reader.transport.unsubscribe("gone")
    reader.transport.unsubscribe("anew")
    reader.transport.subscribe("anew")
    reader.come_back()
    assert reader.messages() == [Message("anew", b"x", retained=True)]
    reader.say("gone", b"y")
    assert reader.messages() == []


def test_second_client_of_one_id_takes_over(broker: LoopbackBroker) -> None:
    """A second client with the same id takes over."""
    first = Peer(broker, "twin", "t", will=("will", b"dead"))
    second = Peer(broker, "twin", "t")
    assert first.events[-1] == TakenOver()
    assert second.events[0] == Connected(session_present=True)
    with pytest.raises(WireError, match="closed"):
        first.transport.publish("t", b"")
    second.say("t", b"x")
    assert second.messages() == [Message("t", b"x")]
    assert first.messages() == []


@pytest.mark.parametrize("keep", [True, False])
def test_restart_brings_everybody_back(keep: bool, broker: LoopbackBroker) -> None:
    """A restart brings everybody back with or without the state."""
    reader, writer = Peer(broker, "r", "t"), Peer(broker, "w", will=("will", b"dead"))
    writer.say("keep", b"x", retain=True)
    restart(broker, keep=keep)
    broker.pump()
    assert broker.connected() == ("r", "w")
    assert broker.retained == ({"keep": b"x"} if keep else {})
    writer.say("t", b"after")
    assert reader.messages() == [Message("t", b"after")]


def test_close_lets_published_arrive(broker: LoopbackBroker) -> None:
    """Close lets published messages arrive and ends all events."""
    reader, writer = Peer(broker, "r", "t"), Peer(broker, "w", "t", will=("t", b"dead"))
    writer.events.clear()
    writer.transport.publish("t", b"last")
    writer.transport.close()
    broker.pump()
    assert reader.messages() == [Message("t", b"last")]
    assert writer.events == []
    with pytest.raises(UsageError):
        writer.transport.start()


def test_a_delay_passes_on_virtual_time_only() -> None:
    broker = LoopbackBroker(RuledFaults([FaultRule(hop=Hop.UP, delay_s=(2.0, 2.0))], seed=1))
    reader, writer = Peer(broker, "r", "t"), Peer(broker, "w")
    writer.transport.publish("t", b"x")
    broker.advance(1.9)
    assert reader.messages() == []
    assert broker.next_due_s() == 2.0
    broker.advance(0.1)
    assert reader.messages() == [Message("t", b"x")]
    assert broker.now_s == pytest.approx(2.0)
    assert broker.next_due_s() is None


def test_answers_happen_at_their_own_time() -> None:
    """A peer that answers each message after a second is asked three times in three seconds."""
    broker = LoopbackBroker(RuledFaults([FaultRule(hop=Hop.UP, delay_s=(1.0, 1.0))], seed=1))
    times: list[float] = []

    def echo(event: TransportEvent) -> None:
        if isinstance(event, Message):
            times.append(broker.now_s)
            transport.publish("t", event.payload)

    transport = LoopbackTransport(broker, "a", echo)
    transport.subscribe("t")
    transport.start()
    broker.pump()
    transport.publish("t", b"x")
    broker.advance(3.5)
    assert times == [1.0, 2.0, 3.0]


def test_dropped_counts_as_acknowledged() -> None:
    """As with a real broker, an acknowledgement is no delivery."""
    broker = LoopbackBroker(RuledFaults([FaultRule("t", hop=Hop.UP, drop=1.0)], seed=1))
    reader, writer = Peer(broker, "r", "#"), Peer(broker, "w")
    writer.transport.publish("t", b"x")
    writer.say("u", b"y")
    assert reader.messages() == [Message("u", b"y")]
    assert writer.transport.pending() == 0


def test_a_rule_hits_only_its_client() -> None:
    broker = LoopbackBroker(RuledFaults([FaultRule(client="deaf", hop=Hop.DOWN, drop=1.0)], seed=1))
    deaf, fine = Peer(broker, "deaf", "t"), Peer(broker, "fine", "t")
    fine.say("t", b"x")
    assert deaf.messages() == []
    assert fine.messages() == [Message("t", b"x")]


def test_duplicates_repeat_with_the_seed() -> None:
    """Duplicates and reordering happen and repeat with the seed."""

    def run(seed: int) -> list[int]:
        rule = FaultRule("t", hop=Hop.UP, drop=0.1, duplicate=0.2, reorder=0.3, reorder_s=5.0)
        broker = LoopbackBroker(RuledFaults([rule], seed=seed))
        reader, writer = Peer(broker, "r", "t"), Peer(broker, "w")
        for number in range(200):
            writer.transport.publish("t", b"%d" % number)
        broker.advance(10.0)
        return [int(message.payload) for message in reader.messages()]

    first = run(3)
    assert first == run(3)
    assert first != run(4)
    assert first != sorted(first)
    assert 160 <= len(set(first)) < 200
    assert len(first) > len(set(first))


def test_faults_may_be_any_callable() -> None:
    seen: list[Passage] = []

    def faults(passage: Passage) -> tuple[float, ...]:
        seen.append(passage)
        return (0.0, 0.0)

    broker = LoopbackBroker(faults)
    reader, writer = Peer(broker, "r", "t"), Peer(broker, "w")
    writer.say("t", b"x")
    assert len(reader.messages()) == 4
    assert [(passage.hop, passage.client) for passage in seen] == [(Hop.UP, "w"), (Hop.DOWN, "r"), (Hop.DOWN, "r")]


@pytest.mark.parametrize(
    "rule", [{"drop": 1.1}, {"duplicate": -0.1}, {"delay_s": (2.0, 1.0)}, {"delay_s": (-1.0, 1.0)}, {"reorder_s": -1.0}]
)
def test_rule_that_makes_no_sense_is_refused(rule: dict[str, float]) -> None:
    with pytest.raises(UsageError):
        FaultRule(**rule)  # type: ignore[arg-type]


def test_endless_answers_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Peers that answer each other without end are an error."""
    monkeypatch.setattr("shoal_lab.loopback.transport.MAX_STEPS", 1000)
    broker = LoopbackBroker()
    transport = LoopbackTransport(
        broker, "a", lambda event: transport.publish("t", b"") if isinstance(event, Message) else None
    )
    transport.subscribe("t")
    transport.start()
    transport.publish("t", b"")
    with pytest.raises(UsageError, match="rest"):
        broker.pump()
