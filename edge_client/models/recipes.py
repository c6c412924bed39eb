"""Evaluation of recipes in float32, to the same bits on every platform.

Rules:

- A weight is rounded to float32 once. Each product and each sum is rounded to float32, in the order written: first term x
  weight, then + second term x weight, and so on; the mean is the last term. numpy's elementwise operations do exactly this,
  for any length of blocks and any alignment. A matrix product, a fused multiply-add or a sum over an axis does not.
- A number below TINY in size becomes 0, before and after each operation. Some processors drop denormal numbers, and -0.0
  has other bits than 0.0 though it is equal; both would give a state another digest.
- A result with NaN or infinity is refused: NaN has many bit patterns.

Example: 0.7 x a + 0.3 x b + 1 x mean is ((0.7 a) + (0.3 b)) + mean with five roundings, and mean + (0.3 b) + (0.7 a) has
other last bits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from shoal.errors import IntegrityError, UsageError
from shoal.protocol.states import StateId, StateRecipe

if TYPE_CHECKING:
    from shoal.types import Float32Vector

TINY: Final = np.float32(2.0**-125)
"""Twice the smallest normal float32. With the smallest itself, processors that drop denormals could still differ: some
look at a result before it is rounded up to that number, some afterwards."""
BLOCK: Final = 1 << 16
"""Coordinates worked on at a time, so that the intermediate results stay in the cache."""


def evaluate(
    recipe: StateRecipe, vectors: Mapping[StateId, Float32Vector], mean: Float32Vector | None = None
) -> Float32Vector:
    """Return the vector of the state that ``recipe`` makes.

    Args:
        recipe: its terms are added in order, the mean last.
        vectors: (d,), float32, of each state that the recipe names.
        mean: (d,), float32, in clear; only if the recipe has a weight for it.

    Returns:
        (d,), float32, in new memory.

    Raises:
        UsageError: a mean is missing or unasked for, or the vectors differ in length or are not float32.
        IntegrityError: a state is missing, or the result is not finite.
    """
    if (mean is None) != (recipe.mean is None):
        raise UsageError(f"the recipe of model {recipe.model} {'has no' if recipe.mean is None else 'needs a'} mean")
    parts = []
    for term in recipe.terms:
        if term.state not in vectors:
            raise IntegrityError(
                f"the recipe of model {recipe.model} names state {term.round} of model {term.model}, which is not held",
                hint="the device takes a checkpoint",
            )
        parts.append((term.weight, vectors[term.state]))
    if mean is not None and recipe.mean is not None:
        parts.append((recipe.mean, mean))
    return weighted_sum(parts)


def weighted_sum(parts: Sequence[tuple[float, Float32Vector]]) -> Float32Vector:
    """Return the sum of weight x vector by the rules of this module.

    Args:
        parts: at least one; vectors (d,), float32.

    Returns:
        (d,), float32, in new memory.

    Raises:
        UsageError: the vectors differ in length or are not float32.
        IntegrityError: the result is not finite.
    """
    length = len(parts[0][1])
    for _, vector in parts:
        if vector.dtype != np.float32 or vector.shape != (length,):
            raise UsageError(f"a vector of shape {vector.shape} and dtype {vector.dtype}, not ({length},) and float32")
    total, product = np.empty(length, np.float32), np.empty(min(length, BLOCK), np.float32)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        for start in range(0, length, BLOCK):
            part_of_total = total[start : start + BLOCK]
            for i, (weight, vector) in enumerate(parts):
                term = product[: len(part_of_total)] if i else part_of_total
                np.copyto(term, vector[start : start + BLOCK])
                _drop_tiny(term)
                if weight != 1.0:  # a product with 1 is exact
                    np.multiply(term, np.float32(weight), out=term)
                    _drop_tiny(term)
                if i:
                    np.add(part_of_total, term, out=part_of_total)
                    _drop_tiny(part_of_total)
    if not np.isfinite(total).all():
        raise IntegrityError(
            "a recipe gives a model with NaN or infinite coordinates", hint="training diverged: lower the step size"
        )
    return total


def _drop_tiny(values: Float32Vector) -> None:
    """Set numbers below TINY to 0.0 in place, -0.0 and denormal numbers among them; NaN stays."""
    values[np.abs(values) < TINY] = 0.0
