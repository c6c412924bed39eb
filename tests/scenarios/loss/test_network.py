"""Duplicated, late, reordered and lost messages: the run ends with the same bits."""

import numpy as np
import pytest
from shoal_lab.loopback.transport import Hop

from edge_client.learning.data import Dataset
from shoal.protocol.chunking import ChunkKind, parse
from shoal.protocol.messages import Action
from shoal.protocol.recipe import LocalTraining
from tests.helpers.broker_restarts import restart
from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    answers,
    make_exact_fleet,
    names,
    restart_device,
    thetas,
    uploads_of,
)
from tests.scenarios.faults import FaultRule, RuledFaults

UP, CTL = "shoal/v1/+/d/+/up", "shoal/v1/+/d/+/ctl"


@pytest.mark.parametrize(
    "rules",
    [
        [FaultRule(duplicate=1.0)],
        [FaultRule(delay_s=(0.0, 0.3))],
        [FaultRule(topic_filter=UP, reorder=0.7, reorder_s=3.0, duplicate=0.5)],
        [FaultRule(topic_filter=UP, drop=0.4), FaultRule(topic_filter=CTL, drop=0.4)],
        [FaultRule(topic_filter=CTL, drop=0.9)],
    ],
    ids=["doubled", "slow", "reordered", "lossy", "deaf"],
)
@pytest.mark.parametrize("seed", with_long([0, 1], 0))
def test_a_bad_network_changes_no_bit(tmp_path, undisturbed, rules, seed):
    with make_exact_fleet(
        tmp_path / "fleet", faults=RuledFaults(rules, seed=seed), quorum=1.0, deadline_s=1e6
    ) as fleet:
        records = fleet.run(20_000)
        assert [r["contributed"] for r in records] == [3, 3, 3, 3]
        assert thetas(fleet) == undisturbed


@pytest.fixture(scope="module")
def wide(logistic):
    """A task whose vector takes three chunks: d = 80,004."""
    rng = np.random.default_rng(0)
    data = {
        name: Dataset(rng.standard_normal((10, 20_000)).astype(np.float32), rng.integers(0, 4, 10)) for name in names(2)
    }
    local = LocalTraining(epochs=0, steps=1, batch_size=0, lr=0.01)
    return {"data": data, "bundle": logistic(20_000, 4), "local": local, "rounds": 2, "quorum": 1.0}


@pytest.fixture(scope="module")
def wide_result(tmp_path_factory, wide):
    with make_exact_fleet(tmp_path_factory.mktemp("wide") / "fleet", **wide) as fleet:
        fleet.run(10)
        return thetas(fleet)


def upload_chunks(tap, client):
    """Return the numbers of the chunks of uploads that a client has sent, in order."""
    headers = [parse(p.payload)[0] for p in tap.sent(client=client, ending="/up")]
    return [h.index for h in headers if h.kind is ChunkKind.UPLOAD]


def test_a_missing_chunk_is_asked_for_alone(tmp_path, wide, wide_result, tap):
    """The aggregator names the missing chunk, and the device sends only that."""
    with make_exact_fleet(tmp_path / "fleet", faults=tap, **wide) as fleet:
        tap.lose(client=fleet.client_id("dev-00"), ending="/up", header={"index": 1}, times=2)
        fleet.run(100)
        asked = [c for c in answers(fleet, tap, "dev-00") if c.action == Action.NACK]
        assert [c.missing for c in asked] == [(1,), (1,)]
        assert upload_chunks(tap, fleet.client_id("dev-00"))[:5] == [0, 1, 2, 1, 1]
        assert thetas(fleet) == wide_result


@pytest.mark.parametrize("keep", [True, False], ids=["sessions kept", "everything forgotten"])
@pytest.mark.parametrize("steps", with_long([1, 2, 3, 4], 2, 3))
def test_restart_in_wide_run_changes_no_bit(tmp_path, wide, wide_result, keep, steps):
    """A broker's restart in a wide run changes no bit."""
    with make_exact_fleet(tmp_path / "fleet", **wide) as fleet:
        for _ in range(steps):
            fleet.step()
        restart(fleet.broker, keep=keep)
        assert [r["contributed"] for r in fleet.run(100)] == [2] * 3
        assert thetas(fleet) == wide_result


def test_what_is_under_way_is_not_sent_again(tmp_path, wide, wide_result, tap):
    """A slow link: the aggregator misses a chunk that arrives ten seconds after the others."""
    with make_exact_fleet(tmp_path / "fleet", faults=tap, **wide) as fleet:
        client = fleet.client_id("dev-00")
        tap.delay(10.0, client=client, ending="/up", hop=Hop.UP, header={"index": 1})
        fleet.run(100)
        assert [c for c in answers(fleet, tap, "dev-00") if c.action == Action.NACK]
        assert upload_chunks(tap, client)[:6] == [0, 1, 2] * 2
        assert len(upload_chunks(tap, client)[6:]) == len(set(upload_chunks(tap, client)[6:])), "the final checkpoint"
        assert thetas(fleet) == wide_result


def test_absent_aggregator_asks_for_upload(tmp_path, wide, wide_result, tap):
    """The broker queues the reminders for it but not the upload: it requests the whole upload, once."""
    with make_exact_fleet(tmp_path / "fleet", faults=tap, **wide) as fleet:
        fleet.broker.pump()
        aggregator = fleet.client_id("aggregator")
        fleet.broker.disconnect(aggregator)
        backlog = fleet.broker._sessions[aggregator].backlog

        def kept():
            return [parse(m.payload)[0].kind for m in backlog if m.topic.endswith("/up")]

        fleet.run_until(lambda: len(kept()) > 4, 60)
        assert set(kept()) == {ChunkKind.REMINDER}
        fleet.broker.reconnect(aggregator)
        assert [r["contributed"] for r in fleet.run(100)] == [2] * 3
        for device in fleet.devices:
            sent = upload_chunks(tap, fleet.client_id(device))
            assert sent[:9] == [0, 1, 2] * 3
            assert len(sent[9:]) == len(set(sent[9:])), "the final report, with a checkpoint from one device"
        assert thetas(fleet) == wide_result


def test_broken_connections_load_comes_again(tmp_path, wide, wide_result, tap):
    """The chunks are under way at QoS 0 when the connection of their device breaks."""
    with make_exact_fleet(tmp_path / "fleet", faults=tap, **wide) as fleet:
        client = fleet.client_id("dev-01")
        tap.delay(0.5, client=client, ending="/up", hop=Hop.UP)
        fleet.run_until(lambda: tap.sent(client=client, ending="/up"), 5)
        fleet.broker.disconnect(client)
        tap.rules.clear()
        fleet.run_until(lambda: fleet.now_s > 1, 5)
        reached = tap.sent(client=fleet.client_id("aggregator"), ending="/up", hop=Hop.DOWN)
        topic = tap.sent(client=client, ending="/up")[0].topic
        assert not [p for p in reached if p.topic == topic]
        fleet.broker.reconnect(client)
        assert [r["contributed"] for r in fleet.run(100)] == [2] * 3
        assert thetas(fleet) == wide_result


def test_returning_device_reminds_first(tmp_path, wide, tap):
    """A reminder is held back while publishes are unacknowledged, so it must be the first of them."""
    with make_exact_fleet(tmp_path / "fleet", faults=tap, **wide) as fleet:
        client = fleet.client_id("dev-01")
        tap.lose(client=client, ending="/up", hop=Hop.UP)
        fleet.settle()
        fleet.broker.disconnect(client)
        fleet.broker.pump()
        before, now_s = len(tap.heard), fleet.now_s
        fleet.broker.reconnect(client)
        fleet.settle()
        assert fleet.now_s == now_s
        sent = [p for p in tap.heard[before:] if p.client == client and p.hop is Hop.UP]
        assert parse(sent[0].payload)[0].kind is ChunkKind.REMINDER


def test_disordered_chunks_fit_together(tmp_path, wide, wide_result):
    """Chunks out of order and doubled are put together."""
    faults = RuledFaults([FaultRule(duplicate=0.5, reorder=0.8, reorder_s=0.5)], seed=3)
    with make_exact_fleet(tmp_path / "fleet", faults=faults, **wide) as fleet:
        fleet.run(100)
        assert thetas(fleet) == wide_result


def test_a_lost_model_is_fetched_again(tmp_path, undisturbed, tap):
    """The retained offset got lost on its way to one device; it subscribes again and receives it."""
    with make_exact_fleet(tmp_path / "fleet", faults=tap, quorum=1.0) as fleet:
        lost = tap.lose(client=fleet.client_id("dev-01"), holding="/s/model/", hop=Hop.DOWN, times=1)
        records = fleet.run(100)
        assert lost.hits
        assert 1 <= records[1]["seconds"] < 10
        assert thetas(fleet) == undisturbed


def test_late_upload_is_refused(tmp_path, tap):
    """It arrives after its round was closed on the quorum: it counts nowhere, and its sender takes part in the next."""
    with make_exact_fleet(tmp_path / "fleet", faults=tap, quorum=0.6, deadline_s=20.0) as fleet:
        first = {"client": fleet.client_id("dev-02"), "ending": "/up", "hop": Hop.UP, "header": {"round": 1}}
        tap.delay(25.0, times=1, **first)
        tap.lose(**first)
        hold = tap.lose(client=fleet.client_id("dev-01"), ending="/up")
        fleet.run_until(lambda: fleet.now_s > 1, 5)
        tap.forgive(hold)
        fleet.run_until(lambda: fleet.closed() == 1, 30)
        hold = tap.lose(client=fleet.client_id("dev-01"), ending="/up")
        fleet.run_until(lambda: fleet.now_s >= 26, 30)
        refused = [c for c in answers(fleet, tap, "dev-02") if c.action == Action.REFUSED]
        assert [c.reason for c in refused] == ["the round is not open"]
        tap.forgive(hold)
        records = fleet.run(100)
        assert records[0]["missing"] == ["dev-02"]
        assert records[0]["seconds"] == pytest.approx(20.0, abs=0.3)
        assert [r["contributed"] for r in records] == [2, 3, 3, 3]


def test_silent_device_is_left_at_deadline(tmp_path, wide, tap):
    """Its connection seems open, but only two of three chunks arrived: the round closes with a quorum, and it waits again."""
    with make_exact_fleet(tmp_path / "fleet", faults=tap, **{**wide, "quorum": 0.5, "deadline_s": 15.0}) as fleet:
        tap.lose(client=fleet.client_id("dev-01"), ending="/up", header={"index": 2})
        records = fleet.run(100)
        assert [r["missing"] for r in records[:2]] == [["dev-01"]] * 2
        assert [r["contributed"] for r in records] == [1, 1, 2]  # the final report has no vector: one chunk
        assert records[0]["seconds"] == pytest.approx(15.0, abs=0.3)


def test_device_gone_by_will_is_not_awaited(tmp_path, tap):
    """The broker publishes its will: the round closes at once on its quorum, and the device's return brings it back."""
    with make_exact_fleet(tmp_path / "fleet", faults=tap, quorum=0.6, rounds=4) as fleet:
        tap.lose(client=fleet.client_id("dev-02"), ending="/up", times=1)
        fleet.run_until(lambda: uploads_of(fleet, tap, "dev-02"), 5)
        fleet.settle()
        hold = tap.lose(client=fleet.client_id("dev-00"), ending="/up")
        fleet.kill_device("dev-02")
        fleet.run_until(lambda: fleet.now_s > 5, 10)
        assert [(r["contributed"], r["missing"]) for r in fleet.records()] == [(2, ["dev-02"])]
        assert fleet.records()[0]["seconds"] < 1
        fleet.revive_device("dev-02")
        fleet.settle()
        tap.forgive(hold)
        records = fleet.run(100)
        assert [r["contributed"] for r in records] == [2, 2, 3, 3, 3]
        assert len(set(thetas(fleet).values())) == 1


def test_will_of_an_earlier_life_is_ignored(tmp_path, undisturbed, tap):
    """The broker noticed the dead connection only after the device had come back on a new one."""
    with make_exact_fleet(tmp_path / "fleet", faults=tap, quorum=1.0) as fleet:
        hold = tap.lose(client=fleet.client_id("dev-02"), ending="/up")
        fleet.run_until(lambda: uploads_of(fleet, tap, "dev-02"), 5)
        late = tap.delay(2.0, hop=Hop.DOWN, ending="/dev-02/state", times=1)
        restart_device(fleet, "dev-02")
        fleet.run_until(lambda: fleet.now_s > 5, 10)
        assert late.hits
        tap.forgive(hold)
        assert [r["contributed"] for r in fleet.run(100)] == [3, 3, 3, 3]
        assert thetas(fleet) == undisturbed


@pytest.mark.parametrize("keep", [True, False], ids=["sessions kept", "everything forgotten"])
@pytest.mark.parametrize("steps", with_long([0, 1, 2, 3, 4, 6], 1, 3, 6))
def test_a_broker_restart_changes_no_bit(tmp_path, undisturbed, keep, steps):
    """At any step, with and without persistence: retained messages are published again, those in flight are resent."""
    with make_exact_fleet(tmp_path / "fleet", quorum=1.0) as fleet:
        for _ in range(steps):
            fleet.step()
        restart(fleet.broker, keep=keep)
        assert [r["contributed"] for r in fleet.run(100)] == [3, 3, 3, 3]
        assert thetas(fleet) == undisturbed


def test_a_short_partition_is_survived(tmp_path, undisturbed, tap):
    """The connection of one device breaks and is restored: the incarnation is the same, and nothing is lost."""
    with make_exact_fleet(tmp_path / "fleet", faults=tap, quorum=1.0) as fleet:
        tap.lose(client=fleet.client_id("dev-01"), ending="/up", times=1)
        fleet.run_until(lambda: uploads_of(fleet, tap, "dev-01"), 5)
        fleet.broker.disconnect(fleet.client_id("dev-01"))
        fleet.run_until(lambda: fleet.now_s > 3, 5)
        fleet.broker.reconnect(fleet.client_id("dev-01"))
        assert [r["contributed"] for r in fleet.run(100)] == [3, 3, 3, 3]
        assert thetas(fleet) == undisturbed


def test_lost_presence_is_said_again(tmp_path, tap):
    """Long before the deadline of the gathering, which is all that would help otherwise."""
    tap.lose(ending="/dev-01/state", hop=Hop.UP, times=1)
    with make_exact_fleet(tmp_path / "fleet", faults=tap, deadline_s=60.0) as fleet:
        records = fleet.run(20)
        assert [r["contributed"] for r in records] == [3] * len(records)


@pytest.mark.parametrize("what", ["/s/round", "/s/plan"])
def test_held_back_messages_are_looked_for(tmp_path, undisturbed, what, tap):
    """The retained round, or plan, is lost on its way to a device that has just connected; the deadline is 600 s away."""
    with make_exact_fleet(tmp_path / "fleet", faults=tap, quorum=1.0, deadline_s=600.0) as fleet:
        lost = tap.lose(client=fleet.client_id("dev-01"), holding=what, hop=Hop.DOWN)
        fleet.run_until(lambda: fleet.now_s >= 1.5, 5)
        tap.forgive(lost)
        records = fleet.run(60)
        assert [r["contributed"] for r in records] == [3] * len(records)
        assert thetas(fleet) == undisturbed
