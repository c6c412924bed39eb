"""The draw of the devices that train in a round under partial participation.

`drawn` takes a share of all devices, as FedAvg does. `drawn_by_cluster` takes whole clusters in turn: of four clusters of five
devices a fifth is four devices a round, and drawn over the whole fleet they would hardly ever be the three of one cluster that
a mean needs. Both give the same draw for the same run, round and devices, so that a restart repeats it. `drawn_in_turn` chooses
between them for strategies whose clusters are known.

Example: with a participation of 0.2 and ``least=3``, four clusters of five devices train in rounds 1, 2, 3 and 4, four devices
of one cluster each time.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np

from shoal.protocol.documents import RunPlan

POOL: Final = 1 << 16
"""Id of the pool in `drawn_in_turn`: above all ids of models."""


def drawn(run: RunPlan, round_: int, available: tuple[str, ...]) -> tuple[str, ...]:
    """Return the share ``run.recipe.participation`` of ``available``."""
    count = budget(run, len(available))
    if count >= len(available):
        return available
    chosen = np.random.default_rng([run.seed, round_]).choice(len(available), count, replace=False)
    return tuple(available[i] for i in sorted(chosen))


def budget(run: RunPlan, available: int) -> int:
    """Return the number of devices to draw in a round of so many that are available."""
    return max(1, round(run.recipe.participation * available))


def drawn_in_turn(
    run: RunPlan,
    round_: int,
    available: tuple[str, ...],
    clusters: Mapping[str, int],
    asked: Mapping[int, int],
) -> tuple[tuple[str, ...], Mapping[int, int]]:
    """Return the devices to draw, and ``asked`` with the clusters that have their turn.

    With a ``min_contributors`` of 1, as in the papers, and with full participation it is the plain draw. Devices without a
    cluster, and those of clusters that are too small for a mean, take their turn together, since the round may give them another
    cluster; if they are too few as well, they join the first cluster's turn.

    Args:
        run: gives participation, min_contributors and seed.
        round_: number of the round.
        available: device ids in ascending order.
        clusters: cluster of each device that has one.
        asked: cluster -> the last round in which it had its turn.
    """
    least = run.recipe.min_contributors
    if least <= 1 or budget(run, len(available)) >= len(available):
        return drawn(run, round_, available), asked
    members: dict[int, list[str]] = {}
    for device in available:
        members.setdefault(clusters.get(device, POOL), []).append(device)
    pool = [d for id_ in sorted(members) if id_ == POOL or len(members[id_]) < least for d in members[id_]]
    large = {id_: found for id_, found in sorted(members.items()) if id_ != POOL and len(found) >= least}
    if not large:
        return drawn(run, round_, available), asked
    if len(pool) >= least:
        large[POOL] = pool
    else:
        large[min(large)] = large[min(large)] + pool
    chosen = drawn_by_cluster(run, round_, large, asked, least)
    return tuple(sorted(d for found in chosen.values() for d in found)), {**asked, **dict.fromkeys(chosen, round_)}


def drawn_by_cluster(
    run: RunPlan,
    round_: int,
    clusters: Mapping[int, Sequence[str]],
    asked: Mapping[int, int],
    least: int,
) -> dict[int, tuple[str, ...]]:
    """Return the devices to draw of every cluster that has its turn.

    Over the rounds every device is drawn as often as any other, or nearly. The clusters that were drawn the fewest times for
    their size have their turn, as many as get ``least`` devices each; the rest of the round's budget is divided by size. At
    least one cluster has its turn, even if ``least`` is more than the budget.

    Args:
        run: gives participation and seed.
        round_: number of the round.
        clusters: id -> its available members; a cluster with fewer than ``least`` can't be averaged, and is left out
            unless all devices train.
        asked: id -> the last round in which a cluster had its turn; one that is missing has never had any.
        least: fewest devices of a mean.

    Returns:
        cluster id -> device ids in ascending order.
    """
    everybody = {id_: tuple(sorted(found)) for id_, found in clusters.items() if found}
    total = sum(map(len, everybody.values()))
    left = budget(run, total)
    if left >= total:
        return everybody
    members = {id_: found for id_, found in everybody.items() if len(found) >= least}
    if len(clusters) == 1:
        return {id_: drawn(run, round_, found) for id_, found in members.items()}
    due = {id_: len(found) * (round_ - asked.get(id_, 0)) for id_, found in members.items()}
    turns: dict[int, int] = {}
    for id_ in sorted(members, key=lambda id_: (-due[id_], id_)):
        if turns and left < least:
            break
        turns[id_] = max(1, least)
        left -= turns[id_]
    counts = _filled(turns, left, due, {id_: len(members[id_]) for id_ in turns})
    chosen = {}
    for id_, count in counts.items():
        rng = np.random.default_rng([run.seed, round_, id_])
        places = rng.choice(len(members[id_]), count, replace=False)
        chosen[id_] = tuple(members[id_][i] for i in sorted(places))
    return chosen


def _filled(counts: Mapping[int, int], left: int, due: Mapping[int, int], most: Mapping[int, int]) -> dict[int, int]:
    """Add ``left`` devices to the counts of clusters in proportion to what is due to each, up to ``most``."""
    counts = dict(counts)
    queue = [(-due[id_] / (count + 1), id_) for id_, count in counts.items() if count < most[id_]]
    heapq.heapify(queue)
    while queue and left > 0:
        id_ = heapq.heappop(queue)[1]
        counts[id_] += 1
        left -= 1
        if counts[id_] < most[id_]:
            heapq.heappush(queue, (-due[id_] / (counts[id_] + 1), id_))
    return counts
