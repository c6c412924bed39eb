"""Means that a minority of false updates can't decide: rules that give each update of one cluster a weight.

A rule sees the updates' dot products and nothing else, and its result is a linear combination of the updates. Permutations,
sign flips and rotations keep dot products, so the weights on masked updates are those on clear ones. Rules that look at single
coordinates, such as a coordinate-wise median, lose this under a rotation and are left out for that reason.

Multi-Krum and nearest-neighbour mixing leave out a fixed share of the updates in every round, false or not. The geometric median
and centred clipping leave none out. The filter leaves out those that point against all others, if these agree among
themselves; devices that merely differ from each other keep their weights.

Example: three equal updates, and a fourth that is their opposite, times ten.

    >>> import numpy as np
    >>> from aggregator.numerics.robust import robust_weights
    >>> updates = np.array([[1.0], [1.0], [1.0], [-10.0]])
    >>> robust_weights("multi-krum", updates @ updates.T, np.ones(4)).values
    array([1., 1., 1., 0.])

Means of figures that devices report, which one false figure of five or more can't decide.

Trimming leaves out the smallest and the largest figure, whatever their weights are; winsorising replaces them by their
neighbours. So a false figure counts no more than one within the range of the others. Of fewer than five figures at most two would
be left, so they stay as they are: there one false figure decides.

Example: five margins, of which one is false.

    >>> import numpy as np
    >>> from aggregator.numerics.robust import inner, winsorised
    >>> margins = np.array([0.2, -5.0, 0.1, 0.3, 0.2])
    >>> float(margins[inner(margins)].mean().round(3)), winsorised(margins).tolist()
    (0.167, [0.2, 0.1, 0.1, 0.2, 0.2])
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

from aggregator.numerics.averaging import check_weights
from aggregator.numerics.checks import NumericsError, check_square

Vector = NDArray[np.float64]
Matrix = NDArray[np.float64]
Flags = NDArray[np.bool_]
Towards = Callable[[Flags], Vector]
"""Returns the sum of each update's cosines with the chosen updates, shape (n,), float64; a zero update has cosine 0 with all."""
FILTER: Final = "filter"
"""The rule that leaves out what points against all others; it alone knows which devices it left out before."""

LEAST_UPDATES: Final = 4
"""Fewest updates among which one can be an outlier; fewer get the plain mean."""
FALSE_SHARE: Final = 0.3
"""Largest share of the updates that a rule takes for false."""
AGREEMENT: Final = 0.25
"""The filter leaves updates out only if each of the others has at least this cosine with the mean of the rest."""
FEWEST_FILTERED: Final = 8
"""Fewest updates that the filter judges. In smaller clusters a device that is the only one of its kind looks like an attacker."""
FEWEST_AGREEING: Final = 7
"""Fewest updates that must agree before the filter leaves another out: of fewer it is too often by chance that they do."""
GAP: Final = 0.5
"""Least difference between these cosines and those of the updates that are left out."""
LONG: Final = 2.0
"""The filter shortens an update longer than this many median norms, to the median norm."""
MEDIAN_STEPS: Final = 200
"""Most steps of the geometric median."""
MEDIAN_TOLERANCE: Final = 1e-10
"""The geometric median has been found when no weight changes by more than this."""
SMOOTHING: Final = 1e-3
"""Least distance in the geometric median, in median norms: below it float32 products do not tell two vectors apart."""
CLIPPING_STEPS: Final = 20
"""Steps of centred clipping."""
APART_BELOW: Final = 0.25
"""An update is an outlier if it keeps less than this share of its weight in the plain mean."""
SMALLEST: Final = 1e-9
"""Weights below this share of the largest count as 0."""
ROUNDING: Final = 1e-6
"""What rounding makes of a cosine of 0, and of the squared length of a sum of directions that is 0."""


@dataclass(frozen=True, slots=True)
class RobustWeights:
    """The result of a rule.

    Attributes:
        values: shape (n,), float64, none negative: the weights of the updates in the mean. They add up to the sum of the plain
            weights, or to less if the rule shortens the mean.
        apart: shape (n,), bool: updates that keep less than `APART_BELOW` of their weight in the plain mean.
        against: shape (n,), bool: updates that the filter leaves out for their direction.
    """

    values: Vector
    apart: Flags
    against: Flags


def robust_weights(
    rule: str, products: Matrix | tuple[Vector, Towards], weights: Vector, before: Flags | None = None
) -> RobustWeights:
    """Return the weights by ``rule`` of updates with the given dot products.

    Args:
        rule: ``off``, ``filter`` or a key of `RULES`.
        products: shape (n, n), float64: the Gram matrix; or the norms, shape (n,), float64, and the sums of cosines, which are
            all that the filter needs.
        weights: shape (n,), float64: the weights of the plain mean.
        before: shape (n,), bool: updates of devices that the filter left out for their direction when they were last in a mean.

    Raises:
        NumericsError: no such rule, or ``products`` or ``weights`` hold values that no mean can use.
    """
    lengths, towards = products if isinstance(products, tuple) else _within(products)
    plain = check_weights(weights, len(lengths))
    if rule not in ("off", FILTER, *RULES):
        raise NumericsError(f"no robust rule {rule!r}; there are off, {FILTER}, {', '.join(RULES)}")
    none = np.zeros(len(plain), bool)
    if len(plain) < (FEWEST_FILTERED if rule == FILTER else LEAST_UPDATES) or rule == "off":
        return RobustWeights(plain, none, none)
    against = opposed(lengths, towards, none if before is None else before) if rule == FILTER else none
    shares = plain / plain.sum()
    found = shortened(lengths, shares, against) if rule == FILTER else RULES[rule](np.asarray(products, float), shares)
    found = np.where(found < SMALLEST * found.max(), 0.0, found)
    if not found.any() or np.array_equal(found, shares):
        return RobustWeights(plain, none, none)
    values = found * plain.sum()
    return RobustWeights(values, (plain > 0) & (values < APART_BELOW * plain), against)


def _within(products: Matrix) -> tuple[Vector, Towards]:
    """Return the norms of updates and their sums of cosines by their Gram matrix, shape (n, n), float64."""
    gram = check_square(products, "the Gram matrix", least=1)
    lengths = np.sqrt(np.maximum(np.diagonal(gram), 0.0))
    safe = np.where(lengths > 0.0, lengths, 1.0)
    return lengths, lambda chosen: (gram[:, chosen] / np.outer(safe, safe[chosen])).sum(axis=1)


def most_false(count: int) -> int:
    """Return how many of ``count`` updates multi-Krum and nearest-neighbour mixing take for false.

    Krum needs ``count >= 2 f + 3`` (Blanchard et al., 2017, Proposition 4.2).
    """
    return max(0, min(int(FALSE_SHARE * count), (count - 3) // 2))


def squared_distances(gram: Matrix) -> Matrix:
    """Return ``|u_i - u_j|^2``, shape (n, n), float64, of vectors with these dot products."""
    squared = np.diagonal(gram)
    return np.maximum(squared[:, None] + squared[None, :] - 2.0 * gram, 0.0)


def distances_to(gram: Matrix, mix: Vector) -> Vector:
    """Return each vector's distance from the combination ``sum_j mix_j u_j``, shape (n,), float64."""
    squared = np.diagonal(gram) - 2.0 * (gram @ mix) + mix @ gram @ mix
    distances: Vector = np.sqrt(np.maximum(squared, 0.0))
    return distances


def opposed(lengths: Vector, towards: Towards, before: Flags) -> Flags:
    """Return which updates point against all others, while these agree among themselves; none where that is not clear.

    The others are found in steps: from all updates on, each step keeps those with a cosine of at least 0 with the mean direction
    of the kept ones, without its own. What remains out is opposed if it is at most `FALSE_SHARE` of all, if at least
    `FEWEST_AGREEING` others remain, each with a cosine of at least `AGREEMENT`, and if these lie at least `GAP` above those that
    are out. Groups of equal size and
    label skew do not look like that. Updates from ``before`` stay out until the others agree again and they agree with them:
    devices whose model fits their data send updates in any direction, and one that works against them would slip in.

    Args:
        lengths: shape (n,), float64.
        towards: see `Towards`.
        before: shape (n,), bool: those that were out when their devices were last in a mean.

    Returns:
        shape (n,), bool; less than half of the updates.
    """
    kept = np.ones(len(lengths), bool)
    agreement = _agreement(lengths, towards, kept)
    for _ in lengths:
        following = agreement >= -ROUNDING
        if (following == kept).all() or 2 * following.sum() <= len(kept):
            break
        kept = following
        agreement = _agreement(lengths, towards, kept)
    out = ~kept
    if 0 < out.sum() <= FALSE_SHARE * len(kept) and kept.sum() >= FEWEST_AGREEING:
        least = float(agreement[kept].min())
        if least >= AGREEMENT and least - float(agreement[out].max()) >= GAP:
            return out
    if not before.any() or 2 * before.sum() >= len(kept):
        return np.zeros(len(kept), bool)
    agreement = _agreement(lengths, towards, ~before)
    agree = agreement[~before].min() >= AGREEMENT
    still: Flags = before & ~(agree & (agreement >= AGREEMENT))
    return still


def _agreement(lengths: Vector, towards: Towards, kept: Flags) -> Vector:
    """Return each update's cosine with the sum of the kept updates' directions but its own, shape (n,); 0 without any."""
    whole, own = towards(kept), np.where(kept & (lengths > 0.0), 1.0, 0.0)
    others = whole - own
    squared = whole[kept].sum() - 2.0 * np.where(kept, others, 0.0) - own
    found: Vector = np.where(squared > ROUNDING, others / np.sqrt(np.maximum(squared, ROUNDING)), 0.0)
    return found


def shortened(lengths: Vector, shares: Vector, against: Flags) -> Vector:
    """Return shares without those updates that are ``against`` the others, and with long updates shortened to the median norm.

    Args:
        lengths: shape (n,), float64.
        shares: shape (n,), float64, of sum 1: the plain mean's.
        against: shape (n,), bool: left out; the others share their weight.
    """
    usual = float(np.median(lengths[~against]))
    kept = np.where(against, 0.0, shares)
    if not kept.any():
        return shares
    if against.any():
        kept = kept / kept.sum()
    long = lengths > LONG * usual if usual > 0.0 else np.zeros(len(lengths), bool)
    found: Vector = np.where(long, kept * usual / np.where(lengths > 0.0, lengths, 1.0), kept)
    return found


def multi_krum(gram: Matrix, shares: Vector, false: int | None = None) -> Vector:
    """Return shares in the mean of the ``n - f`` updates whose neighbours are nearest.

    Blanchard et al. (2017), with the neighbourhood of Allouah et al. (2023): an update's score is the sum of the squared
    distances to its ``n - f`` nearest updates, itself among them.

    Args:
        gram: shape (n, n), float64.
        shares: shape (n,), float64, of sum 1: the plain mean's.
        false: f; `most_false` if None.
    """
    f = most_false(len(gram)) if false is None else false
    kept = len(gram) - f
    scores = np.sort(squared_distances(gram), axis=1)[:, :kept].sum(axis=1)
    chosen = np.argsort(scores, kind="stable")[:kept]
    found = np.zeros(len(gram))
    found[chosen] = shares[chosen]
    return _normalised(found, shares)


def geometric_median(gram: Matrix, shares: Vector) -> Vector:
    """Return shares of the point whose weighted sum of distances to the updates is least: RFA.

    Pillutla et al. (2022), Algorithm 2, the smoothed Weiszfeld steps: ``beta_i = alpha_i / max(nu, |v - u_i|)``, and the next v
    is the mean of the updates under these weights. Here nu is `SMOOTHING` times the median norm.

    Args:
        gram: shape (n, n), float64.
        shares: shape (n,), float64, of sum 1: the plain mean's.
    """
    least = SMOOTHING * float(np.median(np.sqrt(np.diagonal(gram))))
    if least == 0.0:
        return shares
    mix = shares
    for _ in range(MEDIAN_STEPS):
        before, mix = mix, shares / np.maximum(distances_to(gram, mix), least)
        mix = mix / mix.sum()
        if np.abs(mix - before).max() <= MEDIAN_TOLERANCE:
            break
    return mix


def centred_clipping(gram: Matrix, shares: Vector, radius: float | None = None, steps: int = CLIPPING_STEPS) -> Vector:
    """Return shares of a mean of clipped differences from a centre, which the steps move.

    Karimireddy et al. (2021), Eq. 4: ``v <- v + sum_i alpha_i (u_i - v) min(1, tau / |u_i - v|)``. The paper starts from the
    last round's v, which has another mask here; so the start is 0.

    Args:
        gram: shape (n, n), float64.
        shares: shape (n,), float64, of sum 1: the plain mean's.
        radius: tau; the median norm of the updates if None.
        steps: number of steps.
    """
    tau = float(np.median(np.sqrt(np.diagonal(gram)))) if radius is None else radius
    if tau == 0.0:
        return shares
    mix = np.zeros(len(gram))
    for _ in range(steps):
        distances = distances_to(gram, mix)
        clipped = shares * np.minimum(1.0, tau / np.where(distances > 0.0, distances, tau))
        mix = mix * (1.0 - clipped.sum()) + clipped
    return mix


def nearest_neighbour_mixing(gram: Matrix, shares: Vector, false: int | None = None) -> Vector:
    """Return shares by `multi_krum` of updates that were mixed with their neighbours: NNM.

    Allouah et al. (2023), Algorithm 2: every update becomes the mean of its ``n - f`` nearest ones, itself among them.

    Args:
        gram: shape (n, n), float64.
        shares: shape (n,), float64, of sum 1: the plain mean's, also within a neighbourhood.
        false: f; `most_false` if None.
    """
    f = most_false(len(gram)) if false is None else false
    nearest = np.argsort(squared_distances(gram), axis=1, kind="stable")[:, : len(gram) - f]
    mixing = np.zeros_like(gram)
    for row, near in enumerate(np.sort(nearest)):
        mixing[row, near] = _normalised(shares[near], np.ones(len(near)))
    # Updates with one neighbourhood become one point. Its score has to be one number, or rounding decides whose share it gets.
    _, firsts, point = np.unique(mixing, axis=0, return_index=True, return_inverse=True)
    first = firsts[point.reshape(-1)]
    mixed = (mixing @ gram @ mixing.T)[np.ix_(first, first)]
    found: Vector = multi_krum((mixed + mixed.T) / 2.0, shares, f) @ mixing
    return found


def _normalised(found: Vector, otherwise: Vector) -> Vector:
    """Return ``found`` over its sum; ``otherwise`` over its own if ``found`` has none: all chosen weights are 0."""
    chosen = found if found.any() else otherwise
    shares: Vector = chosen / chosen.sum()
    return shares


RULES: Final[Mapping[str, Callable[[Matrix, Vector], Vector]]] = MappingProxyType(
    {
        "multi-krum": multi_krum,
        "rfa": geometric_median,
        "centred-clipping": centred_clipping,
        "nnm": nearest_neighbour_mixing,
    }
)
"""The rules but ``off`` and the filter: each turns a Gram matrix and the plain mean's shares into shares of the robust mean."""


FEWEST_TRIMMED: Final = 5
"""Fewest figures of which the smallest and the largest are left out."""
FIGURE_STEP: Final = 1e-4
"""Unit to which devices round losses and margins; a spread below one unit can't be told from none."""


def inner(values: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which of the values (n,) stay: all but the smallest and the largest of five or more, shape (n,)."""
    kept = np.ones(len(values), bool)
    if len(values) >= FEWEST_TRIMMED:
        kept[np.argsort(values, kind="stable")[[0, -1]]] = False
    return kept


def winsorised(values: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the values (n,) with the smallest and the largest of five or more replaced by their neighbours."""
    if len(values) < FEWEST_TRIMMED:
        return values
    _, least, *_, most, _ = np.sort(values)
    return np.clip(values, least, most)
