"""The texts and figures of `shoal-aggregator status`."""

import dataclasses
import json
from contextlib import closing

import pytest

from aggregator import cli
from aggregator.rounds.standstill import NAMES_SHOWN
from aggregator.rounds.state import RoundRecord
from aggregator.run_log import CAPPED_HINT, OUT_OF_STEP_HINT, REFUSED_NORM_HINT, STANDS_APART_HINT
from aggregator.status.facts import RunStatus
from aggregator.status.live_file import LiveFile
from aggregator.status.watch import FleetWatch
from aggregator.storage.store import DATABASE, Store
from crypto.seal.identity import sign_document
from shoal.errors import NotEnrolledError
from shoal.protocol.codec import encode
from shoal.protocol.documents import RunPackage
from shoal.util.files import exclusive
from tests.helpers.parties import Parties
from tests.helpers.plans import run_plan

RECORD = dataclasses.asdict(
    RoundRecord(
        round=1,
        final=False,
        ordered=2,
        contributed=2,
        missing=(),
        loss=0.5,
        correct=3,
        tested=4,
        norms={},
        clusters={"dev-1": 0, "dev-2": 0},
        events=(),
        device_accuracy={},
    )
)


class Place:
    """An aggregator's directory with runs, and the output of `status` on it."""

    def __init__(self, root, capsys):
        self.parties = Parties(root, "dev-1", "dev-2")
        self.directory, self._capsys = self.parties.server.directory, capsys

    def run(self, number=1, records=(), **changes):
        """Sign a run, and store the records of its closed rounds."""
        sequence = self.parties.owner.roster.sequence
        fields = {"run": number, "roster_sequence": sequence, "min_contributors": 1, **changes}
        plan = run_plan(fleet="reef", **fields)
        package = encode(RunPackage(sign_document(self.parties.owner.owner, plan), b"task", b"origins"))
        (self.directory / "runs" / f"{number}.run").write_bytes(package)
        if records:
            with closing(Store(self.folder(number), plan)) as store:
                for place, record in enumerate(records, 1):
                    store.record(place, {**RECORD, "round": place, **record})
        return plan

    def folder(self, number=1):
        return self.directory / f"run-{number:06d}"

    def status(self):
        """Return the lines of the status without the first."""
        cli.status(self.directory)
        return self._capsys.readouterr().out.splitlines()[1:]

    def data(self):
        cli.status(self.directory, json=True)
        return json.loads(self._capsys.readouterr().out)["data"]


@pytest.fixture
def place(tmp_path, capsys):
    return Place(tmp_path, capsys)


def test_a_fleet_without_runs(place, capsys):
    cli.status(place.directory)
    assert capsys.readouterr().out == "fleet reef, devices: 2, runs: 0, not running\n"


def test_a_serving_aggregator_says_so(place):
    assert not place.data()["serving"]
    with exclusive(place.directory, wait_s=0, hint="-"):
        assert place.data()["serving"]


def test_groups_that_a_strategy_has_found(place):
    """The last decision counts: refused groups are one group. Other strategies have none."""
    tried = {"k": 3, "silhouette": 0.412, "sizes": [14, 4, 2], "models": 2}
    refused = ({"kind": "groups-tried", **tried}, {"kind": "groups-refused", "gain": 0.5, **tried})
    place.run(1, records=[{}])
    place.run(2, records=[{"events": refused}, {"events": ({"kind": "reassigned"},)}])
    place.run(3, records=[{"events": refused}, {"events": ({"kind": "groups-found", **tried},)}])
    assert [r["groups"] for r in place.data()["runs"]] == [
        None,
        {"k": 1, "silhouette": 0.412},
        {"k": 3, "silhouette": 0.412},
    ]
    lines = place.status()
    assert "groups" not in lines[0]
    assert ["groups found: 1 (silhouette 0.41)" in line for line in lines] == [False, True, False]
    assert ["groups found: 3 (silhouette 0.41)" in line for line in lines] == [False, False, True]


def test_last_refused_split_says_why(place):
    """A later split makes it old news."""
    refused = {"kind": "split-refused", "cluster": 0, "reason": "gains may be chance"}
    made = {"kind": "split", "cluster": 0}
    place.run(1, records=[{"events": ({"round": 1, **refused},)}])
    place.run(2, records=[{"events": ({"round": 1, **refused},)}, {"events": ({"round": 2, **made},)}])
    assert [r["split_refused"] for r in place.data()["runs"]] == [
        {"round": 1, "cluster": 0, "reason": "gains may be chance"},
        None,
    ]
    assert sum("split of cluster 0 refused in round 1: gains may be chance" in line for line in place.status()) == 1


def test_a_run_that_has_not_begun(place):
    place.run(rounds=7)
    assert place.status() == ["run 1: fedavg, mask permutation, 0 of 7 rounds closed"]
    (run,) = place.data()["runs"]
    assert (run["closed"], run["finished"], run["loss"], run["accuracy"], run["clusters"]) == (
        0,
        False,
        None,
        None,
        None,
    )


def test_run_shows_clusters_and_accuracy(place):
    """A run in its middle shows clusters and accuracy of its last round."""
    place.run(records=[{"clusters": {}}, {"correct": 1, "clusters": {"dev-1": 4, "dev-2": 7}}])
    assert place.status() == [
        "run 1: fedavg, mask permutation, 2 of 20 rounds closed, clusters: 1+1 devices, accuracy 25.0%",
        "  cluster 4: dev-1",
        "  cluster 7: dev-2",
    ]


def test_clusters_are_the_last_ones(place):
    """Clusters are those of the last round that had any and accuracy of the very last."""
    place.run(records=[{}, {"clusters": {"dev-1": 4, "dev-2": 7}}, {"clusters": {}, "tested": 0, "correct": 0}])
    (run,) = place.data()["runs"]
    assert (run["cluster_sizes"], run["accuracy"], run["closed"]) == ([1, 1], None, 3)
    assert place.status()[0].endswith("3 of 20 rounds closed, clusters: 1+1 devices")


def test_a_finished_run(place):
    place.run(records=[{"final": True}])
    assert place.status() == ["run 1: fedavg, mask permutation, finished, clusters: 2 devices, accuracy 75.0%"]


def test_runs_are_listed_by_number(place):
    for number in (10, 9):
        place.run(number)
    assert [r["run"] for r in place.data()["runs"]] == [9, 10]


def test_declined_and_small_are_named(place):
    """Declined and too small clusters are named in the line of the run."""
    place.run(records=[{"declined": {"dev-2": "data"}, "clusters": {"dev-1": 0, "dev-2": 1}}], min_contributors=2)
    line, *_ = place.status()
    assert line.endswith("; data do not fit the task: dev-2; too small to be averaged: 2")


def still(cluster):
    return {"cluster": cluster, "devices": 2, "rounds": 5, "reason": "it has 2 devices", "hint": "add devices"}


def test_standstill_has_reason_and_hint(place):
    """Clusters that stand still are shown with reason and hint."""
    place.run(records=[{"still": [still(7)]}])
    assert place.status()[1:] == ["run 1 stands still: cluster 7 for 5 rounds: it has 2 devices", "  hint: add devices"]
    assert place.data()["runs"][0]["still"] == [still(7)]


def test_many_standstills_are_counted(place):
    """Of many clusters that stand still some are shown and the others counted."""
    place.run(records=[{"still": [still(c) for c in range(NAMES_SHOWN + 3)]}])
    lines = place.status()[1:]
    assert (len(lines), lines[-1]) == (2 * NAMES_SHOWN + 1, "run 1 stands still: 3 more clusters")
    assert len(place.data()["runs"][0]["still"]) == NAMES_SHOWN + 3


APART = {"kind": "stands-apart", "device": "dev-1", "margin": -5.0, "others": 0.1}


@pytest.mark.parametrize(
    ("records", "words", "hints"),
    [
        (
            [{"capped": {"dev-1": 3.0}}, {"capped": {"dev-1": 3.0}, "refused_norm": {"dev-2": 9.0}}],
            "left out, norm above ten times the median: dev-2 (rounds: 1); weight capped: dev-1 (rounds: 2)",
            [REFUSED_NORM_HINT, CAPPED_HINT],
        ),
        (
            [{"out_of_step": {"dev-1": 0}}, {"out_of_step": {"dev-1": 2, "dev-2": 0}}],
            "left out, trained from another state than most: dev-1 (rounds: 2), dev-2 (rounds: 1)",
            [OUT_OF_STEP_HINT],
        ),
        (
            [{"events": [APART]}, {"events": [APART, {"kind": "split", "cluster": 0}]}],
            "stands apart from its cluster: dev-1 (rounds: 2)",
            [STANDS_APART_HINT],
        ),
    ],
    ids=["norms and weights", "out of step", "standing apart"],
)
def test_limits_are_counted_with_hints(place, records, words, hints):
    """Limits are counted over all rounds and each has its hint."""
    place.run(records=records)
    assert place.status()[1:] == [f"run 1 limits: {words}", *(f"  hint: {hint}" for hint in hints)]


def test_earlier_records_lack_limits(place):
    """Records of an earlier version without limits are shown."""
    place.run(records=[{}])
    with closing(
        Store(place.folder(), run_plan(fleet="reef", roster_sequence=place.parties.owner.roster.sequence))
    ) as store:
        old = {
            k: v for k, v in RECORD.items() if k not in ("declined", "capped", "refused_norm", "out_of_step", "still")
        }
        store.record(2, {**old, "round": 2})
    (run,) = place.data()["runs"]
    assert (run["closed"], run["declined"], run["capped"]) == (2, {}, {})


def test_killed_aggregator_waits_for_nothing(place):
    """It leaves its line behind."""
    place.run(records=[{}])
    line = "round 2: 1 of 2, waiting for dev-2"
    here = RunStatus(run=1, algorithm="fedavg", round=2, rounds=3, phase="round", line=line, lacks={"here": 1})
    LiveFile(place.directory, FleetWatch()).keep_up(lambda: here, 0.0)
    (run,) = place.data()["runs"]
    assert (run["waiting"], run["shortage"]) == ("", None)
    with exclusive(place.directory, wait_s=0, hint="-"):
        (run,) = place.data()["runs"]
    assert (run["waiting"], run["shortage"]) == (line, {"here": 1})


def test_overtaken_run_waits_for_nothing(place):
    """An unfinished run that a later one has overtaken says why it waits for nothing; a finished one is never too old."""
    for number, final in ((1, True), (2, False), (3, False)):
        place.run(number, records=[{"final": final}])
    done, first, second = place.status()
    assert "; run 2 is older than run 3, which was begun here" in first
    assert "older" not in done + second
    assert place.data()["runs"][0]["older"] == ""


def test_damaged_run_is_shown_beside_others(place):
    """A damaged run is shown as damaged and the others as they are."""
    place.run(1, records=[{}])
    place.run(2, records=[{}])
    (place.folder(1) / DATABASE).write_bytes(b"no database " * 100)
    for suffix in ("-wal", "-shm"):
        (place.folder(1) / f"{DATABASE}{suffix}").unlink(missing_ok=True)
    first, second = place.status()
    assert "can't be read" in first
    assert "restore it from a backup" in first
    assert second.startswith("run 2: fedavg, mask permutation, 1 of 20")


def test_record_without_figures_is_damage(place):
    """A record that lacks its figures is damage not a traceback."""
    plan = place.run()
    with closing(Store(place.folder(), plan)) as store:
        store.record(1, {"round": 1})
    assert "can't be read: KeyError" in place.data()["runs"][0]["damage"]


def test_foreign_run_is_named_with_reason(place):
    """A file that is no run of this owner is named with the reason."""
    (place.directory / "runs" / "x.run").write_bytes(b"junk")
    (line,) = place.status()
    assert line.startswith("x.run is no run of this fleet: ")
    assert list(place.data()["refused"]) == ["x.run"]


def test_a_directory_of_no_fleet_is_an_error(tmp_path):
    with pytest.raises(NotEnrolledError):
        cli.status(tmp_path)
