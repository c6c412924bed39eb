"""A run's closed rounds in a size that does not grow with them: the figures of the page's pictures.

Add the record of each closed round, in order; `RunHistory.document` returns columns for the page. Series over rounds have at most
2 x MOST_POINTS points: then every second one is left out, but never the newest. Participation is by device for the newest
MARKED_ROUNDS rounds and for at most MARKED_DEVICES devices, those that were missing most often first.

`ClusterTree` says over the rounds which devices were together, and where they went. A *step* is a row of rounds in which no
device changed its cluster. Between two steps *flows* say how many devices went from one cluster to another. Splits, merges and
moves are all flows. A run may change clusters in every round: beyond MOST_STEPS, the two neighbouring steps with the fewest
devices moved between them are joined, and the flows are composed from the devices themselves, so that sums stay right.

Example: a split.

    >>> from shoal.page.history import ClusterTree
    >>> tree = ClusterTree()
    >>> tree.add(1, {"a": 0, "b": 0, "c": 0}), tree.add(2, {"a": 1, "b": 1, "c": 2})
    (True, True)
    >>> tree.document()["flows"]
    [[[0, 1, 2], [0, 2, 1]]]
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
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


MOST_POINTS: Final = 240
MOST_CLUSTERS: Final = 32
"""Clusters with series of their own: those with the most devices in the end, then those that lasted for the most rounds."""
MARKED_ROUNDS: Final = 60
MARKED_DEVICES: Final = 200
MOST_EVENTS: Final = 120
MOST_MATRICES: Final = 6
"""Matrices of cosines: the first, the newest, and of the rounds that changed the clusters the newest."""
TEXT_LENGTH: Final = 300
"""Most characters of one event's text."""
DIGITS: Final = 5
"""Significant digits of a figure: a picture can't show finer ones."""

MARKS: Final = {"uploaded": "u", "missing": "m", "declined": "d", "left out": "x", "not asked": "."}
"""What a device did in a round -> its mark."""
TELLING: Final = (
    *("cluster", "clusters", "children", "device", "from", "to", "model", "start", "groups", "k", "sizes", "by"),
    *("silhouette", "gain", "reason", "rounds", "robust", "margin", "others", "p_value"),
)
"""Details of an event that the page shows, in this order; the log and the store have all."""
SILENT_KINDS: Final = frozenset({"norms", "discrepancy", "checkpoints_ordered"})
"""Events that report figures, not a change."""

COLUMNS: Final = ("round", "loss", "accuracy", "seconds", "bytes_up", "contributed", "ordered")
"""Figures of a round in the series."""

Record = Mapping[str, Any]
"""A closed round, see `aggregator.rounds.state.RoundRecord`; only ``round`` is required."""


@dataclass(slots=True)
class Totals:
    """Sums over all closed rounds of a run.

    Attributes:
        rounds: closed ones.
        uploads, missing, left_out: uploads that arrived, those that did not, and those that were left out of the means.
        bytes_up: bytes of all uploads, as received.
    """

    rounds: int = 0
    uploads: int = 0
    missing: int = 0
    left_out: int = 0
    bytes_up: int = 0


@dataclass(slots=True)
class RunHistory:
    """The closed rounds of one run.

    Attributes:
        name: the run's name on the page.
        algorithm: of the run.
        rounds: rounds of its plan.
        results: figures about the whole run that the page shows beside its name: (label, text).
        closed: number of the last closed round; 0 before the first.
        finished: whether the final round is closed.
        last: the last closed round's record; empty before the first.
        totals: sums over all rounds.
    """

    name: str
    algorithm: str
    rounds: int
    results: Sequence[tuple[str, str]] = ()
    closed: int = 0
    finished: bool = False
    last: Record = field(default_factory=dict)
    totals: Totals = field(default_factory=Totals)
    _tree: ClusterTree = field(default_factory=ClusterTree)
    _points: list[dict[str, Any]] = field(default_factory=list)
    _every: int = 1
    _trained: int = 0
    _marks: deque[tuple[int, dict[str, str]]] = field(default_factory=lambda: deque(maxlen=MARKED_ROUNDS))
    _absences: Counter[str] = field(default_factory=Counter)
    _events: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=MOST_EVENTS))
    _cosines: list[dict[str, Any]] = field(default_factory=list)
    _newest_cosines: dict[str, Any] | None = None

    @property
    def sizes(self) -> Mapping[int, int]:
        """Cluster -> number of its devices after the last closed round."""
        return self._tree.sizes

    def add(self, record: Record) -> None:
        """Add a closed round, newer than the ones before."""
        self.last, self.closed = record, int(record["round"])
        self.finished = bool(record.get("final"))
        if not self.finished:  # the final round of a stopped run has the number after the plan's last
            self._trained = self.closed
        self._sum_up(record)
        changed = self._tree.add(self.closed, record.get("clusters") or {})
        self._add_point(_point(record))
        self._mark(record)
        for event in record.get("events") or ():
            if event["kind"] not in SILENT_KINDS:
                self._events.append({"round": self.closed, "kind": event["kind"], "text": _event_text(event)})
        if record.get("cosines"):
            self._add_cosines({"round": self.closed, **record["cosines"]}, changed=changed)

    def document(self) -> dict[str, Any]:
        """Return the run as the page's script reads it."""
        clusters = self._tree.clusters
        return {
            "name": self.name,
            "algorithm": self.algorithm,
            "rounds": self.rounds,
            "closed": self._trained,
            "finished": self.finished,
            "results": [list(pair) for pair in self.results],
            "points": {name: [_short(p[name]) for p in self._points] for name in COLUMNS},
            "clusters": self._series(self._tree.sizes),
            "tree": self._tree.document(),
            "events": list(self._events),
            "participation": self._participation(clusters),
            "cosines": [{**c, "clusters": [clusters.get(d) for d in c["devices"]]} for c in self._matrices()],
        }

    def _sum_up(self, record: Record) -> None:
        totals = self.totals
        totals.rounds += 1
        totals.uploads += record.get("contributed") or 0
        totals.missing += len(record.get("missing") or ())
        totals.left_out += len(record.get("refused_norm") or ()) + len(record.get("out_of_step") or ())
        totals.bytes_up += record.get("bytes_up") or 0

    def _add_point(self, point: dict[str, Any]) -> None:
        # The newest point is there whatever its number, and gives way to the next unless its turn has come.
        if len(self._points) > 1 and (self._points[-1]["round"] - 1) % self._every:
            self._points.pop()
        self._points.append(point)
        if len(self._points) > 2 * MOST_POINTS:
            self._every *= 2
            newest = self._points[-1]
            self._points = [p for p in self._points if (p["round"] - 1) % self._every == 0 or p is newest]

    def _series(self, sizes: Mapping[int, int]) -> list[dict[str, Any]]:
        """Return loss and accuracy over the points for the largest clusters, also of ended ones (0 devices)."""
        rounds = Counter(c for p in self._points for c in p["losses"])
        shown = sorted(sizes.keys() | rounds.keys(), key=lambda c: (-sizes.get(c, 0), -rounds[c], c))[:MOST_CLUSTERS]
        return [
            {
                "id": c,
                "devices": sizes.get(c, 0),
                "loss": [_short(p["losses"].get(c)) for p in self._points],
                "accuracy": [_short(p["accuracies"].get(c)) for p in self._points],
            }
            for c in sorted(shown)
        ]

    def _mark(self, record: Record) -> None:
        left_out = {**(record.get("refused_norm") or {}), **(record.get("out_of_step") or {})}
        declined = record.get("declined") or {}
        marks = dict.fromkeys(record.get("norms") or (), MARKS["uploaded"])
        marks |= dict.fromkeys(left_out, MARKS["left out"])
        marks |= {d: MARKS["declined" if d in declined else "missing"] for d in record.get("missing") or ()}
        self._absences.update(d for d, mark in marks.items() if mark != MARKS["uploaded"])
        self._marks.append((self.closed, marks))

    def _participation(self, clusters: Mapping[str, int]) -> dict[str, Any]:
        named = {device for _, marks in self._marks for device in marks}
        known = sorted(named, key=lambda d: (-self._absences[d], d))
        shown = sorted(known[:MARKED_DEVICES], key=lambda d: (clusters.get(d, math.inf), d))
        rows = [
            {
                "device": d,
                "cluster": clusters.get(d),
                "marks": "".join(m.get(d, MARKS["not asked"]) for _, m in self._marks),
            }
            for d in shown
        ]
        return {"rounds": [r for r, _ in self._marks], "devices": rows, "omitted": len(known) - len(shown)}

    def _add_cosines(self, cosines: dict[str, Any], *, changed: bool) -> None:
        self._newest_cosines = cosines
        if changed or not self._cosines:
            self._cosines.append(cosines)
            del self._cosines[1 : 2 - MOST_MATRICES]

    def _matrices(self) -> list[dict[str, Any]]:
        newest = self._newest_cosines
        return self._cosines if newest is None or newest in self._cosines else [*self._cosines, newest]


def history_of(run: RunHistory, records: Iterable[Record]) -> RunHistory:
    """Add records to a run's history and return it."""
    for record in records:
        run.add(record)
    return run


def _point(record: Record) -> dict[str, Any]:
    """Return the COLUMNS of a round, and ``losses`` and ``accuracies`` by cluster."""
    tested = record.get("tested") or 0
    accuracy = record["correct"] / tested if tested else record.get("accuracy")
    scored = record.get("contributed", 1)
    losses = {int(c): float(loss) for c, loss in (record.get("cluster_losses") or {}).items()}
    tests = {int(c): test[0] / test[1] for c, test in (record.get("cluster_tests") or {}).items() if test[1]}
    figures = {name: record.get(name) for name in COLUMNS}
    figures |= {"loss": record.get("loss") if scored else None, "accuracy": accuracy}
    return {**figures, "losses": losses, "accuracies": tests}


def _short(value: float | None) -> float | None:
    """Return a number with DIGITS significant digits; None for one that is not finite, which JSON can't hold."""
    if value is None or isinstance(value, int):
        return value
    return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None


def _event_text(event: Record) -> str:
    """Return an event's details as text: ``cluster 1, sizes 10+10``."""
    parts = [f"{key.replace('_', ' ')} {_value(event[key])}" for key in TELLING if key in event]
    text = ", ".join(parts)
    return text if len(text) <= TEXT_LENGTH else f"{text[: TEXT_LENGTH - 1]}…"


def _value(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.3g}"
    if isinstance(value, Mapping):
        return " ".join(f"{k}: {_value(v)}" for k, v in value.items())
    if isinstance(value, list | tuple):
        return "+".join(map(_value, value))
    return str(value)
