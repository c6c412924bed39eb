"""Two programs with one identity: the later start ends, and nothing but a live presence that names it makes it end."""

import pytest

from aggregator.shards.membership import signed_presence, witness
from crypto.seal.identity import Identity
from shoal.transport import rivals
from shoal.transport.base import Connected, Message
from shoal.transport.rivals import NAMED, RivalWatch

IDENTITY = Identity.generate("worker-0")
TOPIC = "shoal/v1/reef/w/worker-0/state"


class Wire:
    """What one watch publishes, as the broker would hand it on."""

    def __init__(self, birth):
        self.sent, self.filters, self.ended = [], [], 0
        self.watch = RivalWatch(witness(IDENTITY, "reef", TOPIC, birth), self._end)
        self.watch.follow(self)

    def _end(self):
        self.ended += 1

    def subscribe(self, topic):
        self.filters.append(topic)

    def publish(self, _topic, payload):
        self.sent.append(payload)

    def hear(self, payload, **how):
        self.watch.on_event(Message(TOPIC, payload, **how))


def told(birth, *, online=True, rival=0, identity=IDENTITY, fleet="reef"):
    return signed_presence(identity, fleet, birth, online=online, rival=rival)


@pytest.mark.parametrize("first", [5, 9])
def test_later_start_ends_whoever_is_first(first):
    """The later start ends whichever connects first."""
    wires = {birth: Wire(birth) for birth in (5, 9)}
    connected = []
    for birth in (first, 14 - first):
        connected.append(wires[birth])
        wires[birth].watch.on_event(Connected(session_present=False))
        for _ in range(20):
            passing = [payload for wire in connected for payload in wire.sent]
            for wire in connected:
                wire.sent.clear()
            for payload in passing:
                for wire in connected:
                    wire.hear(payload)
    assert wires[9].ended >= 1
    assert wires[5].ended == 0
    assert wires[5].filters == [TOPIC]


@pytest.mark.parametrize(
    ("payload", "how"),
    [
        (told(5, rival=9), {"retained": True}),
        (told(5, rival=9, online=False), {}),
        (told(5), {}),
        (told(5, rival=8), {}),
        (told(9, rival=9), {}),
        (told(12), {}),
        (told(12, rival=9), {}),
        (told(5, rival=9, fleet="other"), {}),
        (told(5, rival=9, identity=Identity.generate("worker-0")), {}),
        (b"no presence", {}),
        (b"", {}),
    ],
    ids=[
        "retained",
        "will",
        "earlier",
        "names another",
        "own",
        "later",
        "later names",
        "fleet",
        "stranger",
        "noise",
        "empty",
    ],
)
def test_nothing_else_ends_a_program(payload, how):
    wire = Wire(9)
    for _ in range(3 * NAMED):
        wire.hear(payload, **how)
    assert wire.ended == 0


def test_ends_once_named_often_enough(monkeypatch):
    """The watch is over after a minute."""
    now = [0.0]
    monkeypatch.setattr(rivals.time, "monotonic", lambda: now[0])
    wire = Wire(9)
    for number in range(NAMED):
        assert wire.ended == 0, number
        wire.hear(told(5, rival=9))
    assert wire.ended == 1
    now[0] = rivals.WATCH_S
    assert not wire.watch.over
    now[0] += 1.0
    assert wire.watch.over
