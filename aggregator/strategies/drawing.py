"""Which devices train in a round under partial participation.

`drawn` takes a share of all devices, as FedAvg does. `drawn_by_cluster` takes whole clusters in turn: of four clusters of five
devices a fifth is four devices a round, and drawn over the whole fleet they would hardly ever be the three of one cluster that
a mean needs. Both give the same draw for the same run, round and devices, so that a restart repeats it.

Example: with a participation of 0.2 and ``least=3``, four clusters of five devices train in rounds 1, 2, 3 and 4, four devices
of one cluster each time.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence

import numpy as np

from shoal.protocol.documents import RunPlan


def drawn(run: RunPlan, round_: int, available: tuple[str, ...]) -> tuple[str, ...]:
    """Return the share ``run.participation`` of ``available``."""
    count = budget(run, len(available))
    if count >= len(available):
        return available
    chosen = np.random.default_rng([run.seed, round_]).choice(len(available), count, replace=False)
    return tuple(available[i] for i in sorted(chosen))


def budget(run: RunPlan, available: int) -> int:
    """Return the number of devices to draw in a round of so many that are available."""
    return max(1, round(run.participation * available))


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
        clusters: id -> its available members; a cluster with fewer than ``least`` can't be averaged, and is left out of a draw.
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
