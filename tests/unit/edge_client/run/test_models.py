"""Models assembled from received parts, each under its own mask, in the order of the plan's segments."""

import dataclasses

import numpy as np
import pytest

from crypto.mask.derivation import MaskContext, derive
from crypto.mask.masking import mask
from crypto.mask.secret import MaskSecret
from crypto.seal.envelope import GroupKey
from edge_client.followed_run import Run
from edge_client.run.models import ModelStore
from edge_client.run.package import segment_keys
from shoal.errors import UntrustedError
from shoal.protocol.codec import encode
from shoal.protocol.documents import SegmentSpec
from shoal.protocol.messages import (
    NO_TRANSFER,
    SHARED_MODEL,
    Announcement,
    Assignment,
    ModelHeader,
    ModelRef,
    Phase,
    Share,
)
from shoal.types import Segment
from tests.helpers.plans import run_plan

GROUP = GroupKey("demo", "broadcast", bytes(range(32)))
SHARED, OWN = SegmentSpec("shared", 40), SegmentSpec("cluster", 9)
D = 49
ORDER = Assignment(int(Phase.TRAIN), (0, 1), int(Share.TRAIN), train=True, evaluate=False, margins=False)
RNG = np.random.default_rng(3)
ORIGINS = RNG.standard_normal((2, D)).astype(np.float32)
OFFSETS = RNG.standard_normal((2, D)).astype(np.float32)


def run_of(*segments):
    """Return a run without its task, which these tests do not need."""
    plan = run_plan("ifca", origins=2, max_models=2, segments=segments)
    parts = tuple(Segment(s.name, s.length) for s in segments)
    context = MaskContext(
        fleet="demo", run_id=plan.run_id, epoch=1, task_digest=plan.task_digest, mode="permutation", segments=parts
    )
    key = derive(MaskSecret.from_bytes(b"s" * 32), context)
    return Run(
        plan=dataclasses.replace(plan, key_id=key.key_id),
        bundle=None,
        origins=ORIGINS,
        key=key,
        segment_keys=segment_keys(key),
    )


def label(run, model):
    return GROUP.topic_label(run.plan.run_id, model)


def ref(run, model, *, transfer=None, origin=None):
    origin = model % 2 if origin is None else origin
    return ModelRef(
        model=model,
        origin=origin,
        label=label(run, model),
        transfer=transfer or bytes([model % 255 + 1]) * 16,
        contributors=3,
        norm=1.0,
    )


def arrival(run, model, segment, whole, **changes):
    """Return (label, transfer, plain) of a segment of the masked vector ``whole`` (d,) as the aggregator sends it."""
    values = mask(whole, run.key).values[run.plan.span(segment)]
    plan = run.plan
    header = ModelHeader(
        fleet="demo",
        run_id=plan.run_id,
        epoch=plan.epoch,
        key_id=plan.key_id,
        model=model,
        origin=ref(run, model).origin,
        round=2,
        length=len(values),
        segment=segment,
    )
    plain = encode(dataclasses.replace(header, **changes)) + values.astype("<f4").tobytes()
    return label(run, model), ref(run, model).transfer, memoryview(plain)


def announced(run, *models, shared=None):
    p = run.plan
    return Announcement(
        fleet="demo",
        run=1,
        run_id=p.run_id,
        epoch=1,
        key_id=p.key_id,
        roster_sequence=3,
        round=2,
        nonce=bytes(16),
        deadline_s=9.0,
        finished=False,
        models=models,
        assignments=(ORDER,),
        assignment_of=(0,),
        mode=p.mode,
        shared=shared,
    )


@pytest.mark.parametrize("segments", [(SHARED, OWN), (OWN, SHARED)], ids=["shared first", "cluster first"])
def test_a_model_is_its_own_part_and_the_shared_one(segments):
    """theta_j has the shared coordinates of one origin and one offset, and its own in their places."""
    run = run_of(*segments)
    inventory = ModelStore(run, GROUP)
    for model in (0, 1):
        assert inventory.take(*arrival(run, model, "cluster", OFFSETS[model]))
    assert inventory.take(*arrival(run, SHARED_MODEL, "shared", OFFSETS[0], origin=0))
    shared = ref(run, SHARED_MODEL, origin=0)
    thetas = inventory.thetas(announced(run, ref(run, 0), ref(run, 1), shared=shared), ORDER)
    expected = ORIGINS + OFFSETS
    span = run.plan.span("shared")
    expected[1, span] = expected[0, span]
    np.testing.assert_array_equal(np.stack([thetas[0], thetas[1]]), expected)


def test_a_model_that_has_not_moved_is_its_origin():
    run = run_of(SHARED, OWN)
    shared = dataclasses.replace(ref(run, SHARED_MODEL, origin=1), transfer=NO_TRANSFER)
    models = [dataclasses.replace(ref(run, j), transfer=NO_TRANSFER) for j in (0, 1)]
    thetas = ModelStore(run, GROUP).thetas(announced(run, *models, shared=shared), ORDER)
    np.testing.assert_array_equal(thetas[0], np.concatenate([ORIGINS[1, :40], ORIGINS[0, 40:]]))
    np.testing.assert_array_equal(thetas[1], ORIGINS[1])


def test_whole_models_of_a_parted_run_are_taken_too():
    """FedAvg on a task with a shared segment sends one vector."""
    run = run_of(SHARED, OWN)
    inventory = ModelStore(run, GROUP)
    inventory.take(*arrival(run, 1, "", OFFSETS[1]))
    assignment = dataclasses.replace(ORDER, candidates=(1,))
    thetas = inventory.thetas(announced(run, ref(run, 1)), assignment)
    np.testing.assert_array_equal(thetas[1], ORIGINS[1] + OFFSETS[1])


def test_only_candidates_are_put_together():
    run = run_of(SHARED, OWN)
    inventory = ModelStore(run, GROUP)
    inventory.take(*arrival(run, 1, "cluster", OFFSETS[1]))
    inventory.take(*arrival(run, SHARED_MODEL, "shared", OFFSETS[0]))
    assignment = dataclasses.replace(ORDER, candidates=(1,))
    shared = ref(run, SHARED_MODEL)
    assert set(inventory.thetas(announced(run, ref(run, 0), ref(run, 1), shared=shared), assignment)) == {1}


@pytest.mark.parametrize("changes", [{"origin": 0}, {"transfer": b"\7" * 16}])
def test_a_model_that_differs_from_the_announcement_is_refused(changes):
    """Another origin than the announcement's, or another transfer."""
    run = run_of(SHARED, OWN)
    inventory = ModelStore(run, GROUP)
    inventory.take(*arrival(run, 1, "", OFFSETS[1]))
    assignment = dataclasses.replace(ORDER, candidates=(1,))
    with pytest.raises(UntrustedError, match="not the one that was announced"):
        inventory.thetas(announced(run, dataclasses.replace(ref(run, 1), **changes)), assignment)


def test_a_whole_model_is_no_part():
    """A transfer of all coordinates is refused if a cluster segment was announced."""
    run = run_of(SHARED, OWN)
    inventory = ModelStore(run, GROUP)
    inventory.take(*arrival(run, 1, "", OFFSETS[1]))
    assignment = dataclasses.replace(ORDER, candidates=(1,))
    shared = dataclasses.replace(ref(run, SHARED_MODEL), transfer=NO_TRANSFER)
    with pytest.raises(UntrustedError, match="not the one that was announced"):
        inventory.thetas(announced(run, ref(run, 1), shared=shared), assignment)


def test_arrivals_are_checked():
    run = run_of(SHARED, OWN)
    inventory = ModelStore(run, GROUP)
    assert not inventory.take(*arrival(run, 1, "cluster", OFFSETS[1], run_id=bytes(16)))
    with pytest.raises(UntrustedError, match="under another model's label"):
        inventory.take(label(run, 0), *arrival(run, 1, "cluster", OFFSETS[1])[1:])
    with pytest.raises(UntrustedError, match="under another mask key"):
        inventory.take(*arrival(run, SHARED_MODEL, "shared", OFFSETS[0], key_id=bytes(16)))
    name, transfer, plain = arrival(run, 1, "cluster", OFFSETS[1])
    longer, broken = bytes(plain) + bytes(4), bytes(plain[:-4]) + np.float32(np.nan).tobytes()
    with pytest.raises(UntrustedError, match="9 coordinates in 40 bytes"):
        inventory.take(name, transfer, memoryview(longer))
    with pytest.raises(UntrustedError, match="norm nan"):
        inventory.take(name, transfer, memoryview(broken))
