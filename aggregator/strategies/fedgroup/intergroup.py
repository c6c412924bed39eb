"""FedGroup's inter-group aggregation: fedgroup Alg. 2, lines 16 to 19.

Each group's model w_j becomes w_j + eta_g sum over l != j of w_l / |w_l|: whole models, not offsets. With
w_j = a_j origin + unmask(O_j) the sum is taken on the scales a_j and on the masked offsets O_j by themselves, so the
aggregator needs no origin, only the lengths |w_l|, which masks and origins hide from it. Devices report the length of the
model that they have trained, |w_l + delta_i|. With weights p_i, and since the mean of squares is the square of the mean
and the variance,

    |w_l + mean delta|^2 = sum p_i |w_l + delta_i|^2 - sum p_i |delta_i|^2 + |mean delta|^2

which is exactly the length after the intra-group update. A group that did not move this round counts with its last known
length (inter-group aggregation may have changed it since), and not at all without one.

Devices may report false lengths. All devices of a group start from one model, so a true length differs from the model's by no
more than the device's own update is long: the medians of these bounds limit every report, and change no true one while most
are true. A group of absurd length adds nothing to the others' models. A length near zero gives its group a huge share of them.
If a resulting model is one that devices would refuse (`fits`), no group is changed by inter-group aggregation in this round.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from aggregator.strategies.base import ClientUpdate, ClusterModel, norm_of, starts_of, weights_of
from shoal.errors import IntegrityError
from shoal.limits import MAX_SCALE, MIN_WEIGHT
from shoal.types import Float32Vector


def length_after(
    given: list[ClientUpdate], before: ClusterModel, after: ClusterModel, weighting: str, cap: float = 0.0
) -> float:
    """Return the l2 norm of a group's model after its intra-group update.

    Args:
        given: the updates whose mean moved ``before`` to ``after``, each with ``model_norm``.
        before: the group's slot when the round began.
        after: the same, moved.
        weighting: samples or uniform, as the mean was weighted.
        cap: the weight cap of that mean.

    Raises:
        IntegrityError: a contribution lacks the norm of the trained model.
    """
    missing = [c.device for c in given if not c.model_norm]
    if missing:
        raise IntegrityError(f"{missing[0]} did not report the norm of its model, which eta_g needs")
    weights = weights_of(given, weighting, cap)
    lengths, norms = np.array([c.model_norm for c in given]), np.array([c.norm for c in given])
    lengths = np.clip(lengths, np.median(lengths - norms) - norms, np.median(lengths + norms) + norms)
    squares = lengths**2 - norms**2
    assert after.offset is not None
    step = norm_of(after.offset if before.offset is None else after.offset - before.offset)
    return math.sqrt(max(float(np.average(squares, weights=weights)) + step**2, 0.0))


def aggregate(
    slots: tuple[ClusterModel, ...], lengths: tuple[float, ...], eta: float, round_: int
) -> tuple[ClusterModel, ...]:
    """Return the groups' models after inter-group aggregation.

    Args:
        slots: after the intra-group update.
        lengths: the models' l2 norms; 0 where unknown: such a group adds to no other.
        eta: eta_g.
        round_: becomes the slots' version.
    """
    return tuple(_plus_others(slots, lengths, j, eta, round_) for j in range(len(slots)))


def fits(slot: ClusterModel, longest: float) -> bool:
    """Whether devices take such a model: its weights in bounds, its offset finite and not longer than ``longest``."""
    return slot.scale + sum(weight for weight, _ in slot.others) <= MAX_SCALE and slot.norm <= longest


def _plus_others(
    slots: tuple[ClusterModel, ...], lengths: tuple[float, ...], j: int, eta: float, round_: int
) -> ClusterModel:
    own = slots[j]
    # A recipe can't have a smaller weight, and it would change nothing: the length is false or absurd.
    lengths = tuple(length if length and eta / length >= MIN_WEIGHT else 0.0 for length in lengths)
    others = [(s, eta / length) for i, (s, length) in enumerate(zip(slots, lengths, strict=True)) if i != j and length]
    if not others:
        return own
    starts = starts_of([(1.0, own), *((share, s) for s, share in others)])
    scale = starts.pop(own.origin)
    moved = dataclasses.replace(
        own, scale=scale, others=tuple((weight, number) for number, weight in starts.items()), version=round_
    )
    extra: Float32Vector | None = None
    for s, share in others:
        if s.offset is not None:
            with np.errstate(over="ignore", invalid="ignore"):  # a length near 0 may overflow: `fits` checks
                piece = s.offset * np.float32(share)
                extra = piece if extra is None else extra + piece
    if extra is None:
        return moved
    with np.errstate(over="ignore", invalid="ignore"):
        return moved.moved(extra, min(s.contributors for s, _ in others if s.offset is not None), round_)
