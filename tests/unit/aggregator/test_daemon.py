"""Which run the daemon serves next: nothing that lies in its directory ends it, and each oddity is told once."""

import errno
import logging
import shutil
import sqlite3
from contextlib import closing, suppress
from unittest.mock import Mock

import pytest

from aggregator.config import AggregatorConfig
from aggregator.daemon import Daemon, _Stop, serve
from aggregator.rounds.state import Order
from aggregator.status.live_file import read_live
from aggregator.storage.signed_runs import RunFiles, is_finished
from aggregator.storage.store import Store, read_plan, read_records
from shoal.errors import BrokerUnreachableError, StorageError, TakenOverError, UntrustedError
from shoal.protocol.codec import encode
from shoal.protocol.requests import RequestAction
from shoal.transport.base import Connected, Disconnected, Message, TakenOver
from tests.helpers.chunks import forge
from tests.helpers.owner_requests import chunks_of, request_of, seal_request
from tests.helpers.plans import run_plan
from tests.helpers.run_places import RunPlace


def daemon_of(place):
    return Daemon(AggregatorConfig(place.server))


@pytest.fixture
def daemon(place):
    return daemon_of(place)


@pytest.fixture
def plan(place):
    return place.sign()


def told(caplog):
    return [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING]


def told_once(place, caplog, plan=None):
    """Let a new daemon look three times for its next run, which is that of ``plan``; return what it told."""
    daemon = daemon_of(place)
    for _ in range(3):
        found = daemon._next_run()
        assert (found and found.plan) == plan
    (line,) = told(caplog)
    return line


def test_runs_come_in_order(place, daemon):
    first, second = place.sign(), place.sign()
    assert daemon._next_run().plan == first
    place.finish(first)
    assert is_finished(place.member, first)
    assert daemon._next_run().plan == second
    place.finish(second)
    assert daemon._next_run() is None
    assert daemon._over.plan == second


@pytest.mark.parametrize("what", ["a link to nowhere", "a folder", "junk", "a run of another owner's", "unreadable"])
def test_no_run_is_told_once(place, plan, tmp_path, caplog, monkeypatch, what):
    """What is no run is told once and passed over."""
    odd = place.server / "runs" / "000000.run"
    if what == "a link to nowhere":
        odd.symlink_to("/nowhere")
    elif what == "a folder":
        odd.mkdir()
    elif what == "a run of another owner's":
        (tmp_path / "other").mkdir()
        other = RunPlace(tmp_path / "other")
        other.sign()
        shutil.copy(other.server / "runs" / "000001.run", odd)
    else:
        odd.write_bytes(b"junk")
    if what == "unreadable":
        real = type(odd).read_bytes
        refused = PermissionError(13, "Permission denied")

        def read(path):
            if path == odd:
                raise refused
            return real(path)

        monkeypatch.setattr(type(odd), "read_bytes", read)
    assert told_once(place, caplog, plan) == "run file refused"
    assert [r.plan for r in RunFiles(place.member).all()] == [plan]


def test_damaged_run_keeps_nobody_waiting(place, caplog):
    """A damaged run does not keep the others waiting."""
    first, second = place.sign(), place.sign()
    place.finish(first)
    (place.directory(first) / "run.sqlite").write_bytes(b"not a database at all, but long enough for a header" * 9)
    line = told_once(place, caplog, second)
    assert line.startswith("passed over: ")
    assert "can't be read" in line
    assert "restore it from a backup" in caplog.records[-1].kv["hint"]
    daemon = daemon_of(place)
    assert (daemon._next_run().plan, daemon._damage is None) == (second, False)


def test_used_number_is_told(place, caplog):
    """The owner's own files were moved away, and it counted from one again."""
    first = place.sign()
    place.finish(first)
    next((place.owner.path / "runs").glob("*.run")).unlink()
    again = place.sign(run=first.run)
    assert again.run_id != first.run_id
    with pytest.raises(UntrustedError, match="another one than the run 1 that was begun here before") as caught:
        is_finished(place.member, again)
    assert "sign it again" in caught.value.hint
    assert told_once(place, caplog).startswith("passed over: run 1 is another one")


def test_waiting_says_what_to_do(place, caplog):
    """What the daemon waits for comes with what to do."""
    place.owner.renew()
    place.sign()
    daemon = daemon_of(place)
    for _ in range(3):
        assert daemon._next_run() is None
    (record,) = [r for r in caplog.records if "waiting for the owner's roster and keys" in r.getMessage()]
    assert "shoal-fleet publish" in record.kv["hint"]
    assert "roster.signed" in record.kv["hint"]


@pytest.mark.parametrize("head", ["{half", '{"available": [], "metadata": {}, "vectors": {}}', None])
def test_damaged_finished_run_is_left(place, plan, caplog, head):
    """Its records are whole and the rest is not: told once, and the daemon goes on."""
    place.finish(plan)
    with closing(sqlite3.connect(place.directory(plan) / "run.sqlite", isolation_level=None)) as database:
        if head is not None:
            database.execute("INSERT INTO snapshot VALUES (1, 3, ?, '{}')", (head,))
        else:
            database.execute("DELETE FROM facts WHERE name = 'seed'")
    daemon = daemon_of(place)
    for _ in range(3):
        assert daemon._next_run() is None
        daemon._look_back()
    assert daemon._service is None
    (line,) = told(caplog)
    assert line.startswith(("uploads to run 1 can't be acknowledged: ", "passed over: "))


def test_record_that_is_none_is_passed_over(place, plan, caplog):
    with closing(Store(place.directory(plan), plan)) as store:
        store.record(1, {"round": 1})
    assert "KeyError: 'final'" in told_once(place, caplog)


@pytest.mark.parametrize("name", ["srv#1", "srv?1", "srv%41", "srv 1", "süd"])
def test_a_directory_may_have_any_name(tmp_path, monkeypatch, name):
    """What reads the database names it by a URI; also where the path is relative."""
    plan = run_plan()
    with closing(Store(tmp_path / name / "run-000001", plan)) as store:
        store.record(1, {"round": 1, "final": True})
    monkeypatch.chdir(tmp_path)
    for folder in (tmp_path / name, type(tmp_path)(name)):
        assert read_records(folder / "run-000001") == [{"round": 1, "final": True}]
        assert read_plan(folder / "run-000001") == encode(plan)
    assert [p.name for p in tmp_path.iterdir()] == [name]


def test_run_file_is_taken_away_early(place, caplog):
    """A run file that is taken away before its run begins."""
    place.sign()
    daemon = daemon_of(place)
    run = daemon._next_run()
    run.path.unlink()
    daemon._serve_run(run)
    assert told(caplog) == ["passed over: 000001.run can't be read: No such file or directory"]
    assert daemon._next_run() is None


def test_finished_run_is_back_with_its_file(place, plan, caplog):
    """A run that is over is answered for once its file is back."""
    place.finish(plan)
    daemon = daemon_of(place)
    assert daemon._next_run() is None
    path = place.server / "runs/000001.run"
    path.rename(path.with_suffix(".aside"))
    daemon._look_back()
    assert daemon._service is None
    path.with_suffix(".aside").rename(path)
    assert daemon._next_run() is None
    assert not daemon._unreadable


def test_older_run_is_passed_over(place, caplog):
    """Devices refuse it, so that the fleet would wait for ever."""
    late, done, next_ = place.sign(), place.sign(), place.sign()
    path = place.server / "runs/000001.run"
    path.rename(path.with_suffix(".aside"))
    place.finish(done)
    path.with_suffix(".aside").rename(path)
    reason = f"run {late.run} is older than run {done.run}, which was begun here, and devices refuse it"
    assert told_once(place, caplog, next_) == f"passed over: {reason}"
    assert "sign it again" in caplog.records[-1].kv["hint"]


def test_run_ends_without_its_file(place, caplog, monkeypatch):
    """The way to give one up that devices refuse; the next begins."""
    place.sign()
    second = place.sign()
    daemon = daemon_of(place)
    first = daemon._next_run()
    taken = []

    def take(service):
        if not taken:
            first.path.rename(first.path.with_suffix(".aside"))
        taken.append(service)
        assert len(taken) < 100

    monkeypatch.setattr(daemon, "_take", take)
    monkeypatch.setattr("aggregator.daemon.LOOK_AFTER_S", 0.0)
    daemon._serve_run(first)
    assert told(caplog) == ["run stopped: its file was taken away"]
    assert daemon._service is None
    assert daemon._next_run().plan == second


@pytest.mark.parametrize("odd", ["devices have signed another history", ""])
def test_other_history_is_dropped(place, daemon, monkeypatch, odd):
    """No device would take part in its final round; any other run waits for that."""
    plan, second = place.sign(), place.sign()
    looks = []

    def take(service):
        looks.append(service)
        service.odd = odd
        if len(looks) == 1:
            daemon._orders.accept(1, plan.run_id, Order.STOP_NOW)
        if len(looks) == 20:
            raise _Stop

    monkeypatch.setattr(daemon, "_take", take)
    monkeypatch.setattr("aggregator.daemon.LOOK_AFTER_S", 0.0)
    with suppress(_Stop):
        daemon._serve_run(daemon._next_run())
    assert (len(looks) < 20) is bool(odd)
    daemon._let_go()
    if odd:
        assert daemon_of(place)._next_run().plan == second
    assert (place.server / "runs" / f"{plan.run:06d}.run").exists() is not bool(odd)


BACKLOG = 1500


def test_long_backlog_calls_every_callback(place):
    """The 513th event of a backlog was dropped; where it was the syncer's callback, the run never went on."""
    daemon, called = daemon_of(place), []
    put = daemon._transport._sink
    for number in range(BACKLOG):
        put(lambda number=number: called.append(number))
    while len(called) < BACKLOG:
        before = len(called)
        daemon._take(None)
        assert len(called) > before, f"{BACKLOG - before} events were lost"
    assert called == list(range(BACKLOG))


@pytest.mark.parametrize("ahead", [0, 511, 512, 513, 1025])
def test_stop_is_found_behind_a_backlog(daemon, ahead):
    """A stop request is found behind a backlog."""
    put = daemon._transport._sink
    for _ in range(ahead):
        put(Message("shoal/v1/other/d/x/up", b"junk"))
    put(None)

    def take_all():
        for _ in range(1 + ahead // 512):
            daemon._take(None)

    with pytest.raises(_Stop):
        take_all()


def test_take_over_is_found_behind_a_backlog(daemon):
    put = daemon._transport._sink
    for _ in range(512):
        put(Connected(session_present=True))
    put(TakenOver())
    daemon._take(None)
    with pytest.raises(TakenOverError, match="took over this session"):
        daemon._take(None)


def _sqlite_full():
    error = sqlite3.OperationalError("database or disk is full")
    error.sqlite_errorcode = sqlite3.SQLITE_FULL
    return error


@pytest.mark.parametrize(
    ("error", "kind", "words"),
    [
        (OSError(errno.ENOSPC, "No space left on device"), StorageError, "srv"),
        (OSError(errno.EIO, "Input/output error"), StorageError, "srv"),
        (_sqlite_full(), StorageError, "srv"),
        (OSError(errno.EBADF, "Bad file descriptor"), OSError, "Bad file descriptor"),
    ],
    ids=["full", "failing", "full in SQLite", "another stays itself"],
)
def test_failing_disk_is_no_bug(place, monkeypatch, error, kind, words):
    """The aggregator ends with status 9, as a device does, and goes on where it was when it is started again."""
    monkeypatch.setattr(Daemon, "serve", Mock(side_effect=error))
    monkeypatch.setattr("aggregator.daemon.raise_open_files_limit", lambda _needed: "")
    with pytest.raises(kind, match=str(place.server) if words == "srv" else words):
        serve(AggregatorConfig(dir=place.server))


# ------------------------------------------------------------------------------------------------------- for `status`


def test_without_broker_it_says_so_at_end(place, monkeypatch):
    """Nobody answers on port 1."""
    monkeypatch.setattr("aggregator.daemon.signal.signal", lambda *_handler: None)
    with pytest.raises(BrokerUnreachableError):
        daemon_of(place).serve()
    facts = read_live(place.server)
    assert (facts.connection.connected, facts.connection.broker) == (False, "mqtt://127.0.0.1:1")
    assert facts.ended_at_s is not None
    assert "no MQTT broker can be used at mqtt://127.0.0.1:1" in facts.error
    assert facts.hint


def test_connection_is_recorded_without_run(place, daemon):
    """The connection is recorded while no run is served."""
    daemon._handle(Connected(session_present=False), None)
    daemon._keep_status()
    assert read_live(place.server).connection.connected
    daemon._handle(Disconnected("gone"), None)
    daemon._keep_status()
    assert read_live(place.server).connection.reason == "gone"


# ----------------------------------------------------------------------------------------------- the owner's requests


def ask(place, daemon, action, sequence, **parts):
    """Hand the owner's request to a daemon, as the broker does."""
    request = request_of(action, fleet="reef", sequence=sequence, **parts)
    for chunk in chunks_of(seal_request(place.owner, place.owner.roster.aggregator, request)):
        daemon._handle(Message("shoal/v1/reef/o/request", chunk), daemon._service)


def test_run_stopped_before_it_began(place, daemon):
    """A run that was stopped before it began is passed over."""
    first, second = place.sign(), place.sign()
    ask(place, daemon, RequestAction.STOP, 1, run=first.run)
    assert daemon._next_run().plan == second
    assert daemon_of(place)._next_run().plan == second
    assert not place.directory(first).exists()


def test_run_stopped_while_gathering(place, daemon, plan, monkeypatch):
    """A run that is stopped while devices are gathered ends without a final round."""

    def take(_service):
        ask(place, daemon, RequestAction.STOP, 1, run=plan.run)

    monkeypatch.setattr(daemon, "_take", take)
    daemon._serve_run(daemon._next_run())
    assert (daemon._service, daemon._next_run(), read_records(place.directory(plan))) == (None, None, [])
    assert daemon_of(place)._next_run() is None


def test_order_reaches_run_and_next_life(place, plan):
    """An order reaches the open run and the next life of the daemon."""
    for sequence, action, wanted in ((1, RequestAction.PAUSE, Order.PAUSE), (2, RequestAction.RESUME, Order.GO)):
        daemon = daemon_of(place)
        run = daemon._next_run()
        daemon._begin(run, daemon._runs.package(run), None)
        ask(place, daemon, action, sequence, run=plan.run)
        assert daemon._service.state.order is wanted
        daemon._let_go()
        again = daemon_of(place)
        assert again._begin(run, again._runs.package(run), None).state.order is wanted
        again._let_go()


def test_forged_request_ends_nothing(daemon, caplog):
    """A forged request is logged and ends nothing."""
    daemon._handle(Message("shoal/v1/reef/o/request", b"junk"), None)
    assert told(caplog) == ["refused"]


def test_later_optional_kind_is_skipped(daemon, caplog):
    """An optional kind of a later version is skipped."""
    for topic in ("o/request", "o/roster", "d/dev-1/state"):
        daemon._handle(Message(f"shoal/v1/reef/{topic}", forge(kind=200)), None)
    assert told(caplog) == []


def test_failing_disk_ends_the_daemon(place, daemon, plan, monkeypatch):
    """The request is durable and answered; the service's own error is no answer."""
    run = daemon._next_run()
    service = daemon._begin(run, daemon._runs.package(run), None)

    monkeypatch.setattr(service, "feed", Mock(side_effect=StorageError("the disk is full")))
    with pytest.raises(StorageError):
        ask(place, daemon, RequestAction.PAUSE, 1, run=plan.run)
    assert daemon._orders.of(plan.run_id) is Order.PAUSE
    daemon._let_go()


def test_too_many_comparisons_pass_over(place, daemon, tmp_path, caplog, monkeypatch):
    """A run whose workers would compare too many updates is passed over."""
    plan = place.sign_for_workers(tmp_path)
    assert daemon._next_run().plan == plan
    monkeypatch.setattr("aggregator.strategies.registry.MOST_COMPARED", 0)
    assert told_once(place, caplog) == (
        "passed over: cfl would compare 1 updates with each other in a round, and an aggregator with workers compares 0 at most"
    )
    Store(place.directory(plan), plan).close()
    assert daemon._next_run().plan == plan, "a run that was begun goes on, though the roster has grown since"
