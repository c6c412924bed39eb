"""For any bytes, the codec returns the one message that they encode or raises WireError, and no other exception."""

import dataclasses
import types
import typing
from typing import Annotated

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import edge_client.models.store
import edge_client.storage.state
import shoal.owner.keys.directory
import shoal.protocol.messages
from shoal import limits
from shoal.errors import WireError
from shoal.hints import is_enum
from shoal.protocol import codec
from shoal.protocol.cells import Cell, OpenCells
from shoal.protocol.codec import decode, decode_prefix, encode
from shoal.protocol.documents import Member, ModelChoice, RunPlan, Schedule, SegmentSpec
from shoal.protocol.jobs import Job, MeanPlace, NodeKind, VectorNode
from shoal.protocol.messages import FULL_PERCENT, DeclineReason, ModelsHeld, Vitals
from shoal.protocol.recipe import LocalTraining, knobs
from shoal.protocol.requests import LATEST_RECORDS, OwnerRequest, RequestAction
from shoal.protocol.states import (
    RETAINED_STEPS,
    CheckpointRef,
    HeldState,
    MeanRef,
    Offer,
    RetainedStep,
    RoundModels,
    SealedCheckpoints,
    StateId,
    Statement,
    StateRecipe,
    Step,
    Term,
)

assert edge_client.models.store
assert edge_client.storage.state
assert shoal.owner.keys.directory
assert shoal.protocol.messages
KINDS = {k: t for k, t in codec._BY_KIND.items() if not t.__module__.startswith("tests.")}
MESSAGES = sorted(KINDS.values(), key=lambda t: t.__name__)
names = st.from_regex(r"[a-z0-9][a-z0-9-]{0,9}", fullmatch=True)
INTS = {"B": 8, "H": 16, "I": 32, "Q": 64}
SPECIAL = {  # fields whose values are narrower than their types
    "size": st.integers(1, limits.MAX_TRANSFER_BYTES),
    "chunk_bytes": st.integers(1, limits.MAX_PACKET_BYTES),
    "candidates": st.lists(st.integers(0, 65535), min_size=1, max_size=4).map(tuple),
    "fleet": names,
    "device": names,
    "name": names,
    "squared_norm": st.floats(0, allow_nan=False, allow_infinity=False),
}
WEIGHTS = (
    st.just(0.0) | st.floats(limits.MIN_WEIGHT, limits.MAX_WEIGHT) | st.floats(-limits.MAX_WEIGHT, -limits.MIN_WEIGHT)
)
few = settings(
    deadline=None, max_examples=settings.default.max_examples // 10, suppress_health_check=[HealthCheck.too_slow]
)


def values(hint):
    """Return a strategy for a field's type, read from its annotation as the codec reads it."""
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin is Annotated:
        mark = args[1]
        if isinstance(mark, codec._Fixed):
            return st.binary(min_size=mark.length, max_size=mark.length)
        if isinstance(mark, codec._Later):
            return later_fields()
        whole = st.integers(0, 2 ** INTS[mark.code] - 1)
        return st.lists(whole, max_size=5).map(tuple) if isinstance(mark, codec._Array) else whole
    if origin is tuple:
        return st.lists(values(args[0]), max_size=3).map(tuple)
    if origin in (typing.Union, types.UnionType):
        return st.none() | values(next(a for a in args if a is not type(None)))
    if is_enum(hint):
        return st.sampled_from(list(hint))
    if dataclasses.is_dataclass(hint):
        return messages(hint)
    if hint is float:
        return st.floats(allow_nan=False, allow_infinity=False)
    return {str: st.text(max_size=20), bytes: st.binary(max_size=40), bool: st.booleans()}[hint]


def later_fields():
    """Return a strategy for the fields of later versions: at most three, which fit MAX_LATER_BYTES."""
    pairs = st.tuples(st.integers(1, 65535), st.binary(max_size=60))
    return st.lists(pairs, max_size=3, unique_by=lambda pair: pair[0]).map(lambda found: tuple(sorted(found)))


def messages(kind):
    """Return a strategy for a registered message, by its schema."""
    if kind is RunPlan:
        return plans()
    if kind is SegmentSpec:
        return st.builds(SegmentSpec, st.sampled_from(["cluster", "shared"]), st.integers(1, 1 << 20))
    made = {
        Term: terms,
        StateRecipe: recipes,
        Step: steps,
        RetainedStep: retained_steps,
        SealedCheckpoints: attached,
    }
    if kind in made:
        return made[kind]()
    hints = typing.get_type_hints(kind, include_extras=True)
    fields = {f.name: SPECIAL.get(f.name, values(hints[f.name])) for f in dataclasses.fields(kind)}
    fields |= {name: within(knob) for name, knob in knobs(kind).items()}
    if kind.__name__ == "Decline":
        fields["reason"] = st.sampled_from([r for r in DeclineReason if r is not DeclineReason.UPLOAD])
    if kind.__name__ == "Setting":
        fields["name"] = st.text(max_size=9)
    if kind.__name__ == "Roster":
        fields["labels"] = st.just(())
        fields["devices"] = st.lists(messages(Member), max_size=3, unique_by=lambda m: m.name).map(tuple)
        return st.integers(0, 2**32 - 1).flatmap(
            lambda last: st.builds(kind, **fields | {"sequence": st.just(last), "keys_since": st.integers(0, last)})
        )
    if kind.__name__ == "RosterChange":
        fields["devices"] = st.integers(0, limits.MAX_DEVICES)
        return st.integers(0, 2**32 - 1).flatmap(
            lambda last: st.builds(kind, **fields | {"sequence": st.just(last), "after": st.integers(0, last)})
        )
    if kind.__name__ == "ReceivingKeys":
        fields["first"] = st.integers(1, 2**32 - limits.RECEIVING_KEYS)
        key = st.binary(min_size=32, max_size=32)
        fields["keys"] = st.lists(key, min_size=1, max_size=limits.RECEIVING_KEYS).map(tuple)
    if kind is Statement:
        fields["states"] = ascending(messages(HeldState))
    if kind is RoundModels:
        fields["offers"] = in_order(messages(Offer), lambda offer: offer.model)
        fields["steps"] = in_order(retained_steps(), lambda kept: kept.step.round, most=RETAINED_STEPS).map(
            lambda found: (*(kept for kept in found[:-1] if kept.step.recipes), *found[-1:])
        )
        fields["checkpoints"] = in_order(messages(CheckpointRef), lambda ref: ref.state)
    if kind in OWN:
        return OWN[kind](fields)
    if kind.__name__ == "Token":
        fields["broker"] = st.sampled_from(["mqtt://broker.example:1883", "mqtts://user:word@10.0.0.1"])
    return st.builds(kind, **fields)


def owner_requests(fields):
    """Return a strategy of requests: a run, a wish for now and a number of records only where the action takes them."""
    fields = fields | {
        "sequence": st.integers(1, 2**64 - 1),
        "run": st.just(0),
        "now": st.just(False),
        "records": st.just(0),
        "schedule": st.just(False),
    }
    more = {
        RequestAction.PAUSE: {"run": st.integers(1, 2**32 - 1)},
        RequestAction.RESUME: {"run": st.integers(1, 2**32 - 1)},
        RequestAction.STOP: {"run": st.integers(1, 2**32 - 1), "now": st.booleans()},
        RequestAction.LOGS: {"run": st.integers(1, 2**32 - 1), "records": st.integers(1, LATEST_RECORDS)},
    }
    return st.sampled_from(RequestAction).flatmap(
        lambda action: st.builds(OwnerRequest, **fields | {"action": st.just(action)} | more.get(action, {}))
    )


def vitals(fields):
    """Return a strategy of vitals, whose measurements are numbers."""
    measured = st.none() | st.floats(allow_nan=False, allow_infinity=False)
    battery = st.none() | st.integers(0, FULL_PERCENT)
    return st.builds(Vitals, **fields | {"load": measured, "temperature_c": measured, "battery_percent": battery})


def model_choices(fields):
    """Return a strategy of choices of a run up to the newest."""
    fields = fields | {"run_id": st.binary(min_size=16, max_size=16).filter(any)}
    return st.integers(1, 2**32 - 1).flatmap(
        lambda newest: st.builds(ModelChoice, **fields | {"latest": st.just(newest), "run": st.integers(1, newest)})
    )


def jobs(fields):
    """Return a strategy of jobs that compare the updates of some devices, or make means of them."""

    def of(devices):
        count = len(devices)
        nodes = tuple(VectorNode(NodeKind.UPDATE, (place,)) for place in range(count))
        digest = st.binary(min_size=32, max_size=32)
        made = fields | {
            "devices": st.just(devices),
            "digests": st.lists(digest, min_size=count, max_size=count).map(tuple),
            "nodes": st.just(nodes),
            "vectors": st.just(tuple(range(count))),
            "count": st.integers(0, count),
            "means": st.lists(messages(MeanPlace), min_size=count, max_size=count).map(tuple),
        }
        return st.builds(Job, **made)

    return st.lists(names, max_size=3).map(tuple).flatmap(of)


def schedules(fields):
    """Return a strategy of schedules, whose turn is below their number of runs."""
    within = {"interval_s": st.integers(1, limits.MAX_INTERVAL_S)}
    return st.integers(1, limits.MAX_SCHEDULED_RUNS).flatmap(
        lambda count: st.builds(
            Schedule, **fields | within | {"count": st.just(count), "turn": st.integers(0, count - 1)}
        )
    )


def models_held(fields):
    """Return a strategy of the models that a device holds: some of them, in ascending order."""
    few = st.integers(0, limits.MAX_FOLLOWED_MODELS)
    return few.flatmap(
        lambda count: st.builds(
            ModelsHeld, **fields | {"models": st.just(count), "own": st.just(tuple(range(0, count, 2)))}
        )
    )


def requests_to_the_keeper(fields):
    """Return a strategy of requests with at least one cell."""
    cells = st.lists(messages(Cell), min_size=1, max_size=3).map(tuple)
    return st.builds(OpenCells, **fields | {"cells": cells})


OWN = {
    OpenCells: requests_to_the_keeper,
    Schedule: schedules,
    ModelsHeld: models_held,
    OwnerRequest: owner_requests,
    Vitals: vitals,
    ModelChoice: model_choices,
    Job: jobs,
}


def in_order(items, key, most=3):
    """Return a strategy of tuples in ascending order by ``key``, each key once."""
    return st.lists(items, max_size=most, unique_by=key).map(lambda found: tuple(sorted(found, key=key)))


def ascending(states):
    """Return a strategy of tuples in ascending order by model and round, each pair once."""
    return in_order(states, lambda s: (s.model, s.round))


def terms(before=2**32):
    return st.builds(Term, st.integers(0, 65535), st.integers(0, before - 1), WEIGHTS)


ROUNDS = st.integers(1, 2**32 - 1)


def recipes(rounds=ROUNDS):
    return rounds.flatmap(
        lambda r: st.builds(
            StateRecipe,
            st.integers(0, 65535),
            st.just(r),
            st.lists(terms(before=r), min_size=1, max_size=3).map(tuple),
            st.none() | WEIGHTS,
        )
    )


def steps():
    def of_round(r):
        ids = st.builds(StateId, st.integers(0, 65535), st.integers(0, r))
        return st.builds(Step, st.just(r), ascending(recipes(st.just(r))), ascending(ids))

    return ROUNDS.flatmap(of_round)


@st.composite
def retained_steps(draw):
    step = draw(steps())
    needed = [recipe.model for recipe in step.recipes if recipe.mean is not None]
    return RetainedStep(step, tuple(dataclasses.replace(draw(messages(MeanRef)), model=model) for model in needed))


@st.composite
def attached(draw):
    models = tuple(sorted(draw(st.sets(st.integers(0, 65535), max_size=4))))
    return SealedCheckpoints(models, tuple(draw(st.integers(0, 2**32 - 1)) for _ in models))


def within(knob):
    """Return values that a knob allows."""
    if knob.choices:
        return st.sampled_from(knob.choices)
    if knob.kind is str:
        return st.text(max_size=20)
    if knob.kind is int:
        allowed = st.integers(knob.least, knob.most)
    else:
        least = knob.above if knob.least is None else knob.least
        most = knob.below if knob.most is None else knob.most
        allowed = st.floats(
            least,
            1e9 if most is None else most,
            exclude_min=knob.above is not None,
            exclude_max=knob.below is not None,
        )
    allowed = st.none() | allowed if knob.optional else allowed
    return allowed if knob.off is None else st.just(float(knob.off)) | allowed


@st.composite
def plans(draw):
    hints = typing.get_type_hints(RunPlan, include_extras=True)
    fields = {f.name: draw(SPECIAL.get(f.name, values(hints[f.name]))) for f in dataclasses.fields(RunPlan)}
    del fields["workers"]
    fields |= {"keeper": None, "most_summed": 0, "looks": 0}  # a keeper bounds most other fields
    origins = draw(st.integers(1, 4096))
    needed = {"seed": draw(st.integers(0, 2**64 - 1)), "local": draw(messages(LocalTraining))}
    fields |= {
        "recipe": dataclasses.replace(fields["recipe"], **needed),
        "segments": tuple(draw(st.lists(messages(SegmentSpec), min_size=1, max_size=2))),
        "origins": origins,
        "max_models": draw(st.integers(origins, 4096)),
    }
    length = sum(segment.length for segment in fields["segments"])
    shared = length >= 3 * limits.PART_BLOCK and draw(st.booleans())
    workers = st.lists(messages(Member), min_size=2, max_size=3, unique_by=lambda member: member.name)
    if fields["schedule"] is not None:
        fields["run_id"] = fields["schedule"].run_id(fields["schedule"].turn)
    return RunPlan(**fields, workers=tuple(draw(workers)) if shared else ())


def test_every_message_is_covered():
    """Every message of the project is covered."""
    assert len(MESSAGES) >= 22
    assert {t.__name__ for t in MESSAGES} >= {"RunPlan", "Announcement", "Upload", "Mark", "FleetSecrets", "Sealed"}


@pytest.mark.parametrize("kind", MESSAGES, ids=lambda t: t.__name__)
@few
@given(data=st.data())
def test_round_trip_truncation_and_flips(kind, data):
    """Encode and decode is the identity; every cut is refused; a flipped bit means another message or none, never the same."""
    value = data.draw(messages(kind))
    raw = encode(value)
    assert decode(raw, kind) == value
    assert encode(decode(raw, kind)) == raw
    cut = data.draw(st.integers(0, len(raw) - 1))
    rest = data.draw(st.binary(min_size=1, max_size=9))
    again, left = decode_prefix(raw + rest, kind)
    assert again == value
    assert bytes(left) == rest
    with pytest.raises(WireError):
        decode(raw[:cut], kind)
    bit = data.draw(st.integers(0, 8 * len(raw) - 1))
    flipped = bytearray(raw)
    flipped[bit // 8] ^= 1 << bit % 8
    try:
        other = decode(bytes(flipped), kind)
    except WireError:
        return
    assert encode(other) == bytes(flipped) != raw


def encode_head(kind):
    return codec.MAGIC + bytes([codec._KIND_OF[kind]])


def test_random_bytes_raise_nothing_else():
    """Thousands of random tails for each kind, with small and extreme bytes: faster than drawing them one by one."""
    rng = np.random.default_rng(0)
    for kind in MESSAGES:
        head = encode_head(kind)
        for _ in range(150):
            tail = rng.choice(np.array([0, 1, 2, 255, 97, 127], np.uint8), rng.integers(0, 200)).tobytes()
            try:
                value, rest = decode_prefix(head + tail, kind)
            except WireError:
                continue
            assert encode(value) + bytes(rest) == head + tail
