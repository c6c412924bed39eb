"""The keeper's answers to the two requests of a look: its masked pads, then the groups that the plan's algorithm finds.

A look is used when its first request is answered, and the numbers that the owner dealt for it are good for that request alone: it
is answered again, and so is one second request that belongs to it. The cosines that the keeper learns go to no one
(`crypto.sums.looks`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, Final

import numpy as np

from aggregator.keeper.memory import KeeperMemory, LooksUsed
from aggregator.looks import open_deal
from aggregator.strategies.registry import find_strategy
from crypto.seal.identity import Identity
from crypto.sums.deals import Deal, cosines, keeper_deal, sketch_pads
from crypto.sums.looks import SKETCH
from crypto.sums.ring import WORD_BYTES
from shoal import limits
from shoal.digests import sha256
from shoal.errors import ShoalError, UntrustedError
from shoal.protocol.cells import CellSums, Look, OpenCells
from shoal.protocol.codec import encode
from shoal.protocol.documents import Member, RunPlan
from shoal.protocol.sums import KeeperShare
from shoal.types import DIGEST_BYTES

OPEN: Final = bytes(DIGEST_BYTES)
"""In place of the digest of a second request that has not come."""


def looked(
    request: OpenCells,
    plan: RunPlan,
    cell: Sequence[tuple[Member, KeeperShare]],
    *,
    told: CellSums,
    memory: KeeperMemory,
    identity: Identity,
    owner_key: bytes,
) -> tuple[CellSums, KeeperMemory]:
    """Return the answer to a request with a look, and the memory that is to be durable before it leaves.

    Args:
        request: with a look, whose shares have been checked.
        plan: the one in the request.
        cell: the devices of its only cell with their shares.
        told: the head of the answer.
        memory: what the keeper has opened.
        identity: the keeper's.
        owner_key: has signed the deal.
    """
    look, order = request.look, plan.task_run[1]
    assert look is not None
    used = memory.looks if memory.looks.run_id == order else LooksUsed(order)
    told = dataclasses.replace(told, used=len(used.begun))
    first = sha256(encode(dataclasses.replace(request, look=dataclasses.replace(look, product=b""))))
    reason = _refusal(look, plan, len(cell), used, memory, first, told.request)
    if reason:
        return dataclasses.replace(told, refused=reason), memory
    try:
        deal = _deal(look, plan, identity, owner_key)
        pads = sketch_pads([share.pad for _, share in cell])
        if not look.product:
            if look.index == len(used.begun):
                used = dataclasses.replace(used, begun=(*used.begun, first), ended=(*used.ended, OPEN))
            masked = deal.masked(pads).astype("<u4", copy=False).tobytes()
            told = dataclasses.replace(told, masked=masked, used=len(used.begun))
        else:
            told = _groups(look, plan, cell, deal, pads, told)
            ended = (*used.ended[: look.index], told.request, *used.ended[look.index + 1 :])
            used = dataclasses.replace(used, ended=ended)
    except ShoalError as error:
        return dataclasses.replace(told, refused=str(error)), memory
    return told, memory if used == memory.looks else dataclasses.replace(memory, looks=used)


def _refusal(
    look: Look, plan: RunPlan, devices: int, used: LooksUsed, memory: KeeperMemory, first: bytes, digest: bytes
) -> str:
    """Return which rule a look breaks; empty if none."""
    least = 2 * max(limits.LEAST_CELL, plan.recipe.min_contributors)
    if memory.opened and plan.run < memory.opened[-1].run:
        return f"run {memory.opened[-1].run} has begun since"
    if look.index >= plan.looks:
        return f"all {plan.looks} looks of the run are used" if plan.looks else "the plan has no looks"
    if not least <= devices <= limits.MOST_LOOKED:
        return f"a look at {devices} devices, and from {least} to {limits.MOST_LOOKED} are compared"
    if len(look.masked) != WORD_BYTES * devices * SKETCH:
        return f"{len(look.masked)} bytes for the sketches of {devices} devices"
    if len(look.product) not in (0, WORD_BYTES * devices * devices):
        return f"products of {len(look.product)} bytes for {devices} devices"
    begun = len(used.begun)
    if look.index > begun or (look.product and look.index == begun):
        return f"look {look.index} is not the next one"
    if look.index < begun and used.begun[look.index] != first:
        return f"look {look.index} was used before, for another request"
    if look.product and used.ended[look.index] not in (OPEN, digest):
        return f"look {look.index} was answered before, with other products"
    return ""


def _deal(look: Look, plan: RunPlan, identity: Identity, owner_key: bytes) -> Deal:
    """Return the keeper's numbers for a look.

    Raises:
        UntrustedError: the owner has not dealt them for this look.
    """
    dealt = open_deal(look.deal, plan, identity, owner_key)
    size = WORD_BYTES * limits.MOST_LOOKED**2
    if (dealt.index, len(dealt.share)) != (look.index, size):
        raise UntrustedError("numbers that the owner has dealt for another look")
    return keeper_deal(dealt.seed, look.index, dealt.share)


def _groups(
    look: Look,
    plan: RunPlan,
    cell: Sequence[tuple[Member, KeeperShare]],
    deal: Deal,
    pads: Any,
    told: CellSums,
) -> CellSums:
    devices = len(cell)
    masked = np.frombuffer(look.masked, "<u4").reshape(devices, SKETCH)
    found = cosines(deal, pads, masked, np.frombuffer(look.product, "<u4").reshape(devices, devices))
    false = tuple(m.name for (m, _), one in zip(cell, np.diagonal(found), strict=True) if not one)
    lengths = np.minimum([share.figures.norm for _, share in cell], plan.recipe.norm_limit)
    run = plan.without_statistics
    partitions = find_strategy(run.recipe.algorithm).partitions(run, found * np.outer(lengths, lengths))
    return dataclasses.replace(told, partitions=partitions, false=false)
