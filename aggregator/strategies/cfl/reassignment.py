"""Reassignment of devices to other clusters: IFCA's identity step among the leaves of CFL.

A split can be wrong for one device, a newcomer can choose the wrong leaf, and a device's data may change; Alg. 5 does not
correct this. So in every ``look_every``-th round the devices that train are offered other leaves' models besides
their own. Each trains the one of least training loss (ifca Alg. 1, line 7) and belongs to that leaf from then on. The model
of its own leaf was also fitted to its training data, so chance alone does not move a device.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Final

from aggregator.strategies.base import ClientUpdate, Event
from aggregator.strategies.cfl.state import CflSettings, CflState, Step
from aggregator.strategies.cfl.tree import leaves, parents
from shoal.protocol.messages import Phase

MOST_OFFERED: Final = 4
"""Models beside its own that a device is offered at once: it fetches, scores and for that time holds each."""


@dataclass(frozen=True, slots=True)
class Wish:
    """A device of leaf ``before`` has trained the model of leaf ``after``."""

    before: int
    after: int


def look_due(state: CflState, settings: CflSettings, round_: int) -> bool:
    """Whether devices are offered other leaves' models in round ``round_``."""
    return settings.look_rounds > 0 and round_ % settings.look_rounds == 0 and len(state.clusters) > 1


def offers(state: CflState, turn: int) -> dict[int, tuple[int, ...]]:
    """Return the models that the members of each leaf are offered: its own, and others from near to far in the tree.

    Of more than ``MOST_OFFERED`` others these are the nearest half, and of the rest the next ones in turn, so that every
    leaf is offered. Leaves on trial have no model of their own to offer.

    Args:
        state: between rounds, with its tree.
        turn: number of the look.
    """
    above = parents(state.tree)
    found = {}
    for leaf in state.clusters:
        others = tuple(other for other in _near_to_far(state, above, leaf) if other not in state.trials)
        near, far = others[: MOST_OFFERED // 2], others[MOST_OFFERED // 2 :]
        start = turn * (MOST_OFFERED - len(near)) % max(1, len(far))
        found[leaf] = (leaf, *near, *islice(chain(far[start:], far[:start]), MOST_OFFERED - len(near)))
    return found


def _near_to_far(state: CflState, above: Mapping[int, int], leaf: int) -> Iterator[int]:
    at = leaf
    while at in above:
        node = state.tree[above[at]]
        (sibling,) = (child for child in node.children if child != at)
        yield from leaves(state.tree, sibling) if sibling in state.tree else (sibling,)
        at = node.id


def move(state: CflState, given: Collection[ClientUpdate], least_side: int, round_: int, turn: int) -> Step:
    """Make devices that trained another leaf's model its members. Called before leaves are averaged, so their updates count.

    A leaf does not fall below ``least_side`` answering devices by it, unless all of them leave. Devices of a leaf that is
    smaller already, and can't be averaged, may always leave; devices join such a leaf only in sufficient number. The update
    of a device that may not move is not used.

    Args:
        state: in ``close``, newcomers placed.
        given: the round's contributions, in order.
        least_side: fewest devices of a leaf.
        round_: the round.
        turn: number of the look; of several who can't all leave, others are held each time.
    """
    own = {d: c.id for c in state.clusters.values() for d in c.members}
    wishes = {
        c.device: Wish(own[c.device], c.model)
        for c in given
        if c.phase is Phase.TRAIN and own.get(c.device, c.model) != c.model and c.model in state.clusters
    }
    heard = state.heard.keys() | {c.device for c in given}
    living = Counter(leaf for device, leaf in own.items() if device in heard)
    granted = _granted(wishes, living, least_side, turn)
    if not granted:
        return state, ()
    own |= {device: wish.after for device, wish in granted.items()}
    clusters = {}
    for leaf in state.clusters.values():
        came = tuple(device for device, wish in granted.items() if wish.after == leaf.id)
        stayed = tuple(device for device in leaf.members if own[device] == leaf.id)
        clusters[leaf.id] = dataclasses.replace(leaf, members=(*stayed, *came))
    events = [Event(round_, "moved", {"device": d, "from": w.before, "cluster": w.after}) for d, w in granted.items()]
    return dataclasses.replace(state, clusters=clusters), tuple(events)


def _granted(wishes: Mapping[str, Wish], living: Mapping[int, int], least_side: int, turn: int) -> dict[str, Wish]:
    granted = dict(wishes)
    while True:
        out, into = Counter(w.before for w in granted.values()), Counter(w.after for w in granted.values())
        for leaf in sorted(out.keys() | into.keys()):
            rest = living.get(leaf, 0) - out[leaf] + into[leaf]
            if rest >= least_side or rest == 0:
                continue
            if living.get(leaf, 0) >= least_side:
                leaving = sorted(d for d, w in granted.items() if w.before == leaf)
                # Every change shifts the counts of two leaves, so the search starts again after each.
                del granted[leaving[turn % len(leaving)]]
                break
            if into[leaf]:
                granted = {d: w for d, w in granted.items() if w.after != leaf}
                break
        else:
            return granted
