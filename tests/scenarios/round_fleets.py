"""Keys, means and states of loopback fleets under round keys, and means and steps that a rogue aggregator makes up."""

import dataclasses
import hashlib

import numpy as np

from aggregator.rounds.snapshot import load
from aggregator.storage.store import Store
from aggregator.strategies.registry import make_strategy
from crypto.mask.derivation import derive, segment_keys
from crypto.mask.masking import mask, unmask
from shoal.protocol.chunking import ChunkKind
from shoal.protocol.codec import encode
from shoal.protocol.states import (
    MeanHeader,
    MeanRef,
    Offer,
    RetainedStep,
    StateId,
    StateRecipe,
    Step,
    Term,
    TranscriptEntry,
    mean_number,
)
from shoal.protocol.topics import Topics
from shoal.types import MaskedVector
from tests.helpers.fleets import (
    announcements,
    group_key,
    tell,
)


def round_keys(fleet, round_):
    """Return the keys of a round under the newest key version, which the owner can always derive."""
    version = fleet.stage.fleet.version_key
    chain = version.begin_run_of(fleet.plan)
    chain.skip_to(round_)
    return chain.take()


def round_masks(fleet, round_):
    """Return segment -> mask key of a round under the newest key version; "" is the whole vector."""
    keys, plan = round_keys(fleet, round_), fleet.plan
    return segment_keys(derive(keys.mask, keys.context_of(plan)))


def taken_over(fleet, tap):
    """Let round 1 be served and its aggregator die before round 2; return the announcement of round 1."""
    fleet.broker.pump()
    for device in fleet.devices.values():
        device.worker.work()
    fleet.broker.pump()
    fleet.kill_aggregator()
    (first,) = announcements(fleet, tap)
    return first


def relayed_steps(fleet):
    """Return the retained steps of the aggregator's last snapshot with their masked means, oldest first."""
    store = Store(fleet.stage.aggregator_dir / f"run-{fleet.plan.run:06d}", fleet.plan)
    try:
        snapshot = store.restore()
    finally:
        store.close()
    kind = make_strategy(fleet.plan).state_type
    _, held = load(kind, snapshot.document, snapshot.vectors)
    return held.steps


def clear_means(fleet, kept, segment_of=lambda _model: ""):
    """Return model -> the unmasked mean (d,) float32 of a retained step."""
    masks = round_masks(fleet, kept.step.round)
    found = {}
    for mean in kept.means:
        key = masks[segment_of(mean.model)]
        found[mean.model] = unmask(MaskedVector(mean.vector.copy(), key.key_id), key)
    return found


def held_states(fleet, name):
    """Return StateId -> vector (d,) float32 of the states that a device holds in memory."""
    return {id_: state.theta for id_, state in fleet.devices[name].runtime._models.states.held.items()}


def publish_mean(of, values, place=(0, 1, ""), *, contributors=2, clear=False, **header):
    """Publish a mean under its label as the fleet's aggregator does, and return its reference.

    Args:
        of: a fleet whose aggregator is dead.
        values: (d,) as they travel; with ``clear`` they are masked before.
        place: model, round and segment of the mean.
        contributors: as it is announced.
        clear: whether ``values`` are in clear.
        header: fields of its header that differ from those of a true one.
    """
    plan, (model, round_, segment) = of.plan, place
    key = round_masks(of, round_)[segment]
    values = np.ascontiguousarray(values, np.float32)
    values = mask(values, key).values if clear else values
    fields = {"round": round_, "key_id": key.key_id, "model": model, "length": len(values), "segment": segment}
    plain = encode(MeanHeader(**{"fleet": plan.fleet, "run_id": plan.run_id, **fields, **header}))
    label = group_key(of).topic_label(plan.run_id, mean_number(model, round_))
    topic = Topics(plan.fleet).model(label)
    body = values.astype("<f4").tobytes()
    transfer = tell(of, topic, "mean", plain + body, ChunkKind.MEAN, round_=round_)
    return MeanRef(model, label, transfer, contributors, hashlib.sha256(body).digest())


def moved(held, *means, round_=1, weight=1.0, added=1.0, limit=10.0):
    """Return announced models after one more step, in which each model of ``means`` has moved by its mean."""
    before = {offer.model: offer.at for offer in held.offers}
    recipes = []
    for mean in sorted(means, key=lambda m: m.model):
        at = before[mean.model]
        recipes.append(StateRecipe(mean.model, round_, (Term(at.model, at.round, weight),), added))
    after = before | {mean.model: StateId(mean.model, round_) for mean in means}
    step = Step(round_, tuple(recipes), tuple(sorted({*before.values(), *after.values()})), limit)
    retained = RetainedStep(step, tuple(sorted(means, key=lambda m: m.model)))
    offers = tuple(Offer(model, at) for model, at in sorted(after.items()))
    return dataclasses.replace(held, offers=offers, steps=(*held.steps, retained))


def continued(announcement, before):
    """Return an announcement with the transcript that follows from the announced models ``before``."""
    a, held = announcement, announcement.held
    newest = held.steps[-1] if held.steps else None
    entry = TranscriptEntry(
        previous=before.transcript,
        fleet=a.fleet,
        run_id=a.run_id,
        round=a.round,
        offers=held.offers,
        step=None if newest is None else newest.step,
        means=() if newest is None else tuple(mean.digest for mean in newest.means),
    )
    return dataclasses.replace(a, held=dataclasses.replace(held, transcript=entry.digest))
