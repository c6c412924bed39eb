"""A staged fleet's directories, and its programs in place of which stand made-up processes."""

import signal
import subprocess
import sys

import pytest
from shoal_lab.loopback.fleet import draw_origins

from aggregator.membership import AggregatorMembership
from edge_client.membership import DeviceMembership
from edge_client.storage.state import STATUS_FILE
from shoal.owner.keys.vault import ROSTER_FILE
from shoal.protocol.recipe import LocalTraining
from shoal.simulation import process_fleet
from shoal.simulation.process_fleet import Program, Stage, StageError
from tests.helpers.plans import a_recipe


class Process:
    """A process that ends with ``code`` on SIGTERM, or only when it is killed."""

    pid = 4242

    def __init__(self, code=None, *, stubborn=False):
        self.returncode, self.stubborn = code, stubborn
        self.signals = []

    def poll(self):
        return self.returncode

    def send_signal(self, number):
        self.signals.append(number)
        self.returncode = None if self.stubborn else 0

    def kill(self):
        self.signals.append(signal.SIGKILL)
        self.returncode = -9

    def wait(self, timeout=None):
        if self.returncode is None:
            raise subprocess.TimeoutExpired("program", timeout)
        return self.returncode


@pytest.fixture
def program(tmp_path):
    """Return a function that makes a program of a made-up process."""
    log, made = tmp_path / "x.log", []

    def make(process, name="dev-00"):
        made.append(Program(name, process, log, log.open("ab")))
        return made[-1]

    yield make
    for one in made:
        one.handle.close()


@pytest.mark.parametrize(
    ("process", "code", "signals"),
    [
        # Its process id may be another's by now.
        (Process(3), 3, []),
        (Process(), 0, [signal.SIGINT]),
        (Process(stubborn=True), -9, [signal.SIGINT, signal.SIGKILL]),
    ],
    ids=["ended", "obedient", "stubborn"],
)
def test_only_a_stubborn_program_is_killed(program, process, code, signals):
    made = program(process)
    assert made.stop(signal.SIGINT) == code
    assert process.signals == signals
    assert made.handle.closed


def test_the_tail_is_the_end_of_the_log(program):
    made = program(Process())
    made.log.write_bytes(b"one\ntwo \xff\nthree\n")
    assert made.tail(2) == "two \N{REPLACEMENT CHARACTER}\nthree"


STATUS = "Name:\tpython\nVmPeak:\t9999 kB\nVmHWM:\t 51200 kB\n"
STAT = "4242 (a name) of (its own) S 1 2 3 4 5 6 7 8 9 10 250 30 7777 8888 20 0\n"


@pytest.mark.parametrize(
    ("figure", "file", "text", "value", "over"),
    [
        (Program.peak_rss_mb, "status", STATUS, 50, None),
        (Program.peak_rss_mb, "status", STATUS, 50, "Name:\tpython\nState:\tZ (zombie)\n"),
        (Program.cpu_s, "stat", STAT, 2.8, None),
    ],
    ids=["memory", "memory of a zombie", "time"],
)
def test_figures_need_a_live_program(program, tmp_path, monkeypatch, figure, file, text, value, over):
    """A process that is over has no memory in /proc, and no entry there once its exit status was collected."""
    made, read = program(Process()), []
    (tmp_path / file).write_text(text)
    monkeypatch.setattr(process_fleet, "TICKS", 100)
    monkeypatch.setattr(process_fleet, "Path", lambda path: read.append(path) or tmp_path / file)
    assert figure(made) == value
    assert read == [f"/proc/4242/{file}"]
    if over is None:
        (tmp_path / file).unlink()
    else:
        (tmp_path / file).write_text(over)
    with pytest.raises(StageError, match="dev-00 has ended") as caught:
        figure(made)
    assert str(made.log) in caught.value.hint


@pytest.fixture(scope="module")
def staged(tmp_path_factory):
    """Return the directories of a fleet of two devices."""
    return Stage(tmp_path_factory.mktemp("fleet") / "root", "mqtt://nowhere", ("dev-00", "dev-01"), "lab")


def test_all_members_belong_to_owners_fleet(staged):
    assert staged.devices == ("dev-00", "dev-01")
    aggregator = AggregatorMembership(staged.aggregator_dir)
    assert {m.name for m in aggregator.roster.devices} == {"dev-00", "dev-01"}
    assert [DeviceMembership(staged.device_dir(name)).name for name in staged.devices] == ["dev-00", "dev-01"]
    assert staged.fleet.name == "lab"
    assert staged.log_of("dev-00") == staged.root / "logs" / "dev-00.log" != staged.log_of("dev-01")


def test_a_copy_is_a_fleet_of_its_own(staged, tmp_path):
    copied = staged.copy_to(tmp_path / "copy")
    assert copied.devices == staged.devices
    assert copied.fleet.roster_bytes == staged.fleet.roster_bytes
    assert copied.fleet.secrets == staged.fleet.secrets
    copied.fleet.rotate()
    assert copied.fleet.secrets != staged.fleet.secrets
    assert DeviceMembership(copied.device_dir("dev-00")).directory == tmp_path / "copy" / "devices" / "dev-00"
    assert AggregatorMembership(copied.aggregator_dir).directory == tmp_path / "copy" / "aggregator"


def test_roster_is_replaced_as_a_whole(staged):
    """A running aggregator may read it at any time."""
    path = staged.aggregator_dir / ROSTER_FILE
    assert path.read_bytes() == staged.fleet.roster_bytes
    assert path.stat().st_mode & 0o777 == 0o600
    assert not list(staged.aggregator_dir.glob("*.new"))


def test_a_run_arrives_at_the_aggregator(staged, logistic):
    bundle = logistic(3, 2)
    local = LocalTraining(epochs=1, batch_size=2, lr=0.1)
    options = a_recipe("fedavg", {}, rounds=3, local=local, min_contributors=1, seed=1)
    plan = staged.add_run(bundle, draw_origins(bundle.manifest, 1, 1), options)
    (file,) = (staged.aggregator_dir / "runs").iterdir()
    assert file.read_bytes() in {p.read_bytes() for p in staged.root.joinpath("owner").rglob(file.name)}
    assert staged.records(plan.run) == []
    assert not staged.finished(plan.run)


def test_run_is_finished_with_its_last_round(staged, monkeypatch):
    """A run is finished with its final round."""
    for last, expected in ((None, False), ({"final": False}, False), ({"final": True}, True)):
        monkeypatch.setattr(process_fleet, "read_last_record", lambda _, record=last: record)
        assert staged.finished(1) is expected


@pytest.fixture
def running(staged, program):
    """Return the stage with an aggregator and a device, which are forgotten afterwards."""
    staged.programs.update({"aggregator": program(Process(), "aggregator"), "dev-00": program(Process())})
    yield staged
    staged.close()
    assert staged.programs == {}


def test_stopped_program_is_not_checked(running):
    process = running.programs["dev-00"].process
    assert running.stop("dev-00", signal.SIGKILL) == 0
    assert process.signals == [signal.SIGKILL]
    running.check()


def test_ended_program_is_reported_with_log(running):
    """A program that ended by itself is reported with its log."""
    running.check()
    ended = running.programs["dev-00"]
    ended.process.returncode = 7
    ended.log.write_text("error: no broker\n")
    for call in (running.check, lambda: running.wait(1, 60)):
        with pytest.raises(StageError, match="dev-00 ended with status 7:\nerror: no broker"):
            call()


def test_long_run_is_reported_with_log(running):
    """A run that takes too long is reported with the aggregators log."""
    running.programs["aggregator"].log.write_text("waiting for devices\n")
    with pytest.raises(StageError, match=r"run 1 did not finish in 0\.01 s\nwaiting for devices"):
        running.wait(1, 0.01)


def test_closing_signals_all_before_it_waits(running, monkeypatch):
    """Ten devices that take a second each to stop take a second together."""
    steps = []
    for name, made in running.programs.items():
        monkeypatch.setattr(made.process, "send_signal", lambda _, n=name: steps.append(("signal", n)))
        monkeypatch.setattr(made.process, "wait", lambda _timeout=None, n=name: steps.append(("wait", n)) or 0)
        monkeypatch.setattr(made.process, "poll", lambda: 0 if len(steps) >= 2 else None)
    running.close()
    assert steps == [("signal", "aggregator"), ("signal", "dev-00"), ("wait", "aggregator"), ("wait", "dev-00")]


def test_status_without_a_file_is_empty(staged):
    assert staged.device_status("dev-01") == {}
    (staged.device_dir("dev-01") / STATUS_FILE).write_text('{"round": 3}')
    assert staged.device_status("dev-01") == {"round": 3}


def test_programs_start_alone_in_their_place(staged, monkeypatch):
    """Programs are started with one thread their own directory and no input."""
    started = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **options: started.append((command, options)) or Process())
    with staged:
        staged.start_aggregator("--once")
        staged.start_device("dev-01", staged.root / "x.npz", "--seed", "3")
        assert set(staged.programs) == {"aggregator", "dev-01"}
    (aggregator, options), (device, _) = started
    assert aggregator[3:] == ["serve", str(staged.aggregator_dir), "--once"]
    data = str(staged.root / "x.npz")
    assert device[3:] == ["run", str(staged.device_dir("dev-01")), "--data", data, "--seed", "3"]
    assert [c[0] for c in (aggregator, device)] == [sys.executable] * 2
    assert "aggregator.cli" in aggregator[2]
    assert "edge_client.program" in device[2]
    assert options["env"].items() >= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NO_COLOR": "1"}.items()
    assert (options["stdin"], options["stderr"]) == (subprocess.DEVNULL, subprocess.STDOUT)
    assert (staged.root / "logs" / "dev-01.log").exists()
