"""The difference between the states that a device holds and those of the newest step, as a pure function.

The aggregator retains the steps of the last rounds with their means. A state is in reach if the device holds it in step, or
if a retained recipe makes it from states in reach and the device has the keys of the recipe's round. For a state out of reach
the device takes a checkpoint: of the state itself, or of the states that its recipe lacks if only those are certified.

Example: model 3 is a merge of 1 and 2, and each device holds one of the two. No device can make (3, 9) alone, so (3, 9) is not
certified. A device that holds (1, 8) takes a checkpoint of (2, 8), which devices of the other cluster have certified, and
makes (3, 9) itself; until then it keeps (1, 8) and the keys of round 9. A device that returns later takes (3, 9).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from shoal.protocol.states import StateId, StateRecipe, Step


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
