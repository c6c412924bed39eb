"""Merging: a split that no longer pays is taken back (cfl section II-A, "always greater or equal").

Clusters are cut at a stationary point of their common model, which the tree stores. At regular intervals the devices of two
leaves from one cut score their own leaf's model and the stored one on their validation share, with the paired test that
confirms a split, reversed. If either leaf, or both together, prefer the stored model in ``patience`` checks in a row, the
leaves become one cluster again and continue from that model.

The test may be laxer than a split's: on digits with 90 images a device, labels permuted or swapped, each device of a
true split would have had a loss .2 to 1.6 higher with the stored model, up to 180 rounds after the cut.
"""

from __future__ import annotations

import dataclasses
from typing import Any, Final

from aggregator.strategies.base import ClientUpdate, Event
from aggregator.strategies.cfl.reassignment import look_due
from aggregator.strategies.cfl.split_validation import Verdict, contradictions, judge
from aggregator.strategies.cfl.state import CflSettings, CflState, Cluster, Step
from aggregator.strategies.cfl.tree import Node
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import Assignment, Phase, Share

LEAST_PREFER: Final = 0.75
"""Share of the devices that must prefer the model before the cut."""


def due(state: CflState, settings: CflSettings, round_: int) -> tuple[Node, ...]:
    """Return the nodes whose two children are checked in round ``round_``: both leaves, neither on trial.

    A round in which devices are offered other leaves' models (reassignment.py) puts checks off by one.
    """
    if settings.check_every == 0 or look_due(state, settings, round_):
        return ()
    return tuple(
        node
        for node in state.tree.values()
        if round_ >= node.check_at and all(c in state.clusters and c not in state.trials for c in node.children)
    )


def check_assignment(leaf: int, node: int) -> Assignment:
    """Return the assignment to score the leaf's model and, against it, the one of the node above."""
    return Assignment(Phase.SCORE, (leaf, node), Share.VALIDATION, train=False, evaluate=False, margins=True)


def close_check(
    state: CflState, node: Node, given: list[ClientUpdate], settings: CflSettings, run: RunPlan, round_: int
) -> Step:
    """Return the state after the two leaves under ``node`` were asked.

    A leaf of which too few devices answered is not counted; without either leaf the check has no result.
    """
    least_side = settings.least_side(run)
    answers: list[list[ClientUpdate]] = []
    for child in node.children:
        members = set(state.clusters[child].members)
        answers.append([c for c in given if c.device in members and c.phase is Phase.SCORE])
    heard = [a for a in answers if len(a) >= least_side]
    apart = tuple(
        event
        for child, a in zip(node.children, answers, strict=True)
        for event in contradictions(a, child, round_, settings.margin)
    )
    if len(heard) == len(node.children):
        heard.append([c for a in heard for c in a])
    # Negated, so that `judge` tests whether the model above is the better one.
    verdicts = [judge([-c.margins[1] for c in a]) for a in heard]
    node = dataclasses.replace(node, check_at=round_ + settings.check_every)
    if verdicts:
        doubted = any(v.prefer > LEAST_PREFER and v.p_value < settings.merge_p_value for v in verdicts)
        node = dataclasses.replace(node, strikes=node.strikes + 1 if doubted else 0)
        if doubted:
            detail = _detail(node, verdicts)
            if node.strikes >= settings.patience:
                state, merged = _merge(state, node, detail, settings, round_)
                return state, (*apart, *merged)
            apart = (*apart, Event(round_, "split-doubted", detail))
    return dataclasses.replace(state, tree={**state.tree, node.id: node}), apart


def _detail(node: Node, verdicts: list[Verdict]) -> dict[str, Any]:
    return {
        "cluster": node.id,
        "children": list(node.children),
        "strikes": node.strikes,
        "prefer": [v.prefer for v in verdicts],
        "margin": [v.margin for v in verdicts],
        "p_value": [v.p_value for v in verdicts],
    }


def _merge(state: CflState, node: Node, detail: dict[str, Any], settings: CflSettings, round_: int) -> Step:
    """Restore the cluster before the cut with its model, both leaves' members and waiting newcomers; begin its cool-down."""
    leaves = [state.clusters[c] for c in node.children]
    waiting = tuple(d for d, at in state.unplaced.items() if at == node.id)
    members = (*leaves[0].members, *leaves[1].members, *waiting)
    whole = Cluster(node.id, members, node.slot, quiet_until=round_ + 1 + settings.refused_cool_down)
    clusters = {k: c for k, c in state.clusters.items() if k not in node.children}
    state = dataclasses.replace(
        state,
        clusters={**clusters, node.id: whole},
        tree={k: n for k, n in state.tree.items() if k != node.id},
        unplaced={d: at for d, at in state.unplaced.items() if at != node.id},
        asked={k: at for k, at in state.asked.items() if k not in node.children},
    )
    sizes = [len(leaf.members) for leaf in leaves]
    return state, (Event(round_, "merge", {**detail, "sizes": sizes}),)
