"""Means and checkpoints on the broker: each published once, under its label."""

import dataclasses

import numpy as np

from aggregator.publisher import RelayedModels
from aggregator.rounds.held_models import KeptMean, KeptStep, offers_of
from aggregator.strategies.base import ClusterModel, RoundPlan
from shoal.protocol import channels
from shoal.protocol.codec import decode_prefix
from shoal.protocol.documents import SegmentSpec
from shoal.protocol.messages import SHARED_MODEL
from shoal.protocol.states import MeanHeader, StateId, checkpoint_number, mean_number
from tests.helpers.held import held_plan, rounds
from tests.helpers.plans import ROUND_KEY


class Broker:
    """Records what is published; a transfer id is its number."""

    def __init__(self):
        self.sent = []
        self.relayed = RelayedModels(self.publish, lambda _, number: f"label-{number}")

    def publish(self, channel, plain, round_, label):
        self.sent.append((channel, b"".join(plain), round_, label))
        return len(self.sent).to_bytes(16, "big")

    def announce(self, held):
        plan = RoundPlan(held.closed + 1, {0: ClusterModel(max(held.states.names))}, {})
        run = held_plan()
        offers = offers_of(plan, held.states)
        return self.relayed.announce(run, held, offers, 4, signers=run.recipe.min_contributors)


def test_mean_names_its_segment():
    """The mean of a segment says which one it is."""
    broker = Broker()
    run = held_plan(segments=(SegmentSpec("shared", 4), SegmentSpec("cluster", 2)))
    held = rounds(1)
    (kept,) = held.steps
    recipes = (kept.step.recipes[0], dataclasses.replace(kept.step.recipes[0], model=SHARED_MODEL))
    means = tuple(KeptMean(m, 2, ROUND_KEY, np.ones(n, np.float32)) for m, n in ((0, 2), (SHARED_MODEL, 4)))
    step = KeptStep(dataclasses.replace(kept.step, recipes=recipes), means)
    announced = broker.relayed.announce(
        run, dataclasses.replace(held, steps=(step,)), {}, 4, signers=run.recipe.min_contributors
    )
    found = [decode_prefix(plain, MeanHeader)[0] for _, plain, _, _ in broker.sent]
    assert [(h.model, h.segment, h.length) for h in found] == [(0, "cluster", 2), (SHARED_MODEL, "shared", 4)]
    assert len({mean.label for mean in announced.steps[0].means}) == 2


def test_each_mean_is_published_once():
    """Each mean and checkpoint is published once and named in the announcement."""
    broker = Broker()
    held = rounds(1, seal=lambda _: "dev-1")
    first = broker.announce(held)
    assert [s[0] for s in broker.sent] == [channels.MEAN, channels.CHECKPOINT]
    header, body = decode_prefix(broker.sent[0][1], MeanHeader)
    assert (header.round, header.model, header.key_id, header.length, header.segment) == (1, 0, ROUND_KEY, 6, "")
    assert bytes(body) == held.steps[0].means[0].vector.tobytes()
    assert broker.sent[1][1] == held.certified[0].data.tobytes()
    (mean,), (checkpoint,) = first.steps[0].means, first.checkpoints
    assert (mean.label, mean.contributors) == (f"label-{mean_number(0, 1)}", 5)
    assert (checkpoint.state, checkpoint.round, checkpoint.key_version) == (StateId(0, 0), 1, 3)
    assert checkpoint.label == f"label-{checkpoint_number(0)}"
    assert len(first.statements) == 2
    assert broker.announce(held) == first
    assert len(broker.sent) == 2
    later = broker.announce(rounds(1, held=held))
    (before,) = first.steps
    assert later.steps[0].means == before.means
    assert later.steps[0].step == dataclasses.replace(before.step, open=()), "only the newest step names open states"
    assert [s[2] for s in broker.sent] == [1, 1, 2]


def test_another_key_publishes_all_again():
    broker = Broker()
    held = rounds(2, seal=lambda _: "dev-1")
    broker.announce(held)
    count = len(broker.sent)
    broker.relayed.clear()
    broker.announce(held)
    assert len(broker.sent) == 2 * count
