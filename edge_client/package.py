"""A run package opened: the owner's plan, the task and the origins."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from crypto.mask.keys import MaskContext, MaskKey, derive
from crypto.mask.modes.registry import MODES
from crypto.seal.envelope import open_from_group, read_head
from crypto.seal.grants import OWNER_NAME
from crypto.seal.signed import open_document
from edge_client.policy import check_plan
from edge_client.task import TaskBundle
from wire.codec import decode
from wire.documents import RunPackage, RunPlan
from wire.errors import IntegrityError, UntrustedError

if TYPE_CHECKING:
    from edge_client.enrolment import DeviceMembership
    from wire.types import Float32Vector


@dataclass(frozen=True, slots=True)
class Run:
    """A run that this device may follow.

    Attributes:
        origins: shape (origins, d), float32, read-only: what models are offsets from; the aggregator never has them.
        key: the mask; segment_keys: the same mask, segment by segment, for what travels in parts.
    """

    plan: RunPlan
    bundle: TaskBundle
    origins: Float32Vector
    key: MaskKey
    segment_keys: Mapping[str, MaskKey]


def task_purpose(plan_digest: bytes) -> str:
    """Return the purpose under which the owner seals a task to its devices."""
    return f"task/{plan_digest.hex()}"


def origins_purpose(run_id: bytes) -> str:
    """Return the purpose under which the owner seals a run's origins to its devices."""
    return f"origins/{run_id.hex()}"


def open_plan(package: bytes, membership: DeviceMembership) -> RunPlan:
    """Return the plan of a package, if it is the owner's and one that this device can follow.

    Raises:
        UntrustedError: it is not.
        WireError: the bytes are not a run package.
    """
    return _plan(decode(package, RunPackage), membership)


def open_run(package: bytes, membership: DeviceMembership) -> Run:
    """Return the run, with its task, origins and mask key.

    Raises:
        UntrustedError: not the owner's, or not sealed under the devices' content key.
        IntegrityError: task, origins or mask do not fit the plan.
    """
    parts = decode(package, RunPackage)
    plan = _plan(parts, membership)
    bundle = TaskBundle.from_bytes(bytes(_open(parts.task, task_purpose(plan.task_digest), membership)))
    if bundle.digest != plan.task_digest or bundle.segments != plan.mask_segments:
        raise IntegrityError("the task is not the one that the run plan names")
    raw = _open(parts.origins, origins_purpose(plan.run_id), membership)
    if len(raw) != 4 * plan.origins * plan.length:
        raise IntegrityError(f"{len(raw)} bytes of origins where {plan.origins} of {plan.length} belong")
    origins = np.frombuffer(raw, "<f4").reshape(plan.origins, plan.length)
    context = MaskContext(plan.fleet, plan.run_id, plan.epoch, plan.task_digest, plan.mode, plan.mask_segments)
    key = derive(membership.mask_secret(), context)
    if key.key_id != plan.key_id:
        raise IntegrityError(
            "this device's mask secret is not the one that the run was made with",
            hint="have the owner issue a new grant, and join again",
        )
    return Run(plan, bundle, origins, key, segment_keys(key))


def segment_keys(key: MaskKey) -> dict[str, MaskKey]:
    """Return the mask of each segment by its name, and the whole under the empty name; all bear the one key id."""
    names = (segment.name for segment in key.context.segments)
    parts = {n: MaskKey(key.context, key.key_id, t.length, (t,)) for n, t in zip(names, key.transforms, strict=True)}
    return {"": key, **parts}


def _plan(parts: RunPackage, membership: DeviceMembership) -> RunPlan:
    plan = open_document(parts.plan, RunPlan, membership.owner_key)
    check_plan(plan, fleet=membership.fleet, modes=tuple(MODES))
    return plan


def _open(sealed: bytes, purpose: str, membership: DeviceMembership) -> memoryview:
    head, at = read_head(sealed)
    if (head.fleet, head.purpose, head.sender) != (membership.fleet, purpose, OWNER_NAME):
        raise UntrustedError(f"a sealed {head.purpose.split('/')[0]} that is not this run's")
    return open_from_group(membership.content, sealed, head, at, membership.owner_key)
