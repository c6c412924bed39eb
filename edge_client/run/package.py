"""The plan and the task in the owner's run packages."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crypto.mask.modes.registry import MODES
from edge_client.run.policy import check_plan
from shoal.errors import IntegrityError
from shoal.membership.plans import open_plan as open_owners_plan
from shoal.protocol.codec import decode
from shoal.protocol.documents import RunPackage, RunPlan
from shoal.task.bundle import TaskBundle

if TYPE_CHECKING:
    from edge_client.membership import DeviceMembership


def task_purpose(plan_digest: bytes) -> str:
    """Return the purpose under which the owner seals a task to its devices."""
    return f"task/{plan_digest.hex()}"


def origins_purpose(run_id: bytes) -> str:
    """Return the purpose under which the owner seals a run's origins to its devices."""
    return f"origins/{run_id.hex()}"


def owners_plan(package: bytes | memoryview, membership: DeviceMembership) -> RunPlan:
    """Return the plan of a package after checking the owner's signature alone; see `check_followable` for the rest.

    Raises:
        UntrustedError: the plan is not signed by the owner.
        WireVersionError: the run is in a wire version that this software does not speak.
        WireError: the bytes are not a run package.
    """
    return open_owners_plan(decode(package, RunPackage).plan, membership.owner_key)


def check_followable(plan: RunPlan, membership: DeviceMembership) -> None:
    """Check that this device can follow a plan.

    Raises:
        UntrustedError: as `check_plan`.
    """
    check_plan(plan, fleet=membership.fleet, modes=tuple(MODES))


def open_plan(package: bytes | memoryview, membership: DeviceMembership) -> RunPlan:
    """Return the plan of a package that the owner signed and that this device can follow.

    Raises:
        UntrustedError: the plan is not signed by the owner, or this device can't follow it.
        WireError: the bytes are not a run package.
    """
    plan = owners_plan(package, membership)
    check_followable(plan, membership)
    return plan


def task_of(data: memoryview, plan: RunPlan) -> TaskBundle:
    """Return the task bundle in ``data``.

    Raises:
        IntegrityError: it is not the task that the plan names.
    """
    bundle = TaskBundle.from_bytes(bytes(data))
    if bundle.digest != plan.task_digest or bundle.segments != plan.mask_segments:
        raise IntegrityError("the task is not the one that the run plan names")
    return bundle
