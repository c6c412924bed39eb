"""A request on a connection of its own: who did not answer, and how often it is sent."""

import threading

import pytest

from shoal.errors import BrokerUnreachableError, NotReadyError
from shoal.membership.grants import AGGREGATOR_ROLE, make_card
from shoal.owner.console import asking
from shoal.owner.console.asking import ask
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol.requests import Outcome, OwnerAnswer, RequestAction
from shoal.transport.base import Connected, Disconnected
from tests.helpers.owner_requests import AGGREGATOR, tell
from tests.helpers.parties import Line
from tests.helpers.refusals import refused


class Wire(Line):
    """A transport whose ``script`` is called with the sink after each publish."""

    def __init__(self, sink, script):
        super().__init__()
        self.sink, self.script, self.left = sink, script, 0

    def start(self, *, require=False):
        assert require

    def pending(self):
        return self.left

    def publish(self, topic, payload, **options):
        super().publish(topic, payload, **options)
        self.script(self)


@pytest.fixture
def fleet(tmp_path):
    made = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://127.0.0.1:1")
    made.add_aggregator(make_card(AGGREGATOR, AGGREGATOR_ROLE))
    return made


@pytest.fixture
def wires(monkeypatch):
    """Lines instead of connections; each takes the next script."""
    made, scripts, questions = [], [], []
    real = asking.Question

    def question(*args, **parts):
        questions.append(real(*args, **parts))
        return questions[-1]

    def transport(_address, _client, sink, **_options):
        script = scripts[len(made)]
        made.append(Wire(sink, lambda wire: script(wire, questions[-1])))
        return made[-1]

    monkeypatch.setattr(asking, "Question", question)
    monkeypatch.setattr("shoal.owner.broker.address.MqttTransport", transport)
    return made, scripts


def replying(outcome, accepted):
    def script(_wire, question):
        message = OwnerAnswer(
            fleet="reef", request=question.sealed.transfer_id, outcome=outcome, accepted=accepted, answered_at_s=7
        )
        tell(question, message, b"{}")

    return script


def test_a_broker_that_is_down_is_named(fleet):
    with pytest.raises(BrokerUnreachableError):
        ask(fleet, 1.0, lambda _line: None, RequestAction.LIST)


def test_silent_aggregator_is_named(fleet, wires, monkeypatch):
    """An aggregator that is silent is named and progress is told."""
    made, scripts = wires
    scripts.append(lambda _wire, _question: None)
    monkeypatch.setattr(asking, "TELL_S", 0.0)
    told = []
    with refused(NotReadyError, r"did not answer within 0\.1 s", hint="broker-config"):
        ask(fleet, 0.1, told.append, RequestAction.LIST)
    assert told[0].startswith("waiting for the aggregator's answer")
    assert made[0].closed


def test_a_lost_connection_is_the_brokers(fleet, wires):
    _, scripts = wires
    scripts.append(lambda wire, _question: wire.sink(Disconnected("gone")))
    with pytest.raises(BrokerUnreachableError, match="was lost before the answer came: gone"):
        ask(fleet, 0.1, lambda _line: None, RequestAction.LIST)


def test_request_is_sent_again(fleet, wires):
    """A bad link is no reason to ask the owner to begin again."""
    made, scripts = wires

    def drop_once(wire, question):
        if len(wire.sent) == 1:
            wire.sink(Disconnected("gone"))
            wire.sink(Connected(session_present=False))
        else:
            replying(Outcome.DONE, 1)(wire, question)

    scripts.append(drop_once)
    assert ask(fleet, 5.0, lambda _line: None, RequestAction.LIST) == (b"{}", 7)
    assert len(made) == 1


def test_overtaken_request_has_a_new_number(fleet, wires):
    """A request that was overtaken is sent again with a new number."""
    made, scripts = wires
    scripts += [replying(Outcome.REPLAYED, 1), replying(Outcome.DONE, 2)]
    assert ask(fleet, 5.0, lambda _line: None, RequestAction.LIST) == (b"{}", 7)
    assert len(made) == 2


def test_after_three_attempts_it_gives_up(fleet, wires):
    made, scripts = wires
    scripts += [replying(Outcome.REPLAYED, 1)] * 3
    with pytest.raises(NotReadyError):
        ask(fleet, 5.0, lambda _line: None, RequestAction.LIST)
    assert len(made) == 3


def test_large_request_shows_progress(fleet, wires, monkeypatch):
    """A large request shows how much is sent."""
    _, scripts = wires

    def slow(wire, _question):
        wire.left = 3
        threading.Timer(0.2, setattr, (wire, "left", 0)).start()

    scripts.append(slow)
    monkeypatch.setattr(asking, "TELL_S", 0.0)
    told = []
    with pytest.raises(NotReadyError):
        ask(fleet, 0.05, told.append, RequestAction.LIST)
    assert told[0] == "sending the request: 0.0 MB sent, 3 parts left"
