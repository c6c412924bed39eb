"""A run of many rounds: the database stays small, and nothing that a command prints gets lost."""

import dataclasses
import os
import sqlite3
from contextlib import closing

import numpy as np
import pytest

from aggregator.rounds.engine import CameOnline
from aggregator.rounds.snapshot import dump, load
from aggregator.storage.store import Store, read_records
from shoal.errors import IntegrityError
from tests.helpers.plans import D, append_upload, commit_uploads, digest_of, engine_of, run_plan, upload_of

DEVICES = tuple(f"device-{i:02}" for i in range(20))
LONG_ROUNDS = 10_000
ROUNDS = 600
MOST_BYTES = 2_000_000
PLANS = {
    "fedavg": {},
    "ifca": {"settings": {"k": 2}, "origins": 2, "max_models": 2},
    "cfl": {},
}


class Run:
    """An engine and its real store, driven as the service drives them; the disk is not waited for."""

    def __init__(self, folder, algorithm="fedavg", devices=DEVICES):
        self.folder = folder
        run = run_plan(algorithm, rounds=LONG_ROUNDS, evaluate_every=1, quorum=1.0, **PLANS[algorithm])
        self.store = Store(folder, run)
        self.store._db.execute("PRAGMA synchronous=OFF")
        self.engine = engine_of(run, self.store.seed)
        self.rng = np.random.default_rng(0)
        self.closed = None
        self.state, _ = self.engine.begin(devices)
        for device in devices:
            self.feed(CameOnline(device))

    def feed(self, event):
        self.state, actions = self.engine.handle(self.state, event)
        for action in actions:
            kind = type(action).__name__
            if kind == "RoundClosed":
                times = {"seconds": float(self.rng.random()), "bytes_up": int(self.rng.integers(10**6))}
                record = {**dataclasses.asdict(action.record), **times}
                self.closed = (record["round"], record)
            elif kind == "OpenRound":
                before = dump(action.before, action.held)
                metadata = self.state.resume_metadata
                self.store.snapshot(action.plan.round, action.available, before, metadata, self.closed)
                self.closed = None

    def round(self):
        """Let every device that the open round asks upload."""
        for device in list(self.state.plan.assignments):
            values = self.rng.standard_normal(D)
            figures = {"loss": float(self.rng.random()), "correct": int(self.rng.integers(40)), "tested": 40}
            upload, body = upload_of(self.engine, self.state, device, values=values, **figures)
            append_upload(self.store, upload, memoryview(body), float(np.linalg.norm(values)), digest_of(upload, body))
        for contribution in commit_uploads(self.store):
            self.feed(contribution)

    def bytes(self):
        """Return what the database takes, with its log moved into it."""
        self.store._db.execute("PRAGMA wal_checkpoint(TRUNCATE)")
        return sum(p.stat().st_size for p in self.folder.glob("run.sqlite*") if not p.name.endswith("shm"))


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda _handle: None)


@pytest.mark.long
@pytest.mark.parametrize("algorithm", ["cfl", "fedavg", "ifca"])
def test_many_rounds_leave_a_small_database(tmp_path, algorithm):
    """Six hundred rounds, and what ten thousand take if each later one takes as much as those after the first 200."""
    run = Run(tmp_path / "run", algorithm)
    sizes = {}
    for round_ in range(1, ROUNDS + 1):
        run.round()
        if round_ in (200, ROUNDS):
            sizes[round_] = run.bytes()
    growth = (sizes[ROUNDS] - sizes[200]) / (ROUNDS - 200)
    assert sizes[ROUNDS] + growth * (LONG_ROUNDS - ROUNDS) < MOST_BYTES, sizes
    assert run.folder.joinpath("run.sqlite-wal").stat().st_size == 0
    (rows,) = run.store._db.execute("SELECT count(*) FROM uploads").fetchone()
    assert rows <= 2 * len(DEVICES)
    run.store.close()


@pytest.mark.slow
def test_the_log_of_the_database_stays_small(tmp_path):
    run = Run(tmp_path / "run")
    for _ in range(150):
        run.round()
    assert run.folder.joinpath("run.sqlite-wal").stat().st_size < MOST_BYTES
    run.store.close()


def test_state_is_found_after_many_rounds(tmp_path):
    """A state is found again after many rounds."""
    run = Run(tmp_path / "run", "cfl")
    for round_ in range(1, 30):
        run.round()
        if round_ % 7 == 0:
            run.feed(CameOnline(f"late-{round_}"))
    run.store.close()
    store = Store(run.folder, run.engine.run)
    snapshot = store.restore()
    state, held = load(run.engine.strategy.state_type, snapshot.document, snapshot.vectors)
    assert state.heard == run.state.strategy.heard
    assert len(state.heard) > len(DEVICES)
    assert held.steps[-1].step == run.state.held.steps[-1].step
    (rows,) = store._db.execute("SELECT min(round) FROM uploads").fetchone()
    assert rows in (None, snapshot.round), "no row of an earlier round is left"
    store.close()


@pytest.mark.parametrize("version", [3, 4])
def test_earlier_directory_is_refused(tmp_path, version):
    """Version 4 had the updates of each mask epoch in a folder of its own."""
    run = Run(tmp_path / "run")
    run.store.close()
    with closing(sqlite3.connect(run.folder / "run.sqlite", isolation_level=None)) as database:
        database.execute("UPDATE facts SET value = ? WHERE name = 'schema'", (str(version).encode(),))
        database.execute("DROP TABLE rounds")
        database.execute("CREATE TABLE rounds (round INTEGER PRIMARY KEY, record TEXT NOT NULL)")
    for read in (lambda: Store(run.folder, run.engine.run), lambda: read_records(run.folder)):
        with pytest.raises(IntegrityError, match="written by another version") as caught:
            read()
        assert "move the directory away" in caught.value.hint
