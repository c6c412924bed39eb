"""What the fleet's state is in each situation that an operator meets, and who is to blame for it."""

import dataclasses

import pytest

from aggregator.run_log import DECLINE_REASONS
from aggregator.status import record, text
from aggregator.status.facts import ConnectionFacts, DeviceStatus, LiveFacts, RunStatus, WorkerStatus
from aggregator.status.record import DECLINE_HINTS, NOT_SERVED, Facts, StoredRun, build
from shoal import limits
from shoal.membership.grants import KEEPER_ROLE
from shoal.protocol.messages import DeclineReason, Vitals

NOW = 1_795_000_000
NAMES = ("dev-1", "dev-2", "dev-3")
UP = ConnectionFacts(broker="mqtt://reef:1883", connected=True, since_s=NOW - 9000)
HERE = DeviceStatus(
    name="", online=True, since_s=NOW - 8000, last_seen_s=NOW - 60, last_upload_s=NOW - 60, version="0.1.0"
)
ROUND = RunStatus(
    run=4,
    algorithm="cfl",
    rounds=20,
    phase="round",
    round=7,
    since_s=NOW - 20,
    deadline_at_s=NOW + 100,
    quorum=3,
    received=2,
    waiting=("dev-2",),
)
RUN = StoredRun(run=4, algorithm="cfl", rounds=20, closed=6, clusters={"dev-1": 0, "dev-2": 1, "dev-3": 1})


def live(*, connection=UP, devices=None, run=ROUND, alive_s=1, **changes):
    """Return the daemon's facts: all devices are online, and a round is open."""
    heard = dict.fromkeys(NAMES, HERE) | (devices or {})
    heard = {name: dataclasses.replace(known, name=name) for name, known in heard.items()}
    given = {"connection": connection, "devices": heard, "run": run, "alive_at_s": NOW - alive_s}
    return LiveFacts(version="0.1.0", **given, **changes)


def status(found=None, *, running=True, **changes):
    facts = Facts(
        fleet="reef",
        running=running,
        live=live() if found is None else found,
        broker="mqtt://granted:1883",
        active=NAMES,
        run=RUN,
        disk_free_bytes=1 << 40,
        now_s=NOW,
    )
    return build(dataclasses.replace(facts, **changes))


def device(built, name="dev-2"):
    return next(d for d in built.devices if d.name == name)


def problem(built):
    """Return reason and advice of the one problem of the fleet."""
    (found,) = built.problems
    return found.reason, found.advice


def blamed(built):
    """Return the devices of which anything is said."""
    missing = () if built.run is None else built.run.missing
    return {d.name for d in built.devices if d.reason} | {m.device for m in missing}


def test_a_fleet_at_work_has_no_problem():
    built = status()
    assert (built.running, built.connected, built.broker, built.since_s) == (True, True, UP.broker, UP.since_s)
    assert built.problems == ()
    assert [d.reason for d in built.devices] == ["", "", ""]
    run = built.run
    assert (run.run, run.algorithm, run.round, run.rounds, run.phase) == (4, "cfl", 7, 20, "round")
    assert (run.deadline_at_s, run.deadline_passed, run.quorum, run.received) == (NOW + 100, False, 3, 2)
    (missing,) = run.missing
    assert (missing.device, missing.since_s, missing.reason) == ("dev-2", ROUND.since_s, "has not uploaded yet")
    assert missing.advice == "wait: the deadline is 2026-11-18T11:08:20Z"


def test_killed_device_is_offline_by_will():
    """A device that was killed is offline since its will."""
    built = status(live(devices={"dev-2": dataclasses.replace(HERE, online=False, since_s=NOW - 5)}))
    found = device(built)
    assert (found.online, found.since_s, found.reason, found.advice) == (False, NOW - 5, "offline", record.OFFLINE_HINT)
    assert (found.last_seen_s, found.last_upload_s) == (NOW - 60, NOW - 60)
    (missing,) = built.run.missing
    assert (missing.device, missing.since_s, missing.reason) == ("dev-2", NOW - 5, "offline")
    assert blamed(built) == {"dev-2"}
    assert built.problems == ()


def test_broker_down_blames_no_device():
    """Not even one that was offline before, or past the deadline: nobody can know."""
    down = ConnectionFacts(
        broker="mqtt://reef:1883", connected=False, since_s=NOW - 30, reason="Connection refused", lost_s=NOW - 30
    )
    gone = dataclasses.replace(HERE, online=False, since_s=NOW - 30)
    late = dataclasses.replace(ROUND, deadline_passed=True, shortage="2 answered and 3 must", advice="start dev-2")
    built = status(live(connection=down, devices={"dev-2": gone}, run=late))
    assert (built.running, built.connected, built.since_s) == (True, False, NOW - 30)
    assert blamed(built) == set()
    assert {d.online for d in built.devices} == {None}
    assert problem(built) == ("no connection to the broker at mqtt://reef:1883: Connection refused", record.BROKER_HINT)
    assert (built.run.phase, built.run.received) == ("round", 2), "what is known stays"


def test_devices_have_time_to_return():
    """After the broker is back devices have time to return."""
    back = ConnectionFacts(broker=UP.broker, connected=True, since_s=NOW - 20, lost_s=NOW - 60)
    with_it = dataclasses.replace(HERE, online=False, since_s=NOW - 61)
    before = dataclasses.replace(HERE, online=False, since_s=NOW - 600)
    late = dataclasses.replace(ROUND, deadline_passed=True, shortage="2 answered and 3 must", advice="start dev-2")
    built = status(live(connection=back, devices={"dev-2": with_it, "dev-3": before}, run=late))
    assert device(built).reason == "not back yet since the broker was away"
    assert device(built, "dev-3").reason == "offline"
    assert built.problems == (), "the shortage may be over in a moment"
    later = status(
        live(connection=dataclasses.replace(back, since_s=NOW - record.RETURN_S), devices={"dev-2": with_it})
    )
    assert device(later).reason == "offline"


def test_device_back_and_off_again_is_off():
    """After the broker's return a device that was heard again and then left has left by itself: nobody waits for it."""
    left = dataclasses.replace(HERE, online=False, since_s=NOW - 5, last_seen_s=NOW - 15)
    devices = {"dev-2": left, "dev-3": dataclasses.replace(left, last_seen_s=NOW - 70)}
    built = status(live(connection=dataclasses.replace(UP, since_s=NOW - 20, lost_s=NOW - 60), devices=devices))
    assert [device(built, n).reason[:12] for n in ("dev-2", "dev-3")] == ["offline", "not back yet"]


def test_passed_deadline_says_what_to_do():
    """A deadline that passed with too few says what to do."""
    late = dataclasses.replace(
        ROUND, deadline_at_s=NOW - 3, deadline_passed=True, shortage="2 answered and 3 must", advice="start dev-2 again"
    )
    built = status(live(run=late))
    assert problem(built) == ("run 4 can't go on: its deadline has passed, 2 answered and 3 must", "start dev-2 again")
    assert device(built).reason == "online, but has not answered round 7 within its deadline"
    assert built.run.missing[0].reason == device(built).reason
    assert blamed(built) == {"dev-2"}


def test_device_revoked_while_off_is_listed():
    """A device that was revoked while off is listed as such."""
    gone = dataclasses.replace(HERE, online=False, since_s=NOW - 5)
    built = status(live(devices={"dev-2": gone}), active=("dev-1", "dev-3"), revoked=("dev-2",))
    found = device(built)
    assert found.reason == "revoked by the owner"
    assert "switch it off" in found.advice
    assert built.run.missing == (), "the run waits for no device that is not in the fleet"
    assert [c.members for c in built.run.clusters] == [("dev-1",), ("dev-3",)]


def test_full_disk_stays_the_reason():
    """A full disk stays the reason after the device has ended."""
    full = dataclasses.replace(HERE, online=False, since_s=NOW - 5, declined="disk")
    found = device(status(live(devices={"dev-2": full})))
    assert found.reason == "offline: its disk is full or fails"
    assert "free some space" in found.advice


@pytest.mark.parametrize("reason", DeclineReason)
def test_declined_device_has_an_advice(reason):
    """A device that declined says why and each reason has an advice."""
    found = device(status(live(devices={"dev-2": dataclasses.replace(HERE, declined=reason.name.lower())})))
    assert (found.reason, found.online) == (DECLINE_REASONS[reason], True)
    assert found.advice


@pytest.mark.parametrize(
    ("ahead_s", "words"),
    [(7500, "its clock is 2 h 5 min ahead of the aggregator's"), (-400, "its clock is 6 min behind the aggregator's")],
)
def test_wrong_clock_is_the_devices(ahead_s, words):
    """A wrong clock of one device is its own."""
    wrong = dataclasses.replace(HERE, clock_ahead_s=ahead_s)
    right = dataclasses.replace(HERE, clock_ahead_s=-2)
    built = status(live(devices={"dev-1": right, "dev-2": wrong, "dev-3": right}))
    assert device(built).reason == words
    assert device(built).advice == record.CLOCK_HINT
    assert (device(built, "dev-1").reason, built.problems) == ("", ())


def test_contradicted_clock_is_aggregators():
    """A clock that most devices contradict is the aggregators."""
    ahead = {name: dataclasses.replace(HERE, clock_ahead_s=86400 + i) for i, name in enumerate(NAMES)}
    built = status(live(devices=ahead))
    assert [d.reason for d in built.devices] == ["", "", ""]
    (problem,) = built.problems
    assert problem.reason == "most devices' clocks are 1 d ahead of the aggregator's"
    assert "this machine" in problem.advice


def test_small_difference_of_clocks_is_none():
    late = dataclasses.replace(HERE, clock_ahead_s=-limits.CLOCK_OFF_S)
    assert device(status(live(devices={"dev-2": late}))).reason == ""


def test_killed_daemon_is_not_running():
    """A killed daemon is not running since its last sign of life."""
    built = status(live(alive_s=50), running=False)
    assert (built.running, built.connected, built.since_s) == (False, False, NOW - 50)
    (problem,) = built.problems
    assert "killed" in problem.reason
    assert problem.advice == record.START_HINT
    assert blamed(built) == set()
    assert (built.run.phase, built.run.round, built.run.deadline_at_s) == (NOT_SERVED, 6, None)
    assert device(built).last_upload_s == NOW - 60, "what was known stays"


@pytest.mark.parametrize(
    ("ended", "words"),
    [
        (
            {"error": "no MQTT broker can be used", "hint": "check the address"},
            ("ended: no MQTT broker", "check the a"),
        ),
        ({"error": "a bug"}, ("ended: a bug", record.START_HINT)),
        ({}, ("was stopped", record.START_HINT)),
    ],
)
def test_a_daemon_that_ended_says_how(ended, words):
    built = status(live(ended_at_s=NOW - 9, **ended), running=False)
    assert built.since_s == NOW - 9
    (problem,) = built.problems
    assert words[0] in problem.reason
    assert words[1] in problem.advice


@pytest.mark.parametrize("run", [None, dataclasses.replace(RUN, finished=True)], ids=["no run", "a finished run"])
def test_stopped_daemon_is_no_problem(run):
    """As `serve --once` ends."""
    assert status(live(ended_at_s=NOW - 9), running=False, run=run).problems == ()
    assert status(live(), running=False, run=run).problems != (), "but one that was killed is"


def test_daemon_that_never_ran_is_no_problem():
    built = status(running=False, live=None)
    assert (built.running, built.since_s, built.problems) == (False, None, ())
    assert built.broker == "mqtt://granted:1883"


@pytest.mark.parametrize("found", [None, live(ended_at_s=NOW - 9)], ids=["the first", "its predecessor's file"])
def test_new_daemon_is_not_connected_yet(found):
    """A daemon that has just started is not connected yet."""
    built = status(running=True, live=found)
    assert (built.running, built.connected, built.since_s) == (True, False, None)
    assert built.problems[0].reason == "not connected to the broker at mqtt://granted:1883 yet"
    assert blamed(built) == set()


def test_stuck_loop_blames_no_device():
    """A daemon whose loop is stuck says so and blames no device."""
    gone = dataclasses.replace(HERE, online=False, since_s=NOW - 500)
    built = status(live(alive_s=record.SILENT_S + 1, devices={"dev-2": gone}))
    (problem,) = built.problems
    assert problem.reason.startswith("no sign of life from the aggregator's loop since ")
    assert blamed(built) == set()


def test_awaited_keys_are_the_runs_problem():
    """Keys that are awaited are a problem of the run."""
    waits = live(run=dataclasses.replace(ROUND, obstacle="the newer ones have not arrived yet"))
    disk, problem = status(waits, disk_free_bytes=4096).problems
    assert problem.reason == "the newer ones have not arrived yet"
    assert "shoal-fleet publish" in problem.advice
    assert disk.reason == "the aggregator's disk is full: 4096 bytes are free"


@pytest.mark.parametrize(("age_s", "online"), [(record.FIRST_PRESENCES_S, False), (1, None)])
def test_unretained_device_never_connected(age_s, online):
    """A device of which the broker retains nothing has never connected."""
    young = ConnectionFacts(broker=UP.broker, connected=True, since_s=NOW - age_s)
    found = device(status(live(connection=young, devices={"dev-2": DeviceStatus(name="")})))
    assert (found.online, found.reason) == (online, "" if online is None else "has not connected yet")


def test_clusters_have_their_devices_figures():
    """Figures of clusters are those of their devices."""
    tests = {"dev-1": (1, 2), "dev-2": (3, 4), "dev-3": (1, 4)}
    built = status(run=dataclasses.replace(RUN, tests=tests, losses={1: 0.25}))
    first, second = built.run.clusters
    assert (first.id, first.members, first.accuracy, first.loss) == (0, ("dev-1",), 0.5, None)
    assert (second.id, second.members, second.accuracy, second.loss) == (1, ("dev-2", "dev-3"), 0.5, 0.25)
    built = status(run=dataclasses.replace(RUN, tests={**tests, "dev-2": (0, 0)}))
    assert {d.name: d.accuracy for d in built.devices} == {"dev-1": 0.5, "dev-2": None, "dev-3": 0.25}
    assert {d.accuracy for d in status(run=None).devices} == {None}


def test_guessed_models_are_a_problem():
    """Devices whose model is a guess are a problem."""
    guess, good = DeviceStatus(name="", online=True, doubted=True), DeviceStatus(name="", online=True)
    built = status(live(devices={"dev-1": guess, "dev-2": good, "dev-3": guess, "gone": guess}))
    assert [p.reason for p in built.problems] == [
        "2 of 3 devices do no better than their most common label: dev-1, dev-3"
    ]
    assert built.problems[0].advice.startswith("`shoal-edge status` there has the figures")
    assert status(live(devices={"dev-1": good})).problems == ()


def test_run_that_is_finished_or_comes_next():
    last = status(live(run=None), run=dataclasses.replace(RUN, closed=21, finished=True)).run
    assert (last.phase, last.round, last.missing) == ("finished", 20, ())
    assert status(live(run=None), run=dataclasses.replace(RUN, closed=0)).run.phase == NOT_SERVED
    assert status(run=None).run is None


def test_stopped_run_has_its_last_training():
    """Its final round has the number after the last one planned."""
    over = live(run=dataclasses.replace(ROUND, phase="finished", round=21, waiting=()))
    last = status(over, run=dataclasses.replace(RUN, closed=7, finished=True)).run
    assert (last.phase, last.round, last.rounds) == ("finished", 7, 20)


def test_document_has_the_interfaces_names():
    """The document has the names of the interface and times in iso 8601."""
    document = status().document()
    assert {"running", "connected", "broker", "since", "run", "devices"} <= set(document)
    assert document["since"] == "2026-11-18T08:36:40Z"
    wanted = {
        "run",
        "algorithm",
        "round",
        "rounds",
        "phase",
        "deadline_at",
        "quorum",
        "received",
        "missing",
        "clusters",
    }
    assert wanted <= set(document["run"])
    assert document["run"]["deadline_at"] == "2026-11-18T11:08:20Z"
    assert set(document["run"]["missing"][0]) == {"device", "since", "reason", "advice"}
    assert set(document["run"]["clusters"][0]) == {"id", "members", "accuracy", "loss"}
    wanted = {"name", "online", "last_seen", "last_upload", "cluster", "version", "reason"}
    assert wanted <= set(document["devices"][0])
    assert document["devices"][0]["last_seen"] == "2026-11-18T11:05:40Z"
    assert document["devices"][0]["clock_ahead_s"] is None


def test_reported_condition_is_recorded():
    """The condition that a device reports is in the record."""
    vitals = Vitals(disk_free_bytes=1 << 40, load=0.5, cores=4, temperature_c=48.5)
    reporting = dataclasses.replace(HERE, vitals=vitals, vitals_at_s=NOW - 30, model_run=3)
    built = status(live(devices={"dev-2": reporting}))
    assert device(built).reason == ""
    assert device(built).model_run == 3
    found = {d["name"]: d["vitals"] for d in built.document()["devices"]}
    assert (found["dev-1"], found["dev-3"]) == (None, None)
    assert found["dev-2"] == {
        "at": "2026-11-18T11:06:10Z",
        "uptime_seconds": None,
        "disk_free_bytes": 1 << 40,
        "memory_bytes": None,
        "memory_free_bytes": None,
        "load": 0.5,
        "cores": 4,
        "temperature_c": 48.5,
        "battery_percent": None,
        "charging": None,
    }


def test_nearly_full_disk_is_told_before():
    """A device whose disk is almost full says so before it stops."""
    full = dataclasses.replace(HERE, vitals=Vitals(disk_free_bytes=1000), vitals_at_s=NOW)
    found = device(status(live(devices={"dev-2": full})))
    assert found.reason == "its disk is almost full: 1000 bytes were free"
    assert found.advice == DECLINE_HINTS[DeclineReason.DISK]


@pytest.mark.parametrize(("version", "state"), [("0.1.0", "same"), ("0.0.9", "older"), ("0.2.0", "newer")])
def test_other_version_is_marked_only(version, state):
    """A device of another version is marked and not blamed."""
    found = status(live(devices={"dev-2": dataclasses.replace(HERE, version=version, wire=1)}))
    marked = device(found)
    assert (marked.version_state, bool(marked.version_advice), marked.reason) == (state, state != "same", "")
    assert (found.version, marked.wire) == ("0.1.0", 1)


def test_other_wire_version_is_told():
    """A device that does not speak the runs wire version is told as such."""
    old = live(devices={"dev-2": dataclasses.replace(HERE, wire=1)})
    run = dataclasses.replace(RUN, wire=2)
    assert device(status(old, run=run)).reason == (
        "its software (shoal 0.1.0, wire 1) does not speak wire version 2 of the run"
    )
    assert device(status(old, run=run), "dev-1").reason == "", "nothing is known of its version"
    assert device(status(old, run=dataclasses.replace(run, finished=True))).reason == ""
    assert device(status(old, run=dataclasses.replace(RUN, wire=1))).reason == ""


SHARDED = dataclasses.replace(
    ROUND,
    workers=(
        WorkerStatus(name="worker-0", online=True, last_report_s=NOW - 60, lacking=1),
        WorkerStatus(name="worker-1", online=False),
    ),
)


def test_missing_keeper_is_a_problem():
    keeper = WorkerStatus(name="box", online=False, role=KEEPER_ROLE)
    built = status(live(run=dataclasses.replace(ROUND, workers=(keeper,))))
    (problem,) = built.problems
    assert problem.reason == "keeper box is not connected: the round waits for it"
    assert "shoal-keeper serve" in problem.advice
    assert text.worker_lines(built)[0] == "keepers: 0 of 1 online"


def test_missing_worker_is_a_problem():
    """A missing worker is a problem with advice."""
    assert status().workers == ()
    built = status(live(run=SHARDED))
    here, gone = built.workers
    assert (here.online, here.waits_for, here.reason) == (True, "the parts of 1 upload", "")
    assert (gone.online, gone.waits_for, gone.reason) == (False, "its connection", "is not connected")
    assert problem(built) == ("worker worker-1 is not connected: the round waits for it", gone.advice)
    assert "shard serve" in gone.advice
    assert built.document()["workers"][0] == {
        "name": "worker-0",
        "online": True,
        "last_report": "2026-11-18T11:05:40Z",
        "waits_for": "the parts of 1 upload",
        "reason": "",
        "advice": "",
    }


@pytest.mark.parametrize(
    "connection",
    [
        dataclasses.replace(UP, connected=False, reason="refused"),
        dataclasses.replace(UP, since_s=NOW - 1),
    ],
)
def test_no_worker_is_blamed_early(connection):
    """No worker is blamed before its presence can be here."""
    built = status(live(run=SHARDED, connection=connection))
    assert built.workers[1].online is None
    assert not any("worker" in problem.reason for problem in built.problems)
