"""The device's program: its incarnation, which grows with every start, the events of its loop, and how it ends."""

import time
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from edge_client import daemon
from edge_client.answers.model_in_use import ModelInUse
from edge_client.config import EdgeConfig
from edge_client.daemon import BIRTH_FILE, next_birth, serve
from shoal.errors import ConfigError, DataError, NotEnrolledError, ShoalError, StorageError, UntrustedError
from shoal.transport.base import Connected, TakenOver
from shoal.transport.inbox import Inbox
from shoal.util import files
from shoal.util.files import exclusive
from tests.helpers.parties import Parties

NO_MODELS = ModelInUse(Path("d"), None)


@pytest.fixture
def device(tmp_path):
    return SimpleNamespace(directory=tmp_path)


def test_births_grow_when_clock_goes_back(device, monkeypatch):
    first = next_birth(device)
    monkeypatch.setattr(time, "time_ns", lambda: 5)
    assert next_birth(device) == first + 1
    assert next_birth(device) == first + 2


@pytest.mark.parametrize("junk", [b"", b"abc", b"\xff\xfe", b"-5", b"1e9", b"9" * 40, b"9" * 5000, b"12\n13"])
def test_damaged_number_is_the_clocks(device, caplog, junk):
    """A damaged number is replaced by the clocks."""
    path = device.directory / BIRTH_FILE
    path.write_bytes(junk)
    before = time.time_ns()
    birth = next_birth(device)
    assert before <= birth < 2**64 - 1
    assert "is damaged" in caplog.text
    assert int(path.read_text()) == birth


# ------------------------------------------------------------------------------------------------------- the loop


class Runtime:
    """A device that records its events; ``script`` says what it is after each event or tick."""

    def __init__(self):
        self.events = []
        self.ticks = 0
        self.runs_done = 0
        self.finishing = False
        self.revoked = False
        self.following = None
        self.ends = 0

    def on_event(self, event, _now_s):
        """Record an event."""
        self.events.append(event)

    def tick(self, _now_s):
        """Count a tick."""
        self.ticks += 1

    def remember_end(self):
        """Count a record of a run's end."""
        self.ends += 1


def loop(runtime, *events, once=False, inbox=None, models=NO_MODELS, turn=None):
    """Pass events, and then the end, to the program's loop, or go on with an inbox as it is."""
    if inbox is None:
        inbox = Inbox()
        for event in (*events, None):
            inbox.put(event)
    more = () if turn is None else (turn,)
    daemon._loop(EdgeConfig(Path("d"), Path("x"), once=once), runtime, inbox, "dev-1", models, *more)


def test_events_are_handled_in_order():
    """Callbacks are called between them, and nothing is handled after the request to stop."""
    runtime, event = Runtime(), Connected(session_present=True)
    loop(runtime, event, lambda: runtime.events.append("job done"), event, None, event)
    assert (runtime.events, runtime.ticks) == ([event, "job done", event], 0)


def test_hanging_training_is_not_reported(monkeypatch):
    """The service manager hears of the loop unless a step of training hangs."""
    told, quiet = [], [0.0]
    manager = SimpleNamespace(
        alive=lambda _: told.append("alive"),
        wants_status=lambda _: True,
        status=lambda text, _: told.append(text),
    )
    runtime, worker = SimpleNamespace(state_line="run 1, round 2: working"), SimpleNamespace(quiet_s=lambda: quiet[0])
    daemon._tell(manager, runtime, worker)
    quiet[0] = daemon.MOST_STEP_S
    daemon._tell(manager, runtime, worker)
    assert told == ["alive", "run 1, round 2: working", "run 1, round 2: working"]
    turns, inbox = [], Inbox()
    monkeypatch.setattr(inbox, "batch", lambda _: iter(()) if len(turns) < 3 else iter((None,)))
    loop(Runtime(), inbox=inbox, turn=lambda: turns.append(None))
    assert len(turns) == 3


def test_name_of_another_ends_with_a_hint():
    """A device whose name another uses ends with a hint."""
    with pytest.raises(UntrustedError, match=r"^another device connected as dev-1$") as caught:
        loop(Runtime(), TakenOver())
    assert "directory" in caught.value.hint


def test_revoked_device_does_no_more_work():
    """A revoked device ends and does no more work."""
    runtime, inbox = Runtime(), Inbox()

    def revoke():
        runtime.revoked = True

    inbox.put(revoke)
    with pytest.raises(UntrustedError, match=r"^the owner has revoked this device$"):
        loop(runtime, inbox=inbox)
    assert runtime.ticks == 0


def test_once_waits_for_the_finish(monkeypatch):
    """With once the loop waits for the personal finish."""
    monkeypatch.setattr(daemon, "POLL_S", 0.0)
    runtime = Runtime()

    def tick(_now_s):
        runtime.ticks += 1
        runtime.finishing = runtime.ticks < 4

    runtime.tick, runtime.runs_done, runtime.finishing = tick, 1, True
    loop(runtime, once=True, inbox=Inbox())
    assert runtime.ticks == 4


def ended(runtime):
    def end():
        runtime.runs_done += 1

    return end


def test_once_ends_with_the_run():
    """A process that is killed before it has closed reports the end again."""
    runtime, inbox = Runtime(), Inbox()
    inbox.put(ended(runtime))
    loop(runtime, once=True, inbox=inbox)
    assert (runtime.ticks, runtime.ends) == (1, 0)


def test_once_waits_for_the_program(monkeypatch):
    """With once, the operator's program for new models ends before the loop does."""
    runtime, inbox, running = Runtime(), Inbox(), [True, True, False]
    runtime.runs_done = 1
    monkeypatch.setattr(inbox, "batch", lambda _: iter(()))
    loop(runtime, once=True, inbox=inbox, models=SimpleNamespace(keep_up=lambda _: running.pop(0)))
    assert running == []


@pytest.mark.parametrize(("once", "looks"), [(False, 1), (True, 5)])
def test_turns_close_together_look_once(monkeypatch, once, looks):
    """A turn costs no system call for the model in use, except with ``once``: that must not end before the last model."""
    runtime, inbox, seen, ticks = Runtime(), Inbox(), [], []

    def tick(now_s):
        inbox.put(None if len(ticks) == 4 else lambda: None)
        ticks.append(now_s)

    runtime.tick = tick
    inbox.put(lambda: None)
    loop(runtime, once=once, inbox=inbox, models=SimpleNamespace(keep_up=seen.append))
    assert (len(ticks), len(seen)) == (5, looks)


def test_loop_goes_on_after_a_run(monkeypatch):
    """Without once each end of a run is recorded and the loop goes on; memory is settled once for each run."""
    settled = []
    monkeypatch.setattr(daemon, "settle", lambda: settled.append(runtime.following))
    monkeypatch.setattr(daemon, "POLL_S", 0.0)
    runtime, inbox, runs = Runtime(), Inbox(), [None, 4, 4, 5, 5]
    inbox.put(ended(runtime))

    def tick(_now_s):
        runtime.following = runs[runtime.ticks]
        runtime.ticks += 1
        if runtime.ticks == len(runs):
            inbox.put(None)

    runtime.tick = tick
    loop(runtime, inbox=inbox)
    assert (runtime.ticks, runtime.ends, settled) == (5, 5, [4, 5])


# ------------------------------------------------------------------------------------------------- start and end


@pytest.fixture
def place(tmp_path):
    parties = Parties(tmp_path, "dev-1")
    np.savez(tmp_path / "d.npz", x=np.zeros((9, 4)), y=np.zeros(9))
    return EdgeConfig(parties.members["dev-1"].directory, tmp_path / "d.npz", broker="mqtt://127.0.0.1:1")


def test_foreign_directory_is_left(tmp_path):
    """A directory that is no devices is left as it was."""
    with pytest.raises(NotEnrolledError):
        serve(EdgeConfig(tmp_path, tmp_path / "d.npz"))
    assert list(tmp_path.iterdir()) == []


def test_missing_data_before_the_lock(place):
    """Missing data are an error before the directory is locked."""
    before = sorted(place.dir.iterdir())
    with pytest.raises(DataError, match="does not exist"):
        serve(EdgeConfig(place.dir, place.dir / "none.npz"))
    assert sorted(place.dir.iterdir()) == before


def test_second_program_is_refused(place, monkeypatch):
    """A second program in the directory is refused."""
    monkeypatch.setattr(files, "TAKE_OVER_S", 0.0)
    with exclusive(place.dir, wait_s=0, hint="-"), pytest.raises(ConfigError) as caught:
        serve(place)
    assert caught.value.hint == "one `shoal-edge run` serves a device; end the other first"
    assert not (place.dir / BIRTH_FILE).exists()


def test_failing_disk_ends_the_program(place, monkeypatch):
    """A disk that fails is recorded for status and ends the program."""
    daemon.DeviceState(place.dir).clear_trouble()

    def fail(config):
        raise StorageError("can't write x: No space left on device", hint="free some space")

    monkeypatch.setattr(daemon, "_serve", fail)
    with pytest.raises(StorageError):
        serve(place)
    trouble = daemon.DeviceState(place.dir).load_trouble()
    assert (trouble["error"], trouble["hint"]) == ("can't write x: No space left on device", "free some space")


class Closing(Runtime):
    """A device whose close may fail."""

    def __init__(self, error=None):
        super().__init__()
        self.error, self.closed = error, False

    def start(self):
        """Do nothing."""

    def close(self):
        """Record the end, and fail."""
        self.closed = True
        if self.error:
            raise self.error


@pytest.fixture
def served(place, monkeypatch):
    """Return a function (runtime, error of the loop) that serves without a broker."""
    monkeypatch.setattr(daemon.signal, "signal", lambda *_: None)
    monkeypatch.setattr(daemon, "MqttTransport", lambda *_, **__: SimpleNamespace(start=lambda **_: None))

    def run(runtime, error=None):
        def fail(*_):
            if error:
                raise error

        monkeypatch.setattr(daemon, "DeviceRuntime", lambda *_, **__: runtime)
        monkeypatch.setattr(daemon, "_loop", fail)
        serve(place)

    return run


@pytest.mark.parametrize(
    ("closing", "looping", "raised"),
    [
        (None, None, None),
        (ConfigError("no space left"), None, "no space left"),
        # The error that ended the loop is not hidden by a failure to close.
        (ConfigError("no space left"), UntrustedError("another device"), "another device"),
    ],
)
def test_end_is_recorded_after_clean_close(served, closing, looping, raised):
    """The end of a run is recorded only after a clean close."""
    runtime = Closing(closing)
    with pytest.raises(ShoalError, match=raised) if raised else nullcontext():
        served(runtime, looping)
    assert (runtime.closed, runtime.ends) == (True, 0 if raised else 1)
