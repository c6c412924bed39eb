"""The largest size of each sealed message, from the run plan and the roster.

A receiver checks the size in a transfer's first chunk against these before it stores the chunk.

Example: a sealed mean of a run with d = 7850 coordinates has at most 2048 + 4 * 7850 bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from shoal import limits
from shoal.protocol.precision.lengths import encoded_bytes
from shoal.protocol.sums import precision_in
from shoal.types import DIGEST_BYTES

if TYPE_CHECKING:
    from shoal.protocol.documents import RunPlan

COORDINATE_BYTES: Final = 4
"""Of a state or an origin, and of updates and means in float32."""
MARGIN_BYTES: Final = 8
NAME_BYTES: Final = 2 + limits.MAX_NAME_CHARS
"""An encoded name of the largest length; names are ASCII."""
MEMBER_BYTES: Final = NAME_BYTES + 32 + 32
LISTED_BYTES: Final = MEMBER_BYTES + NAME_BYTES + 2 + limits.MAX_LABELS_CHARS
"""A device in a roster: member and labels, and its name once more if it is revoked."""
ANNOUNCED_MODEL_BYTES: Final = 64
"""Room for the Offer and the CheckpointRef of one model in an announcement; they take 56 bytes, labels being 16 hex digits."""
STATEMENT_BYTES: Final = 512
"""Room for a signed statement without its states; names take at most 2 * NAME_BYTES of it."""
STATE_BYTES: Final = 48
"""An encoded HeldState takes 38 bytes. A device names two states of each model, and of the segment that all share."""
SHARE_BYTES: Final = 1024
"""A device's sealed share for the keeper takes 560 bytes with the longest names, and 8 bytes for each margin."""
ORDER_BYTES: Final = 64
"""Room for one Assignment for each device. Most devices share one."""
FLEET_GROWTH_DEVICES: Final = 8192
"""Devices that the owner may have added since this party received its roster."""


def upload_bytes(plan: RunPlan, models: int = 0, attached: int = 0) -> int:
    """Return the largest sealed upload of a run.

    Args:
        plan: the run plan.
        models: candidates for which devices may report margins, if more than the plan's ``max_models``.
        attached: most bytes that may follow the update.
    """
    count = max(plan.max_models, models)
    signed = STATEMENT_BYTES + STATE_BYTES * 2 * (count + 1)
    vector = encoded_bytes(plan.length, precision_in(plan, 0.0))
    if plan.workers:
        vector = DIGEST_BYTES * len(plan.workers)
    if plan.keeper is not None:
        signed += SHARE_BYTES + MARGIN_BYTES * count + (COORDINATE_BYTES * limits.SKETCH_WORDS if plan.looks else 0)
    return limits.SEALED_HEAD_BYTES + vector + MARGIN_BYTES * count + signed + attached


def mean_bytes(plan: RunPlan) -> int:
    """Return the largest sealed mean of a run: that of a whole model."""
    return limits.SEALED_HEAD_BYTES + encoded_bytes(plan.length, plan.recipe.precision_down)


def checkpoint_bytes(plan: RunPlan, task_bytes: int) -> int:
    """Return the largest sealed checkpoint of a run with a task of ``task_bytes``, in the aggregator's own envelope."""
    return 2 * limits.SEALED_HEAD_BYTES + task_bytes + COORDINATE_BYTES * plan.length


def roster_bytes(devices: int) -> int:
    """Return the largest sealed roster of so many devices, all of which may be revoked."""
    return min(limits.MAX_GRANT_BYTES, limits.SEALED_HEAD_BYTES + devices * LISTED_BYTES)


def announcement_bytes(devices: int, models: int) -> int:
    """Return the largest sealed announcement for a fleet and a number of models."""
    return limits.FIRST_ANNOUNCEMENT_BYTES + devices * (2 + ORDER_BYTES) + models * (ANNOUNCED_MODEL_BYTES + 2)
