"""What survives a crash: group commit, torn tails, altered files, snapshots, and what is swept away."""

import dataclasses
import sqlite3
import stat
from pathlib import Path

import numpy as np
import pytest

from aggregator.rounds.closing import Watched
from aggregator.rounds.snapshot import ResumeMetadata
from aggregator.storage.store import Store, read_records
from aggregator.strategies.base import norm_of
from shoal.errors import IntegrityError
from shoal.util.state_codec import Encoded
from tests.helpers.plans import (
    KEY_VERSION,
    ROUND_KEY,
    D,
    append_upload,
    commit_uploads,
    digest_of,
    engine_of,
    resumed,
    run_plan,
    upload_of,
)

DEVICES = ("dev-1", "dev-2", "dev-3")
RUN = run_plan()
RNG = np.random.default_rng(0)
VECTORS = {d: RNG.standard_normal(D).astype(np.float32) for d in DEVICES}


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def open_store(folder):
    """Return a function that opens the directory's store; all are closed in the end."""
    opened = []

    def make(run=RUN, **options):
        opened.append(Store(folder, run, **options))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


@pytest.fixture
def store(open_store):
    return open_store()


def upload(device, round_=1):
    engine = engine_of(RUN)
    return upload_of(engine, resumed(engine, DEVICES, round_), device, values=VECTORS[device])


def append(store, *devices, round_=1):
    for device in devices:
        header, body = upload(device, round_)
        append_upload(store, header, memoryview(body), norm_of(VECTORS[device]), digest_of(header, body))


def commit(store, *devices, round_=1):
    """Store the uploads of devices for good, and return them."""
    append(store, *devices, round_=round_)
    return commit_uploads(store)


def test_committed_comes_back_as_it_was(open_store, store):
    """In order of device."""
    assert [c.device for c in commit(store, "dev-2", "dev-1")] == ["dev-2", "dev-1"]
    store.close()
    found = open_store().uploads(1)
    assert [c.device for c in found] == ["dev-1", "dev-2"]
    for contribution_ in found:
        header, body = upload(contribution_.device)
        assert contribution_.digest == digest_of(header, body)
        assert contribution_.vector.tobytes() == VECTORS[contribution_.device].tobytes()
        assert contribution_.norm == pytest.approx(np.linalg.norm(VECTORS[contribution_.device]), rel=1e-6)
        assert (contribution_.samples, contribution_.loss, contribution_.key_id) == (10, 1.0, ROUND_KEY)


def test_nothing_is_there_before_the_commit(open_store, store):
    append(store, "dev-1")
    assert open_store().uploads(1) == []
    commit_uploads(store)
    assert len(store.uploads(1)) == 1
    assert (commit_uploads(store), store.uploads(2)) == ([], [])


def test_a_torn_tail_is_written_over(open_store, store, folder):
    """The crash came between the vectors and their rows: the bytes stay unreferenced, and the next upload takes their place."""
    commit(store, "dev-1")
    append(store, "dev-2")
    store.close()
    file = folder / "updates" / "000001.f32"
    assert file.stat().st_size == 2 * 4 * D
    with file.open("ab") as handle:
        handle.write(b"half a vec")
    store = open_store()
    assert [c.device for c in store.uploads(1)] == ["dev-1"]
    (given,) = commit(store, "dev-3")
    assert given.vector.tobytes() == VECTORS["dev-3"].tobytes()
    assert file.read_bytes()[4 * D : 8 * D] == VECTORS["dev-3"].tobytes()
    assert {c.device: c.vector.tobytes() for c in open_store().uploads(1)} == {
        d: VECTORS[d].tobytes() for d in ("dev-1", "dev-3")
    }


@pytest.mark.parametrize("at", [0, 4 * D - 1, 4 * D + 7])
def test_an_altered_vector_is_refused(store, folder, at):
    commit(store, "dev-1", "dev-2")
    file = folder / "updates" / "000001.f32"
    raw = bytearray(file.read_bytes())
    raw[at] ^= 0x10
    file.write_bytes(raw)
    victim = "dev-1" if at < 4 * D else "dev-2"
    with pytest.raises(IntegrityError, match=f"{victim} in round 1 was altered"):
        store.uploads(1)


def test_report_without_vector_is_empty(store, folder):
    """A report without a vector takes no bytes."""
    header, _ = upload("dev-1")
    header = dataclasses.replace(header, phase=3, length=0, correct=2, tested=5, margins=(0.0, 0.25))
    append_upload(store, header, memoryview(b""), 0.0, digest_of(header, b""))
    (given,) = commit_uploads(store)
    assert given.vector is None
    assert not sum(path.stat().st_size for path in (folder / "updates").iterdir())
    (again,) = store.uploads(1)
    assert (again.correct, again.tested, again.margins) == (2, 5, (0.0, 0.25))


def test_same_upload_has_one_row(store):
    """The key is unique in the database too: what the rules should have stopped stops here."""
    commit(store, "dev-1")
    with pytest.raises(sqlite3.IntegrityError):
        commit(store, "dev-1")
    assert len(store.uploads(1)) == 1


def test_another_runs_directory_is_refused(open_store):
    open_store().close()
    with pytest.raises(IntegrityError, match="holds another run"):
        open_store(run=dataclasses.replace(RUN, run_id=b"x" * 16))


def test_the_seed_of_nonces_is_drawn_once(open_store):
    assert open_store(seed=lambda: b"a" * 16).seed == b"a" * 16
    assert open_store(seed=lambda: b"b" * 16).seed == b"a" * 16
    assert len(open_store().seed) == 16


def test_everything_is_private(store, folder):
    commit(store, "dev-1")
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in [folder, *folder.rglob("*")]}
    assert modes["run"] == modes["updates"] == modes["vectors"] == 0o700
    assert modes["run.sqlite"] == modes["000001.f32"] == 0o600


# ---------------------------------------------------------------------------------------------------- snapshots

METADATA = ResumeMetadata(KEY_VERSION, Watched({"train": 1.5}))


def test_a_snapshot_comes_back_as_it_was(open_store):
    """Of 2 vectors that are equal one file is written, and both names lead to it."""
    store, vector = open_store(), VECTORS["dev-1"]
    state = Encoded({"a": [1, "x"]}, {"one": vector, "two": vector.copy(), "other": VECTORS["dev-2"]})
    assert store.restore() is None
    store.snapshot(4, DEVICES, state, METADATA)
    snapshot = open_store().restore()
    assert (snapshot.round, snapshot.available, snapshot.metadata) == (4, DEVICES, METADATA)
    assert snapshot.document == state.document
    assert {name: v.tobytes() for name, v in snapshot.vectors.items()} == {
        name: v.tobytes() for name, v in state.arrays.items()
    }
    assert len(list((store.directory / "vectors").iterdir())) == 2


def test_altered_vector_is_noticed(store, folder):
    """An altered or missing vector is noticed."""
    store.snapshot(2, DEVICES, Encoded({}, {"mean": VECTORS["dev-1"]}), METADATA)
    (file,) = (folder / "vectors").iterdir()
    raw = bytearray(file.read_bytes())
    raw[3] ^= 1
    file.write_bytes(raw)
    with pytest.raises(IntegrityError, match=rf"{file.name} is missing or altered"):
        store.restore()
    file.unlink()
    with pytest.raises(IntegrityError, match="missing or altered"):
        store.restore()


def test_checkpoints_go_with_their_states(open_store, folder):
    """One of 5 bytes, so that it is no vector of float32."""
    store, sealed = open_store(), np.frombuffer(b"seal!", np.uint8)
    store.snapshot(1, DEVICES, Encoded({}, {"a": sealed, "b": VECTORS["dev-1"]}), METADATA)
    found = store.restore().vectors
    assert (found["a"].dtype, found["a"].tobytes()) == (np.uint8, b"seal!")
    assert found["b"].tobytes() == VECTORS["dev-1"].tobytes()
    vectors = folder / "vectors"
    assert sorted(path.suffix for path in vectors.iterdir()) == [".f32", ".sealed"]
    (file,) = vectors.glob("*.sealed")
    file.write_bytes(b"seal?")
    with pytest.raises(IntegrityError, match="missing or altered"):
        store.restore()
    store.snapshot(2, DEVICES, Encoded({}), METADATA)
    assert list(vectors.iterdir()) == []


def test_digests_outlast_their_files(store):
    """The digests of a rounds uploads stay when their files are erased."""
    commit(store, "dev-2", "dev-1")
    digests = {c.device: (c.phase, c.digest) for c in store.uploads(1)}
    store.erase()
    assert (store.received(1), store.received(2)) == (digests, {})


def test_what_nothing_needs_is_swept(store, folder):
    """Superseded vectors go, and so do the updates of closed rounds; their disk blocks serve the next ones."""
    for round_, device in enumerate(DEVICES, 1):
        commit(store, *DEVICES, round_=round_)
        store.snapshot(round_ + 1, DEVICES, Encoded({}, {"mean": VECTORS[device]}), METADATA)
        assert [p.name for p in (folder / "updates").iterdir()] == [f"spare-{round_:06d}.f32"]
        assert store.uploads(round_) == []
        (vector,) = (folder / "vectors").iterdir()
        assert vector.read_bytes() == VECTORS[device].tobytes()


def test_updates_of_the_open_round_stay(store, folder):
    for round_ in (1, 2, 3):
        append(store, *DEVICES, round_=round_)
    commit_uploads(store)
    store.snapshot(3, DEVICES, Encoded({}), METADATA)
    expected = ["000003.f32", "spare-000001.f32", "spare-000002.f32"]
    assert sorted(p.name for p in (folder / "updates").iterdir()) == expected
    assert set(store._db.execute("SELECT round, device FROM uploads")) == {(3, d) for d in DEVICES}
    assert [c.device for c in store.uploads(3)] == list(DEVICES)


def test_end_of_a_run_erases_every_update(store, folder):
    """Those of the last round and the spares; records stay."""
    for round_ in (1, 2):
        append(store, *DEVICES, round_=round_)
    commit_uploads(store)
    store.snapshot(2, DEVICES, Encoded({}), METADATA, (1, {"round": 1}))
    assert len(list((folder / "updates").iterdir())) == 2
    store.erase()
    assert not list((folder / "updates").iterdir())
    assert store.records() == [{"round": 1}]


def test_swept_round_closes_its_file(store, folder):
    """A swept round does not keep its file open."""
    before = len(list(Path("/proc/self/fd").iterdir()))
    for round_ in range(1, 8):
        commit(store, "dev-1", round_=round_)
        store.snapshot(round_ + 1, DEVICES, Encoded({}), METADATA)
    assert len(list(Path("/proc/self/fd").iterdir())) <= before + 4


def test_last_record_of_a_round_counts(store, folder):
    """Records come back in order and the last word counts."""
    assert read_records(folder) == []
    for round_, loss in ((2, 0.5), (1, 0.9), (2, 0.4)):
        store.record(round_, {"round": round_, "loss": loss})
    expected = [{"round": 1, "loss": 0.9}, {"round": 2, "loss": 0.4}]
    assert store.records() == read_records(folder) == expected


# ---------------------------------------------------------------------------------------------------- records
