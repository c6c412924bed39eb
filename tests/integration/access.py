"""Access by the table of channels, tried on a real broker: each client publishes on each topic and listens to all of them."""

from __future__ import annotations

import time

from shoal.protocol.channels import CHANNELS, Party
from shoal.protocol.topics import TopicKind, Topics, chunk_topic
from shoal.transport.base import Message

TOPICS = Topics("reef")
TOKEN = "a1b2c3d4e5f60718"
NAMES = {
    "": ("",),
    "party": ("aggregator", "dev-1", "dev-2"),
    "device": ("dev-1", "dev-2"),
    "token": (TOKEN, "f" * 16),
    "worker": ("worker-0", "worker-1"),
    "label": ("4f2a",),
}
OWN = {
    Party.OWNER: (),
    Party.AGGREGATOR: ("party",),
    Party.WORKER: ("party", "worker"),
    Party.DEVICE: ("party", "device"),
    Party.NEWCOMER: ("token",),
}
"""Variables of topics that a party fills with its own name only."""
LAST = b"last"
WAIT_S = 10.0
FAREWELLS = (
    ("aggregator", TOPICS.round),
    ("dev-1", TOPICS.up("dev-1")),
    ("owner", TOPICS.grant(TOKEN)),
)
"""Who sends LAST on which topic, so that every party hears it."""


def every_topic():
    """Yield (kind, name, topic) for several names of each kind, with a chunk below it where there may be one."""
    for kind in TopicKind:
        for name in NAMES[kind.variable]:
            yield kind, name, TOPICS.at(kind, name)
            if kind.has_chunks:
                yield kind, name, chunk_topic(TOPICS.at(kind, name), 7)


def access_of(roles):
    """Return (topics that a client may publish to, topics that it may hear) in its ``roles``: (party, its own name) each."""
    writes, reads = set(), set()
    for kind, name, topic in every_topic():
        for party, own in roles:
            if kind.variable not in OWN[party] or name == own:
                rows = [c for c in CHANNELS if c.topic is kind]
                writes |= {topic for c in rows if party in (c.sender, c.cleared_by)}
                reads |= {topic for c in rows if party in c.receivers}
    return writes, reads


def check(clients, roles):
    """Let every client publish on every topic; assert that exactly the listed receivers receive it.

    Args:
        clients: name -> a client with ``transport``, connected to the broker, and the queue ``events`` of its received events.
        roles: name -> the client's roles, as `access_of` takes them.
    """
    for client in clients.values():
        client.transport.subscribe(f"{TOPICS.root}/#")
    settle(clients)
    time.sleep(0.5)  # subscriptions are acknowledged, but do not count as pending
    for name, client in clients.items():
        for _, _, topic in every_topic():
            client.transport.publish(topic, name.encode())
    settle(clients)
    for name, topic in FAREWELLS:
        clients[name].transport.publish(topic, LAST)
    writes = {name: access_of(roles[name])[0] for name in clients}
    for name, client in clients.items():
        expected = {(topic, sender) for sender in clients for topic in writes[sender] & access_of(roles[name])[1]}
        assert heard_by(client) == expected, name


def heard_by(client):
    """Return (topic, payload as text) of the messages that a client received before LAST."""
    found = set()
    while True:
        event = client.events.get(timeout=WAIT_S)
        if isinstance(event, Message):
            if event.payload == LAST:
                return found
            found.add((event.topic, event.payload.decode()))


def settle(clients):
    """Return when the broker has acknowledged, and so routed, all that was published."""
    end = time.monotonic() + WAIT_S
    while any(client.transport.pending() for client in clients.values()):
        assert time.monotonic() < end
        time.sleep(0.02)
