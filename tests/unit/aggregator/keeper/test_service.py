"""A keeper on a transport: what it reads, what it refuses, and its memory before its answer."""

from __future__ import annotations

import pytest
from shoal_lab.loopback.fleet import LoopbackError

from aggregator.keeper.memory import KeeperMemory
from shoal.protocol.topics import TopicKind, Topics
from shoal.simulation.process_fleet import Stage
from shoal.transport.base import Message
from tests.helpers.fleets import BROKER_URL, grouped_data, make_fleet


@pytest.fixture
def fleet(tmp_path):
    data = grouped_data(4)
    stage = Stage(tmp_path / "stage", BROKER_URL, tuple(sorted(data)), keeper="keeper")
    with make_fleet(tmp_path / "fleet", data, stage=stage, mode="rotation", min_contributors=3) as made:
        yield made


def test_memory_is_durable_before_the_answer(fleet, monkeypatch):
    sent = []

    def answer(membership, transport, channel, message, body=b""):
        sent.append((channel.name, len(KeeperMemory.load(fleet.stage.keeper_dir).opened)))

    monkeypatch.setattr(type(fleet.keeper._membership), "send", answer)
    with pytest.raises(LoopbackError, match="waits for the keeper"):
        fleet.run(5)
    assert sent[0] == ("answer of the keeper", 1)


@pytest.mark.parametrize("kind", [TopicKind.JOB, TopicKind.ROSTER, TopicKind.NOTICE])
def test_rubbish_changes_nothing(fleet, caplog, kind):
    before, topics = fleet.keeper.memory, Topics(fleet.plan.fleet)
    topic = topics.at(kind, "keeper") if kind.variable else topics.at(kind)
    fleet.keeper.on_event(Message(topic, b"rubbish", retained=False), 0.0)
    assert fleet.keeper.memory is before
    assert [r.message for r in caplog.records if r.name == "shoal.keeper"] == ["refused"]
