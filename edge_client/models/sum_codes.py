"""A device's codes in a run with a keeper: made for its update, and checked in each mean that it gets (`crypto.sums.codes`)."""

from __future__ import annotations

from itertools import chain
from typing import TYPE_CHECKING

import numpy as np

from crypto.mask.derivation import subkey
from crypto.sums.codes import CHECKS, Codes, code, matches
from crypto.sums.ring import WORD_BYTES, Words, average, step_in
from shoal import limits
from shoal.errors import NoSumError, UntrustedError
from shoal.protocol.codec import decode
from shoal.protocol.sums import MOST_CELLS, SumCodes

if TYPE_CHECKING:
    from crypto.mask.schedule import RoundKeys
    from shoal.protocol.documents import RunPlan
    from shoal.types import Float32Vector


def code_key(keys: RoundKeys, plan: RunPlan, segment: str, unit: float) -> bytes:
    """Return the 32-byte key of the codes of a segment in a round, which follows from the secret of the round's mask.

    Each announced unit has another key, so that a sum passes under the unit in which it was made alone.
    """
    span = plan.span(segment)
    return subkey(keys.mask, keys.context_of(plan), segment, span.stop - span.start, f"sum code {unit!r}")


def update_codes(words: Words, keys: RoundKeys, plan: RunPlan, model: int, unit: float) -> Codes:
    """Return the codes of an update's fixed-point numbers (d,), `CHECKS` for each segment of the plan."""
    values = words.view(np.int32)
    made = (
        code(values[plan.span(segment.name)], code_key(keys, plan, segment.name, unit), {model: 1})
        for segment in plan.segments
    )
    return tuple(chain.from_iterable(made))


def checked_mean(body: memoryview, keys: RoundKeys, plan: RunPlan, segment: str, model: int) -> Float32Vector:
    """Return the masked mean, (n,) float32, of an opened sum.

    Args:
        body: the sum, n numbers of 32 bits, and its `SumCodes`.
        keys: of the round.
        plan: the owner's.
        segment: its name; empty for whole vectors.
        model: that moves by it.

    Raises:
        NoSumError: it is not a sum of updates of so many devices of this round.
        UntrustedError: of too few or too many devices.
        WireError: the bytes are no such sum.
    """
    span = plan.span(segment)
    size = WORD_BYTES * (span.stop - span.start)
    told = decode(body[size:], SumCodes)
    counts = dict(zip(told.models, told.counts, strict=False))
    total, names = sum(told.counts), [segment] if segment else [s.name for s in plan.segments]
    if (
        not len(counts) == len(told.models) == len(told.counts) <= MOST_CELLS
        or min(told.counts, default=0) < limits.LEAST_CELL
        or total > plan.most_summed
        or len(told.codes) != CHECKS * len(names)
    ):
        raise UntrustedError(f"a sum of {told.counts} updates with {len(told.codes)} codes")
    values, start = np.frombuffer(body[:size], "<i4"), span.start
    for at, name in enumerate(names):
        own = plan.span(name)
        part = values[own.start - start : own.stop - start]
        if not matches(
            part, code_key(keys, plan, name, told.unit), counts, told.codes[CHECKS * at : CHECKS * (at + 1)]
        ):
            raise NoSumError(f"a mean of round {keys.round} that is no sum of {total} updates of its devices", model)
    return average(values.view("<u4"), total, step_in(plan, told.unit))
