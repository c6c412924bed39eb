"""A run's history: figures of the pictures, in a bounded size; the tree of clusters: steps, flows, and steps that are joined."""

import json
from collections import Counter
from itertools import pairwise

import pytest

from shoal.page.history import (
    MARKED_DEVICES,
    MARKED_ROUNDS,
    MOST_CLUSTERS,
    MOST_EVENTS,
    MOST_MATRICES,
    MOST_POINTS,
    MOST_STEPS,
    TEXT_LENGTH,
    ClusterTree,
    RunHistory,
    history_of,
)
from tests.helpers.pages import names, record

DEVICES = names(8)


def history(*records, rounds=60):
    return history_of(RunHistory(name="run 1", algorithm="cfl", rounds=rounds), records)


def closed(count, devices=DEVICES, **changes):
    return [record(r, devices, **changes) for r in range(1, count + 1)]


def test_no_figures_before_round_1():
    """Before the first round the document has no figures."""
    found = history().document()
    assert (found["closed"], found["clusters"], found["cosines"]) == (0, [], [])
    assert found["points"]["round"] == []
    assert found["participation"] == {"rounds": [], "devices": [], "omitted": 0}


def test_series_have_a_value_a_point():
    """Series have a value for each point and null where there is none."""
    found = history(*closed(8)).document()
    assert found["points"]["round"] == list(range(1, 9))
    assert found["points"]["accuracy"][0] == pytest.approx(float(f"{(100 * (1 - 0.95 / 3)) // 1 / 120:.5g}"))
    by_id = {c["id"]: c for c in found["clusters"]}
    assert by_id[0]["loss"][:5] == pytest.approx([0.2 + 1.5 / (1 + r) for r in range(1, 6)], rel=1e-4)
    assert by_id[0]["loss"][5:] == [None] * 3
    assert (by_id[0]["devices"], by_id[1]["devices"]) == (0, 4)
    assert by_id[1]["accuracy"][:5] == [None] * 5


@pytest.mark.parametrize("count", [3, 60])
def test_final_round_trains_nothing(count):
    """A run that the owner has stopped shows the rounds that it has trained, not those of its plan."""
    found = history(*closed(count), record(61, DEVICES, final=True)).document()
    assert (found["closed"], found["finished"]) == (count, True)


def test_figures_that_are_missing_are_null():
    """Of a round without uploads or of a simulation's, and those that JSON can't hold."""
    assert history(record(1, DEVICES, contributed=0, loss=0.0)).document()["points"]["loss"] == [None]
    found = history(record(1, DEVICES, loss=float("nan"), cluster_losses={"0": float("inf")})).document()
    assert found["points"]["loss"] == found["clusters"][0]["loss"] == [None]
    json.dumps(found, allow_nan=False)
    points = history({"round": 1}, {"round": 2, "accuracy": 0.5, "loss": 2.0}).document()["points"]
    assert (points["accuracy"], points["loss"]) == ([None, 0.5], [None, 2.0])


def test_long_run_has_bounded_points():
    """A long run has a bounded number of points with the first and the newest."""
    run = RunHistory(name="long", algorithm="fedavg", rounds=20_000)
    for r in range(1, 7_778):
        run.add({"round": r, "loss": 1.0, "contributed": 2})
        rounds = run.document()["points"]["round"] if r % 997 == 0 else None
        if rounds is not None:
            assert (rounds[0], rounds[-1]) == (1, r)
            assert len(rounds) <= 2 * MOST_POINTS + 1
            assert rounds == sorted(set(rounds))
    assert run.totals.rounds == 7_777


def test_thinned_points_are_evenly_spaced():
    """Points of a thinned run are evenly spaced."""
    run = history(*({"round": r, "loss": 1.0} for r in range(1, 2_000)), rounds=2_000)
    rounds = run.document()["points"]["round"]
    assert {b - a for a, b in pairwise(rounds[:-1])} == {8}


def test_only_largest_clusters_have_series():
    devices = names(3 * MOST_CLUSTERS)
    clusters = {d: min(i, 2 * MOST_CLUSTERS) for i, d in enumerate(devices)}
    losses = {str(c): 1.0 for c in set(clusters.values())}
    found = history(record(1, devices, clusters=clusters, cluster_losses=losses)).document()
    assert len(found["clusters"]) == MOST_CLUSTERS
    assert found["clusters"][-1] == {
        "id": 2 * MOST_CLUSTERS,
        "devices": MOST_CLUSTERS,
        "loss": [1.0],
        "accuracy": [None],
    }


def test_marks_tell_answers_apart():
    """Marks tell apart who uploaded declined was missing or left out."""
    run = history(
        record(1, DEVICES[:5], missing=DEVICES[1:3], declined={DEVICES[2]: "data"}, refused_norm={DEVICES[3]: 9.0}),
        record(2, DEVICES[:6], out_of_step={DEVICES[0]: 0}),
    )
    found = run.document()["participation"]
    assert found["rounds"] == [1, 2]
    marks = {row["device"]: row["marks"] for row in found["devices"]}
    assert marks == dict(zip(DEVICES[:6], ("ux", "mu", "du", "xu", "uu", ".u"), strict=True))


def test_participation_has_the_newest_rounds():
    """Participation has the newest rounds and the devices most often absent."""
    devices = names(MARKED_DEVICES + 50)
    run = history(*(record(r, devices, missing=devices[-1:]) for r in range(1, MARKED_ROUNDS + 6)))
    found = run.document()["participation"]
    assert (found["rounds"][0], len(found["rounds"])) == (6, MARKED_ROUNDS)
    assert (len(found["devices"]), found["omitted"]) == (MARKED_DEVICES, 50)
    assert devices[-1] in {row["device"] for row in found["devices"]}


def test_contradicted_margin_is_an_event():
    """A margin against all others is an event with both."""
    apart = {"kind": "stands-apart", "cluster": 3, "device": "dev-1", "margin": -5.0, "others": 0.071234}
    (event,) = history(record(1, DEVICES, events=[apart])).document()["events"]
    assert event["text"] == "cluster 3, device dev-1, margin -5, others 0.0712"


def test_events_are_bounded_words():
    """Events are words without reports and bounded."""
    long = {"kind": "split", "cluster": 1, "sizes": [3, 4], "intra_min": [0.1], "reason": "x" * 500}
    run = history(record(1, DEVICES, events=[{"round": 1, "kind": "norms", "mean": 1.0}, {"round": 1, **long}]))
    (event,) = run.document()["events"]
    assert event["kind"] == "split"
    assert event["text"].startswith("cluster 1, sizes 3+4, reason xxx")
    assert len(event["text"]) == TEXT_LENGTH
    many = [{"round": 1, "kind": "moved", "device": str(i), "from": 0, "cluster": 1} for i in range(2 * MOST_EVENTS)]
    assert len(history(record(1, DEVICES, events=many)).document()["events"]) == MOST_EVENTS


def test_matrices_are_those_of_changes():
    """Matrices are the first the newest and those of changes."""
    run = history(*closed(20))
    found = run.document()["cosines"]
    assert [c["round"] for c in found] == [1, 6, 14, 20]
    assert found[0]["clusters"] == [
        run.document()["tree"]["steps"] and {d: 3 + i % 4 for i, d in enumerate(DEVICES)}[d]
        for d in found[0]["devices"]
    ]


def test_matrices_are_bounded():
    """Matrices are bounded when every round changes the clusters."""
    run = history(*(record(r, DEVICES, clusters=dict.fromkeys(DEVICES, r)) for r in range(1, 50)))
    rounds = [c["round"] for c in run.document()["cosines"]]
    assert len(rounds) <= MOST_MATRICES
    assert (rounds[0], rounds[-1]) == (1, 49)


@pytest.mark.slow
def test_document_of_a_long_run_is_small():
    """The document of a long run of 100 devices is small."""
    run = history(*closed(1_200, names(100)), rounds=1_200)
    assert len(json.dumps(run.document())) < 150_000


def grown(*rounds):
    tree = ClusterTree()
    for number, clusters in enumerate(rounds, 1):
        tree.add(number, clusters)
    return tree.document()


def test_before_the_first_round_it_is_empty():
    tree = ClusterTree()
    assert tree.document() == {"steps": [], "flows": [], "joined": 0}
    assert (tree.clusters, tree.sizes) == ({}, {})


@pytest.mark.parametrize(
    ("rounds", "steps", "flows"),
    [
        ([{"a": 0, "b": 0}, {"b": 0, "a": 0}, {"a": 0, "b": 0}], [(1, 3, [(0, 2)])], []),
        (
            [{"a": 0, "b": 0, "c": 0}, {"a": 1, "b": 1, "c": 2}, {"a": 1, "b": 2, "c": 2}, {"a": 3, "b": 3, "c": 3}],
            [(1, 1, [(0, 3)]), (2, 2, [(1, 2), (2, 1)]), (3, 3, [(1, 1), (2, 2)]), (4, 4, [(3, 3)])],
            [[[0, 1, 2], [0, 2, 1]], [[1, 1, 1], [1, 2, 1], [2, 2, 1]], [[1, 3, 1], [2, 3, 2]]],
        ),
        ([{"a": 0}, {"a": 0, "b": 0}], [(1, 1, [(0, 1)]), (2, 2, [(0, 2)])], [[[0, 0, 1]]]),
    ],
    ids=["rounds without change", "a split, a move and a merge", "a newcomer"],
)
def test_steps_and_flows(rounds, steps, flows):
    found = grown(*rounds)
    assert [(s["first"], s["last"], s["sizes"]) for s in found["steps"]] == steps
    assert found["flows"] == flows


def test_round_without_clusters_is_left_out():
    tree = ClusterTree()
    assert (tree.add(1, {"a": 0}), tree.add(2, {}), tree.add(3, {"a": 0}), tree.add(4, {"a": 1})) == (
        True,
        False,
        False,
        True,
    )
    assert [(s["first"], s["last"]) for s in tree.document()["steps"]] == [(1, 3), (4, 4)]


def test_many_changes_are_joined():
    """Many changes are joined where the fewest devices moved."""
    devices = [f"d{i}" for i in range(10)]
    rounds = [{d: (i < n % 3) + 5 * (n >= 20) for i, d in enumerate(devices)} for n in range(3 * MOST_STEPS)]
    found = grown(*rounds)
    assert len(found["steps"]) == MOST_STEPS
    assert found["joined"] == 2 * MOST_STEPS
    assert any({to for _, to, _ in pair} >= {5} and {a for a, _, _ in pair} >= {0} for pair in found["flows"])


def test_joined_flows_add_up_to_the_sizes():
    """After joining the flows still add up to the sizes."""
    rounds = [{f"d{i}": (i * n) % 4 for i in range(12)} for n in range(1, 60)]
    found = grown(*rounds)
    for before, after, pair in zip(found["steps"], found["steps"][1:], found["flows"], strict=False):
        out, into = Counter(), Counter()
        for a, b, count in pair:
            out[a] += count
            into[b] += count
        assert (dict(out), dict(into)) == (dict(before["sizes"]), dict(after["sizes"]))
    assert (found["steps"][0]["first"], found["steps"][-1]["last"]) == (1, 59)
