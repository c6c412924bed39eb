"""A run's files across mask epochs: the old epoch or the new one after any crash, and nothing of the old one behind it."""

import dataclasses

import numpy as np
import pytest

from aggregator.rounds.resume import ResumeMetadata
from aggregator.storage.run_status import read_generation
from aggregator.storage.store import Store
from aggregator.strategies.base import norm_of
from shoal.errors import IntegrityError
from shoal.protocol.messages import Phase
from shoal.util.state_codec import Encoded
from tests.helpers.plans import D, digest_of, engine_of, run_plan, upload_of

DEVICES = ("dev-1", "dev-2", "dev-3")
RUN = run_plan(epoch_rounds=2)
RNG = np.random.default_rng(1)
VECTORS = {d: RNG.standard_normal(D).astype(np.float32) for d in DEVICES}
OFFSET, FRESH = (RNG.standard_normal(D).astype(np.float32) for _ in range(2))
NEXT = RUN.in_epoch(2, b"n" * 16)
METADATA = ResumeMetadata(2, NEXT.key_id, since=2, generation=4, step=2, open=False)
OLD = Encoded({"old": True}, {"slot.offset": OFFSET})
NEW = Encoded({"new": True}, {"slot.offset": FRESH})
KEY = (2, int(Phase.TRAIN), "dev-1")


@pytest.fixture
def folder(tmp_path):
    return tmp_path / "run"


@pytest.fixture
def open_store(folder):
    """Return a function that opens the directory's store; all are closed in the end."""
    opened = []

    def make():
        opened.append(Store(folder, RUN))
        return opened[-1]

    yield make
    for store in opened:
        store.close()


def append(store, device, *, round_=2, attached=b"", **changes):
    engine = engine_of(RUN)
    state = engine.resume(DEVICES, engine.strategy.init(DEVICES), round_, DEVICES)[0]
    upload, body = upload_of(engine, state, device, values=VECTORS[device], attached=len(attached), **changes)
    if upload.length == 0:
        body = b""
    digest = digest_of(upload, body + attached)
    store.append(upload, memoryview(body + attached), norm_of(VECTORS[device]), digest)
    return digest


def masked_anew(store, key=KEY):
    """Return an upload as its device has masked it anew."""
    old = store.fetch(key)
    return {key: dataclasses.replace(old, key_id=NEXT.key_id, vector=old.vector[::-1].copy())}


def filled(open_store):
    """Return a store with a snapshot of round 2 and the uploads of three devices."""
    store = open_store()
    for device in DEVICES:
        append(store, device)
    store.commit()
    store.snapshot(2, DEVICES, OLD)
    return store


def renew(store, own=None):
    store.renew(2, NEW, masked_anew(store) if own is None else own, METADATA, b"certificate and origins")


def anywhere(folder, data):
    """Return the files that hold ``data``."""
    return [p.name for p in folder.rglob("*") if p.is_file() and data in p.read_bytes()]


# ---------------------------------------------------------------------------------------------------- renew


def test_a_mask_epoch_leaves_what_was_masked_anew_and_nothing_else(open_store, folder):
    store = filled(open_store)
    renew(store)
    assert [c.device for c, _ in store.uploads(2)] == ["dev-1"]
    found = store.fetch(KEY)
    assert found.vector.tobytes() == VECTORS["dev-1"][::-1].tobytes()
    assert (found.key_id, found.samples) == (NEXT.key_id, 10)
    for old in (*VECTORS.values(), OFFSET):
        assert anywhere(folder, old.tobytes()) == []
    for kind in ("updates", "vectors"):
        assert [p.name for p in (folder / kind).iterdir()] == ["epoch-000002"]


def test_it_is_all_there_when_the_store_is_opened_again(open_store, folder):
    first = filled(open_store)
    assert first.epoch() == b""
    renew(first)
    first.close()
    store = open_store()
    snapshot = store.restore()
    assert (snapshot.round, snapshot.available, snapshot.document) == (2, (), {"new": True})
    assert snapshot.vectors["slot.offset"].tobytes() == FRESH.tobytes()
    assert snapshot.metadata == METADATA
    assert store.epoch() == b"certificate and origins"
    assert store.fetch(KEY).vector.tobytes() == VECTORS["dev-1"][::-1].tobytes()
    assert read_generation(folder) == 4
    with pytest.raises(IntegrityError, match="dev-2 in round 2 is not in"):
        store.fetch((2, 1, "dev-2"))


def test_the_digest_that_a_device_signed_stays_with_its_upload(open_store):
    store = open_store()
    digest = append(store, "dev-1")
    store.commit()
    renew(store)
    assert [d for _, d in store.uploads(2)] == [digest]


def test_several_updates_of_one_round_lie_behind_each_other(open_store):
    store = filled(open_store)
    own = masked_anew(store) | masked_anew(store, (2, 1, "dev-3"))
    renew(store, own)
    store.close()
    again = open_store()
    for device in ("dev-1", "dev-3"):
        assert again.fetch((2, 1, device)).vector.tobytes() == VECTORS[device][::-1].tobytes()


def test_uploads_of_the_new_epoch_go_on_behind_what_was_masked_anew(open_store):
    store = filled(open_store)
    renew(store)
    append(store, "dev-2")
    store.commit()
    assert store.fetch((2, 1, "dev-2")).vector.tobytes() == VECTORS["dev-2"].tobytes()
    assert store.fetch(KEY).vector.tobytes() == VECTORS["dev-1"][::-1].tobytes()


def test_one_epoch_after_another(open_store, folder):
    store = filled(open_store)
    renew(store)
    later = dataclasses.replace(METADATA, epoch=3, since=4)
    store.renew(4, NEW, masked_anew(store), later, b"another")
    assert store.fetch(KEY).vector.tobytes() == VECTORS["dev-1"].tobytes()
    assert [p.name for p in (folder / "updates").iterdir()] == ["epoch-000003"]
    assert store.epoch() == b"another"


class Crash(BaseException):
    """The power is cut."""


class Cut(dict):
    """Vectors of which the second can't be written any more."""

    def items(self):
        yield from list(super().items())[:1]
        raise Crash


def test_a_crash_before_the_transaction_leaves_the_old_epoch(open_store, folder):
    """Files of the new one lie there already; the next start erases them, and the rollover can be done again."""
    store = filled(open_store)
    with pytest.raises(Crash):
        store.renew(2, Encoded({}, Cut(a=FRESH, b=OFFSET)), masked_anew(store), METADATA, b"x")
    assert len(list((folder / "updates").iterdir())) == 2
    store.close()
    again = open_store()
    assert [p.name for p in (folder / "updates").iterdir()] == ["epoch-000001"]
    assert again.restore().document == {"old": True}
    assert [c.device for c, _ in again.uploads(2)] == list(DEVICES)
    assert again.epoch() == b""
    renew(again)
    assert again.restore().document == {"new": True}


def test_what_a_crash_left_in_the_new_folders_does_not_mix_with_the_next_try(open_store, folder):
    """In the same life: a try that failed has written an update there."""
    store = filled(open_store)
    with pytest.raises(Crash):
        store.renew(2, Encoded({}, Cut(a=FRESH, b=OFFSET)), masked_anew(store, (2, 1, "dev-2")), METADATA, b"x")
    renew(store)
    assert (folder / "updates" / "epoch-000002" / "000002.f32").stat().st_size == 4 * D
    assert [p.read_bytes() for p in (folder / "vectors" / "epoch-000002").iterdir()] == [FRESH.tobytes()]


def test_a_crash_after_the_transaction_leaves_the_new_epoch(open_store, folder, monkeypatch):
    store = filled(open_store)

    def cut(*_):
        raise Crash

    with monkeypatch.context() as patched:
        patched.setattr(store, "_enter", cut)
        with pytest.raises(Crash):
            renew(store)
    assert anywhere(folder, VECTORS["dev-2"].tobytes())
    again = open_store()
    assert again.restore().document == {"new": True}
    assert anywhere(folder, VECTORS["dev-2"].tobytes()) == []


# ---------------------------------------------------------------------------------------------------- steps


def test_what_is_attached_comes_back(open_store):
    store = open_store()
    append(store, "dev-1", attached=b"a fold and its origins", phase=4, length=0)
    (given,) = store.commit()
    assert (given.vector, given.attached) == (None, b"a fold and its origins")
    store.close()
    assert open_store().fetch((2, 4, "dev-1")).attached == b"a fold and its origins"


@pytest.mark.parametrize("at", [0, 5, 21])
def test_attached_bytes_that_were_altered_are_noticed(open_store, folder, at):
    store = open_store()
    append(store, "dev-1", attached=b"a fold and its origins", phase=4, length=0)
    store.commit()
    path = folder / "updates" / "epoch-000001" / "000002.f32"
    raw = bytearray(path.read_bytes())
    raw[at] ^= 4
    path.write_bytes(raw)
    with pytest.raises(IntegrityError, match="dev-1 in round 2 was altered"):
        store.fetch((2, 4, "dev-1"))


def test_steps_that_failed_are_forgotten_and_take_no_room(open_store, folder):
    """A rollover may fail for weeks: each try writes over the last one's bytes, and over nothing else."""
    store = filled(open_store)
    for attempt in range(4):
        append(store, "dev-1", attached=bytes([attempt]) * 100, phase=4, length=0)
        append(store, "dev-2", attached=bytes([attempt]) * 50, phase=7, length=0)
        store.commit()
        assert store.fetch((2, 7, "dev-2")).attached == bytes([attempt]) * 50
        assert store._updates._ends[2] == 3 * 4 * D + 150
        store.fail(2, (4, 7), OLD, dataclasses.replace(METADATA, epoch=1, step=attempt, open=True))
        snapshot = store.restore()
        assert (snapshot.round, snapshot.metadata) == (2, dataclasses.replace(METADATA, epoch=1, step=attempt))
        assert [c.phase for c, _ in store.uploads(2)] == [Phase.TRAIN] * 3
    assert {c.device: c.vector.tobytes() for c, _ in store.uploads(2)} == {d: v.tobytes() for d, v in VECTORS.items()}


def test_an_upload_may_be_withdrawn_before_it_is_durable(open_store):
    store = open_store()
    digest = append(store, "dev-1")
    append(store, "dev-2")
    store.withdraw(digest)
    assert [c.device for c in store.commit()] == ["dev-2"]
    assert [c.device for c, _ in store.uploads(2)] == ["dev-2"]
    append(store, "dev-1")
    store.commit()
    assert store.fetch(KEY).vector.tobytes() == VECTORS["dev-1"].tobytes()


def test_a_round_may_be_swept_while_an_upload_of_it_is_on_its_way(open_store):
    """Its round has closed without it, and the next snapshot has come first."""
    store = filled(open_store)
    digest = append(store, "dev-1", phase=3)
    store.snapshot(3, DEVICES, OLD)
    store.withdraw(digest)
    store.prepare()()
    assert store.commit() == []


def test_an_epoch_may_end_while_an_upload_of_it_is_on_its_way(open_store):
    store = filled(open_store)
    digest = append(store, "dev-1", phase=3)
    renew(store)
    store.withdraw(digest)
    store.prepare()()
    assert store.commit() == []
