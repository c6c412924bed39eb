"""The fleet's state as people read it."""

import dataclasses

import pytest

from aggregator.rounds.standstill import NAMES_SHOWN
from aggregator.status import text
from aggregator.status.facts import ConnectionFacts, DeviceStatus, LiveFacts, MissingDevice, RunStatus, WorkerStatus
from aggregator.status.record import FleetStatus, Problem
from shoal.protocol.messages import Vitals

AT = 1_795_000_000
STATUS = FleetStatus(
    fleet="reef",
    running=True,
    connected=True,
    broker="mqtt://reef:1883",
    since_s=AT,
    problems=(),
    run=None,
    devices=(),
)
RUN = RunStatus(
    run=4,
    algorithm="cfl",
    round=7,
    rounds=20,
    phase="round",
    since_s=AT,
    deadline_at_s=AT + 60,
    quorum=3,
    received=2,
    missing=(MissingDevice("dev-2", AT, "offline", "start it"),),
)


@pytest.mark.parametrize(
    ("connected", "run", "line"),
    [
        (False, None, "not connected to mqtt://reef:1883"),
        (True, None, "idle: waiting for a run"),
        (True, {"phase": "finished"}, "idle: waiting for a run"),
        (
            True,
            {"phase": "gathering", "order": "paused by the owner"},
            "run 4: 2 devices online, 3 needed, paused by the owner",
        ),
        (True, {"phase": "round"}, "run 4, round 7: 2 uploads, 3 needed"),
    ],
)
def test_the_line_for_the_service_manager(connected, run, line):
    found = LiveFacts(
        version="0.1.0",
        connection=ConnectionFacts(broker="mqtt://reef:1883", connected=connected, since_s=AT),
        devices={},
        run=None if run is None else dataclasses.replace(RUN, **run),
    )
    assert text.service_line(found) == line


def device(name, online=True, reason="", **changes):
    values = {"since_s": AT, "last_seen_s": AT, "last_upload_s": None, "cluster": None, "version": "", **changes}
    return DeviceStatus(name=name, online=online, clock_ahead_s=None, reason=reason, advice="do this", **values)


def with_devices(*devices):
    return dataclasses.replace(STATUS, devices=devices)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "running, connected to mqtt://reef:1883 since 2026-11-18T11:06:40Z"),
        ({"connected": False}, "running, not connected to mqtt://reef:1883 since 2026-11-18T11:06:40Z"),
        (
            {"chunk_bytes": 4096},
            "running, connected to mqtt://reef:1883 since 2026-11-18T11:06:40Z, chunks of 4096 bytes",
        ),
        ({"running": False}, "not running since 2026-11-18T11:06:40Z"),
        ({"running": False, "since_s": None}, "not running"),
    ],
)
def test_running_and_connected_in_words(changes, words):
    assert text.state_words(dataclasses.replace(STATUS, **changes)) == words


def test_each_problem_has_its_hint():
    found = dataclasses.replace(STATUS, problems=(Problem("a", "b"), Problem("c", "d")))
    assert text.problem_lines(found) == ["problem: a", "  hint: b", "problem: c", "  hint: d"]


def test_able_devices_are_only_counted():
    """Devices that can take part are only counted."""
    found = with_devices(
        device("dev-1"), device("dev-2", online=False, reason="offline", last_upload_s=AT + 1), device("dev-3")
    )
    assert text.device_lines(found) == [
        "devices: 2 of 3 online",
        "  dev-2: offline since 2026-11-18T11:06:40Z, last upload 2026-11-18T11:06:41Z",
        "    hint: do this",
    ]


def test_labels_are_counted_and_names_shown():
    """A device has both of its names; the label with the shown one is not counted."""
    found = with_devices(
        device("dev-1", labels={"site": "berlin", "name": "Gate 7"}, accuracy=0.5),
        device("dev-2", online=False, reason="offline", labels={"site": "berlin", "line": "3"}),
        device("dev-3", labels={"site": "bonn"}, accuracy=0.75),
    )
    lines = text.device_lines(found)
    assert lines[1:4] == ["  line=3: 0 of 1 online", "  site=berlin: 1 of 2 online", "  site=bonn: 1 of 1 online"]
    assert "50.0% (Gate 7 (dev-1))" in lines[4]
    many = [device(f"dev-{i}", labels={"n": f"{i:02}"}) for i in range(NAMES_SHOWN + 2)]
    assert text.device_lines(with_devices(*many))[-1] == "  and 2 more labels: --json lists all"


def test_worst_device_and_spread_are_shown():
    found = with_devices(
        device("dev-1", accuracy=0.9), device("dev-2", accuracy=0.41), device("dev-3"), device("dev-4", accuracy=0.7)
    )
    line = "accuracy of single devices: 41.0% (dev-2) to 90.0%, standard deviation 24.6 points"
    assert text.device_lines(found) == ["devices: 4 of 4 online", line]
    revoked = device("dev-2", reason=text.REVOKED, accuracy=0.1)
    assert text.device_lines(with_devices(device("dev-1", accuracy=0.9), revoked))[0] == "devices: 1 of 1 online"


def test_revoked_devices_are_named():
    """Unknown devices have no lines and revoked ones are named."""
    assert text.device_lines(with_devices(device("dev-1", online=None))) == []
    gone = device("dev-2", online=None, reason=text.REVOKED)
    assert text.device_lines(with_devices(device("dev-1"), gone)) == ["devices: 1 of 1 online", "revoked: dev-2"]


def test_of_many_devices_some_are_shown():
    lines = text.device_lines(with_devices(*(device(f"dev-{i}", reason="odd") for i in range(NAMES_SHOWN + 3))))
    assert (len(lines), lines[-1]) == (2 * NAMES_SHOWN + 2, "  and 3 more: --json lists all")


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        (
            {},
            "round 7: 2 uploads, 3 needed, since 2026-11-18T11:06:40Z, deadline 2026-11-18T11:07:40Z; waiting for dev-2",
        ),
        (
            {"deadline_passed": True, "missing": ()},
            "round 7: 2 uploads, 3 needed, since 2026-11-18T11:06:40Z, deadline passed at 2026-11-18T11:07:40Z",
        ),
        (
            {"computing": True, "missing": (), "deadline_passed": True},
            "round 7: 2 uploads, computing; the round began 2026-11-18T11:06:40Z",
        ),
        (
            {"phase": "gathering", "missing": (), "deadline_at_s": None},
            "gathering: 2 devices online, 3 needed, since 2026-11-18T11:06:40Z",
        ),
    ],
)
def test_where_a_run_is(changes, line):
    assert text.round_line(dataclasses.replace(RUN, **changes)) == f"run 4 now: {line}"


@pytest.mark.parametrize("changes", [{"phase": "finished"}, {"phase": "not_served", "since_s": None}])
def test_a_run_that_is_not_served_is_nowhere(changes):
    assert text.round_line(dataclasses.replace(RUN, **changes)) == ""


def test_a_paused_run_is_said_to_be_paused():
    paused = dataclasses.replace(RUN, phase="gathering", order="paused by the owner", missing=(), deadline_at_s=None)
    assert text.round_line(paused) == "run 4 now: paused by the owner after round 7, since 2026-11-18T11:06:40Z"
    status = dataclasses.replace(STATUS, run=paused, devices=(device("dev-1"),))
    assert text.device_lines(status) == ["devices: 1 of 1 online; paused by the owner"]
    assert text.round_line(dataclasses.replace(paused, phase="round")).endswith(
        "; paused by the owner after this round"
    )


def test_run_that_is_not_served_has_line_too():
    assert text.run_words(RUN) == text.round_line(RUN)
    over = dataclasses.replace(RUN, phase="finished", since_s=None, order="stopped by the owner")
    assert text.run_words(over) == "run 4: cfl, finished, stopped by the owner, round 7 of 20"
    queued = dataclasses.replace(RUN, phase="not_served", since_s=None)
    assert text.run_words(queued) == "run 4: cfl, not served, round 7 of 20"


def test_finished_has_the_planned_rounds():
    """A finished run has no more rounds than planned."""
    run = dataclasses.replace(RUN, phase="finished", round=21, rounds=20)
    assert text.run_words(run).endswith("finished, round 20 of 20")


VITALS = Vitals(
    uptime_s=7300,
    disk_free_bytes=12_300_000_000,
    memory_bytes=1_000_000_000,
    memory_free_bytes=412_000_000,
    load=0.52,
    cores=4,
    temperature_c=51.4,
    battery_percent=80,
    charging=True,
)


def test_reporting_device_has_a_line():
    """A device that reports its condition has a line."""
    found = with_devices(device("dev-1", vitals=VITALS, vitals_at_s=AT), device("dev-2"))
    assert text.device_lines(found) == [
        "devices: 2 of 2 online",
        "  dev-1 reports disk 12.3 GB free, memory 412 MB of 1 GB free, load 0.52 on 4 cores, 51 °C, battery 80 %, "
        "charging or full, up 2 h 1 min (2026-11-18T11:06:40Z)",
    ]
    many = text.device_lines(
        with_devices(*(device(f"dev-{i}", vitals=VITALS, vitals_at_s=AT) for i in range(NAMES_SHOWN + 2)))
    )
    assert len(many) == NAMES_SHOWN + 2
    assert many[-1] == "  and 2 more report their condition: --json lists all"


def test_unmeasured_figures_are_left_out():
    """Figures that a device can't measure are left out."""
    assert text.vitals_words(Vitals(), AT) == "no figure (2026-11-18T11:06:40Z)"
    few = Vitals(disk_free_bytes=999, load=3.0, cores=1, battery_percent=7, charging=False)
    assert text.vitals_words(few, AT).startswith("disk 999 B free, load 3 on 1 core, battery 7 % (")


def test_versions_are_told_with_advice():
    """The versions are told with what to do about others."""
    older = {"version": "0.1.0", "version_state": "older", "version_advice": "upgrade it"}
    newer = {"version": "0.3.0", "version_state": "newer", "version_advice": "upgrade the aggregator"}
    found = with_devices(
        device("dev-1", version="0.2.0", version_state="same"),
        device("dev-2", **older),
        device("dev-3", **newer),
        device("dev-4", **older),
        device("dev-5"),
        device("dev-6", reason="revoked by the owner", **older),
    )
    assert text.version_lines(dataclasses.replace(found, version="0.2.0")) == [
        "versions: aggregator 0.2.0, 2 devices 0.1.0, 1 device 0.2.0, 1 device 0.3.0",
        "  older: dev-2 (0.1.0), dev-4 (0.1.0)",
        "    hint: upgrade it",
        "  newer: dev-3 (0.3.0)",
        "    hint: upgrade the aggregator",
    ]


def test_unknown_versions_are_not_told():
    """Versions that nobody knows are not told."""
    assert text.version_lines(STATUS) == []
    assert text.version_lines(dataclasses.replace(STATUS, version="0.2.0")) == ["versions: aggregator 0.2.0"]


def test_each_worker_has_a_line():
    assert text.worker_lines(STATUS) == []
    workers = (
        WorkerStatus(name="worker-0", online=True, last_report_s=AT, waits_for="the parts of 2 uploads"),
        WorkerStatus(name="worker-1", online=False, waits_for="its connection", reason="is not connected"),
        WorkerStatus(name="worker-2"),
    )
    assert text.worker_lines(dataclasses.replace(STATUS, workers=workers)) == [
        "workers: 1 of 3 online",
        "  worker-0: online, last report 2026-11-18T11:06:40Z; the round waits for the parts of 2 uploads",
        "  worker-1: offline, no report yet; the round waits for its connection",
        "  worker-2: unknown, no report yet",
    ]
