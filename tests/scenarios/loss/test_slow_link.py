"""Links slower than every timeout: no message is sent again while it may still be in flight."""

import pytest
from shoal_lab.loopback.transport import Hop

from shoal.protocol.chunking import ChunkKind, parse
from shoal.protocol.messages import Action
from shoal.protocol.recipe import LocalTraining
from tests.helpers.fleets import answers, grouped_data, make_exact_fleet, names, slow_link, thetas, uploads_of

INPUTS = 20_000
"""Uploads of three chunks."""
SMALL_STEP = LocalTraining(epochs=0, steps=1, batch_size=0, lr=0.01)
"""No device fits its few samples in one round, after which its own updates would be tiny beside the mean."""


@pytest.mark.parametrize("count", [8, 24], ids=["first sent at QoS 0", "first sent at QoS 1"])
def test_long_queues_send_nothing_twice(tmp_path, logistic, count, tap):
    """Half a minute of queue a round: devices remind the aggregator, which has all of it to come, and asks for nothing."""
    data = grouped_data(count, n=10, inputs=INPUTS)
    with make_exact_fleet(
        tmp_path / "fleet", data, bundle=logistic(INPUTS, 4), rounds=2, quorum=1.0, faults=tap, local=SMALL_STEP
    ) as fleet:
        tap.rules.append(slow_link(fleet, fleet.client_id("aggregator"), count * 4 * fleet.plan.length / 30))
        records = fleet.run(1000)
        assert [r["contributed"] for r in records] == [count] * 3
        assert 30 <= records[0]["seconds"] < 31
        with_checkpoint_s = 30 * (count + 1) / count
        assert with_checkpoint_s <= records[1]["seconds"] < with_checkpoint_s + 1
        for name in names(count):
            assert len(uploads_of(fleet, tap, name)) == 3
            assert {c.action for c in answers(fleet, tap, name)} == {Action.ACK}
        kinds = [parse(p.payload)[0].kind for p in tap.sent(ending="/up")]
        assert kinds.count(ChunkKind.REMINDER) > count


@pytest.mark.parametrize("seconds", [4, 40, 400], ids=lambda s: f"{s} s a round")
def test_slow_links_get_no_model_twice(tmp_path, logistic, seconds, tap):
    """Nor the run's package, which is longer: the device checks for lost messages, and finds none."""
    data = grouped_data(2, n=10, inputs=INPUTS)
    options = {"algorithm": "ifca", "settings": {"k": "2"}, "rounds": 2, "quorum": 1.0, "deadline_s": 1e6}
    with make_exact_fleet(tmp_path / "fleet", data, bundle=logistic(INPUTS, 4), faults=tap, **options) as fleet:
        client = fleet.client_id("dev-01")
        tap.rules.append(slow_link(fleet, client, 2 * 4 * fleet.plan.length / seconds))
        assert [r["contributed"] for r in fleet.run(5000)] == [2] * 3
        large = [(p.topic, p.payload) for p in tap.sent(client=client, hop=Hop.DOWN) if len(p.payload) > 10_000]
        assert len(large) >= 3 * 2 * 2
        assert len(set(large)) == len(large)


def test_reminder_of_stored_upload_suffices(tmp_path, undisturbed, tap):
    """The answer got lost with it: the upload does not travel again."""
    with make_exact_fleet(tmp_path / "fleet", faults=tap, quorum=1.0) as fleet:
        hold = tap.lose(client=fleet.client_id("dev-00"), ending="/up")
        deaf = tap.lose(client=fleet.client_id("dev-01"), ending="/ctl", hop=Hop.DOWN)
        fleet.settle()
        fleet.kill_aggregator()
        tap.forgive(deaf)
        fleet.revive_aggregator()
        fleet.settle()
        assert [c.action for c in answers(fleet, tap, "dev-01")] == [Action.ACK] * 2
        assert len(uploads_of(fleet, tap, "dev-01")) == 1
        tap.forgive(hold)
        assert [r["contributed"] for r in fleet.run(100)] == [3, 3, 3, 3]
        assert thetas(fleet) == undisturbed
