"""Recipes of model states: those that a device needs to catch up, and their evaluation to the same bits on every platform.

Rules of the evaluation in float32:

- A weight is rounded to float32 once. Each product and each sum is rounded to float32, in the order written: first term x
  weight, then + second term x weight, and so on; the mean is the last term. numpy's elementwise operations do exactly this,
  for any length of blocks and any alignment. A matrix product, a fused multiply-add or a sum over an axis does not.
- A number below TINY in size becomes 0, before and after each operation. Some processors drop denormal numbers, and -0.0
  has other bits than 0.0 though it is equal; both would give a state another digest.
- A result with NaN or infinity is refused: NaN has many bit patterns.

Example: 0.7 x a + 0.3 x b + 1 x mean is ((0.7 a) + (0.3 b)) + mean with five roundings, and mean + (0.3 b) + (0.7 a) has
other last bits.

`catch_up` compares the states that a device holds with those of the newest step. The aggregator retains the steps of the last
rounds with their means. A state is in reach if the device holds it in step, or if a retained recipe makes it from states in
reach and the device has the keys of the recipe's round. For a state out of reach the device takes a checkpoint: of the state
itself, or of the states that its recipe lacks if only those are certified.

For instance, model 3 is a merge of 1 and 2, and each device holds one of the two. No device can make (3, 9) alone, so (3, 9) is
not certified. A device that holds (1, 8) takes a checkpoint of (2, 8), which devices of the other cluster have certified, and
makes (3, 9) itself; until then it keeps (1, 8) and the keys of round 9. A device that returns later takes (3, 9).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Final

import numpy as np

from shoal.errors import IntegrityError, UsageError
from shoal.protocol.states import StateId, StateRecipe, Step

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


@dataclass(frozen=True, slots=True)
class CatchUp:
    """The way from the states held to those of the newest step.

    Attributes:
        steps: to apply now, in this order, each with only the recipes that the device evaluates.
        missing: ascending; the states to take from checkpoints before the next call.
        out_of_step: ascending; the states held whose digest is not the certified one.
        keep: the states to keep once ``steps`` are applied, as far as they are held; the others are forgotten.
        waiting: rounds whose keys stay, because a state that no device has certified yet may have to be made with them.
    """

    steps: tuple[Step, ...]
    missing: tuple[StateId, ...]
    out_of_step: tuple[StateId, ...]
    keep: frozenset[StateId]
    waiting: frozenset[int]


def catch_up(
    held: Mapping[StateId, bytes],
    steps: Sequence[Step],
    *,
    wanted: Collection[StateId],
    has_keys: Callable[[int], bool],
    certified: Mapping[StateId, bytes] | None = None,
) -> CatchUp:
    """Compare the states held with the retained steps.

    Args:
        held: digest of each state that the device holds.
        steps: the retained ones, oldest first; empty before the first round has closed, when all states held are kept.
        wanted: the states that the device needs now. Of the others it keeps those that the newest step leaves open.
        has_keys: whether the device has the keys of a round or can still derive them.
        certified: digest of each state whose certificate was checked, or is checked when the digest is asked for. From a
            false one a device would conclude that it is out of step, and forget its state.
    """
    certified = {} if certified is None else certified
    out_of_step = {id_ for id_, digest in held.items() if certified.get(id_, digest) != digest}
    in_step = held.keys() - out_of_step
    newest_last = sorted(steps, key=lambda step: step.round)
    recipes = [recipe for step in newest_last if has_keys(step.round) for recipe in step.recipes]
    lacking = _lacking(recipes, in_step, certified)
    still_open = set(newest_last[-1].open) if steps else held.keys()

    in_reach: set[StateId] = set()
    waiting: set[StateId] = set()
    missing: set[StateId] = set()
    for id_ in sorted(wanted):
        lacks = lacking.get(id_, frozenset({id_}))
        if not lacks:
            in_reach.add(id_)
            continue
        missing |= lacks if all(lack in certified for lack in lacks) else {id_}
        if id_ not in certified:
            # Perhaps no device can make the state yet: keep all that this device has towards it.
            waiting.add(id_)
    now = _on_the_way(in_reach, recipes, in_step)
    later = _on_the_way(waiting, recipes, in_step | (missing - waiting))
    reduced = [replace(step, recipes=tuple(r for r in step.recipes if r in now)) for step in newest_last]
    return CatchUp(
        steps=tuple(step for step in reduced if step.recipes),
        missing=tuple(sorted(missing)),
        out_of_step=tuple(sorted(out_of_step)),
        keep=frozenset(wanted).union(
            held.keys() & still_open, (term.state for recipe in later for term in recipe.terms)
        ),
        waiting=frozenset(recipe.round for recipe in later),
    )


def _lacking(
    recipes: Sequence[StateRecipe], in_step: Collection[StateId], certified: Collection[StateId]
) -> dict[StateId, frozenset[StateId]]:
    """Return for each state the ones to take from checkpoints, itself if it is certified; ``recipes`` oldest first."""
    found: dict[StateId, frozenset[StateId]] = dict.fromkeys(in_step, frozenset())
    for recipe in recipes:
        if recipe.state not in found:
            terms = [found.get(term.state, frozenset({term.state})) for term in recipe.terms]
            lacks = frozenset[StateId]().union(*terms)
            found[recipe.state] = frozenset({recipe.state}) if lacks and recipe.state in certified else lacks
    return found


def _on_the_way(
    ids: Collection[StateId], recipes: Sequence[StateRecipe], start: Collection[StateId]
) -> list[StateRecipe]:
    """Return those of ``recipes``, oldest first, that lead from the states in ``start`` to ``ids``."""
    needed, found = set(ids) - set(start), []
    for recipe in reversed(recipes):
        if recipe.state in needed:
            found.append(recipe)
            needed |= {term.state for term in recipe.terms} - set(start)
    return found
