"""Floods on an open broker, with real programs: each program's memory grows by at most 32 MiB, and the run still finishes."""

from __future__ import annotations

import pytest

from shoal.protocol.chunking import ChunkKind
from shoal.protocol.recipe import LocalTraining, Recipe
from shoal.protocol.topics import TopicKind, Topics, chunk_topic
from shoal.simulation.process_fleet import Stage
from shoal.transport.local_broker import find_mosquitto
from tests.helpers.floods import MIB, claim, claims, rss_mb, until_idle
from tests.helpers.forked_stages import begin, stage_of
from tests.helpers.waiting import until

pytestmark = [
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.timeout(300),
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]
NAMES = ("dev-0", "dev-1")
TOPICS = Topics("demo")
MOST_GROWTH_MB = 32.0
STRANGERS = 160
OPTIONS = Recipe(
    "fedavg",
    rounds=1,
    local=LocalTraining(epochs=1, batch_size=16, lr=0.2),
    min_contributors=2,
    quorum=1.0,
    deadline_s=600.0,
    seed=1,
)


@pytest.fixture
def scene(tmp_path, client):
    """An open broker, an aggregator and one of two devices, which wait for the other; and a client of a stranger."""
    with stage_of(tmp_path, NAMES, Stage) as (stage, broker):
        plan = begin(stage, OPTIONS)
        server = stage.start_aggregator()
        device = stage.start_device("dev-0", tmp_path / "dev-0.npz")
        until(lambda: "following run" in device.log.read_text(), 60.0)
        for program in (server, device):
            until_idle(program.pid)
        yield stage, plan, server, device, client(broker.url, "stranger").transport, tmp_path


def growth_mb(program, transport, messages):
    """Publish the messages in slices; return by how much the program's memory grew at most after any of them, in MiB."""
    before = most = rss_mb(program.pid)
    for first in range(0, len(messages), 400):
        for topic, chunk, retain in messages[first : first + 400]:
            transport.publish(topic, chunk, retain=retain)
        until(lambda: transport.pending() == 0, 60.0)
        until_idle(program.pid)
        most = max(most, rss_mb(program.pid))
    return most - before


def test_floods_take_little_memory(scene):
    """Of the aggregator, and of a device: every topic that they read, chunks that announce much, transfers without an end."""
    stage, plan, server, device, transport, root = scene
    uploads = claims((ChunkKind.UPLOAD,), numbers=1)
    unknown = [
        (topic(f"stranger-{n}"), chunk, False)
        for n in range(STRANGERS)
        for topic in (TOPICS.up, TOPICS.state)
        for chunk in uploads
    ]
    known = [(topic, chunk, False) for topic in (TOPICS.up("dev-1"), TOPICS.state("dev-1")) for chunk in claims()]
    owner = [
        (topic, chunk, True)
        for topic in (chunk_topic(TOPICS.at(TopicKind.OWNER_ROSTER), 0), TOPICS.keys("aggregator"))
        for chunk in claims()
    ]
    requests = [(TOPICS.owner_request, chunk, False) for chunk in claims()]
    assert growth_mb(server, transport, unknown + known + owner + requests) < MOST_GROWTH_MB
    for topic in (chunk_topic(TOPICS.at(TopicKind.OWNER_ROSTER), 0), TOPICS.keys("aggregator")):
        transport.publish(topic, b"", retain=True)
    bases = (TOPICS.plan, TOPICS.round, TOPICS.roster_change, TOPICS.keys("dev-0"))
    lying = [(chunk_topic(base, 7), chunk, True) for base in bases for chunk in claims()]
    lying += [(TOPICS.ctl("dev-0"), chunk, False) for chunk in claims()]
    endless = [
        (chunk_topic(TOPICS.plan, 8), claim(ChunkKind.PLAN, 3 * MIB, n, index=i, chunk_bytes=60_000), False)
        for n in range(8)
        for i in range(40)
    ]
    assert growth_mb(device, transport, lying + endless) < MOST_GROWTH_MB
    for base in bases:
        transport.publish(chunk_topic(base, 7), b"", retain=True)
    stage.start_device("dev-1", root / "dev-1.npz")
    assert stage.wait(plan.run, timeout_s=90)[0]["contributed"] == 2
