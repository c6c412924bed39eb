"""The tree of clusters over the rounds: which devices were together, and where they went.

A *step* is a row of rounds in which no device changed its cluster. Between two steps *flows* say how many devices went from one
cluster to another. Splits, merges and moves are all flows. A run may change clusters in every round: beyond MOST_STEPS, the two
neighbouring steps with the fewest devices moved between them are joined, and the flows are composed from the devices
themselves, so that sums stay right.

Example: a split.

    >>> from shoal.page.tree import ClusterTree
    >>> tree = ClusterTree()
    >>> tree.add(1, {"a": 0, "b": 0, "c": 0}), tree.add(2, {"a": 1, "b": 1, "c": 2})
    (True, True)
    >>> tree.document()["flows"]
    [[[0, 1, 2], [0, 2, 1]]]
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

MOST_STEPS: Final = 24
"""Most steps that are stored; each has the cluster of every device."""


@dataclass(slots=True)
class _Step:
    first: int
    last: int
    clusters: dict[str, int]


class ClusterTree:
    """The clusters of a run's devices, step by step."""

    def __init__(self) -> None:
        self._steps: list[_Step] = []
        self._joined = 0

    @property
    def clusters(self) -> Mapping[str, int]:
        """Device -> cluster in the last step."""
        return self._steps[-1].clusters if self._steps else {}

    @property
    def sizes(self) -> Mapping[int, int]:
        """Cluster -> number of its devices in the last step."""
        return Counter(self.clusters.values())

    def add(self, round_: int, clusters: Mapping[str, int]) -> bool:
        """Add the clusters after a round, and return whether they differ from those before.

        Args:
            round_: its number, above the last one's.
            clusters: device -> cluster; a round without clusters is left out.
        """
        if not clusters:
            return False
        if self._steps and self._steps[-1].clusters == clusters:
            self._steps[-1].last = round_
            return False
        self._steps.append(_Step(round_, round_, dict(clusters)))
        if len(self._steps) > MOST_STEPS:
            self._join()
        return True

    def document(self) -> dict[str, Any]:
        """Return the tree as JSON has it.

        Returns:
            ``steps``: first and last round, and [cluster, devices] by cluster; ``flows``: for each pair of neighbouring steps
            [from, to, devices]; ``joined``: the number of steps that were joined to others.
        """
        steps = [
            {"first": s.first, "last": s.last, "sizes": sorted(Counter(s.clusters.values()).items())}
            for s in self._steps
        ]
        flows = [_flows(a.clusters, b.clusters) for a, b in zip(self._steps, self._steps[1:], strict=False)]
        return {"steps": steps, "flows": [[list(flow) for flow in pair] for pair in flows], "joined": self._joined}

    def _join(self) -> None:
        """Join two neighbouring steps, never the last: the later one's clusters stand for both."""
        pairs = list(zip(self._steps, self._steps[1:-1], strict=False))
        moved = [sum(b.clusters.get(device) != at for device, at in a.clusters.items()) for a, b in pairs]
        at = moved.index(min(moved))
        self._steps[at + 1].first = self._steps[at].first
        del self._steps[at]
        self._joined += 1


def _flows(before: Mapping[str, int], after: Mapping[str, int]) -> list[tuple[int, int, int]]:
    both = Counter((before[device], cluster) for device, cluster in after.items() if device in before)
    return sorted((a, b, count) for (a, b), count in both.items())
