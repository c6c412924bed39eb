"""The queue of uploads for the disk: batches, their order, and uploads taken out again."""

import pytest

from aggregator.storage.store import Store
from aggregator.uploads.commit_queue import CommitQueue
from aggregator.uploads.states import UploadRef, UploadState, UploadTable
from aggregator.uploads.validation import VerifiedUpload
from tests.helpers.plans import digest_of, engine_of, resumed, run_plan, upload_of
from tests.helpers.uploads import SlowDisk

RUN = run_plan()
NAMES = ("dev-1", "dev-2", "dev-3")


def verified(device):
    engine = engine_of(RUN)
    state = resumed(engine, NAMES)
    header, body = upload_of(engine, state, device)
    return VerifiedUpload(header, memoryview(body), 1.0, UploadRef(device, b"t" * 16), digest_of(header, body))


class Queue:
    """A queue with a slow disk, and the batches that became durable."""

    def __init__(self, directory):
        self.store, self.disk, self.table = Store(directory / "run", RUN), SlowDisk(), UploadTable()
        self.queue = CommitQueue(self.store, self.disk, self.table)
        self.batches = []

    def flush(self):
        self.queue.flush(lambda batch: self.batches.append([upload.ref.device for upload, _ in batch]))

    def states(self):
        return [self.table.state(UploadRef(name, b"t" * 16)) for name in NAMES]


@pytest.fixture
def scene(tmp_path):
    made = Queue(tmp_path)
    yield made
    made.store.close()


def test_uploads_that_arrive_during_a_commit_are_in_the_next_batch(scene):
    for name in NAMES[:2]:
        scene.queue.append(verified(name))
    scene.flush()
    scene.queue.append(verified(NAMES[2]))
    scene.flush()
    assert scene.states() == [UploadState.COMMITTING] * 2 + [UploadState.VALID]
    scene.disk.done()
    scene.flush()
    scene.disk.done()
    assert scene.batches == [["dev-1", "dev-2"], ["dev-3"]]
    assert not scene.queue.busy


def test_an_empty_queue_starts_no_commit(scene):
    scene.flush()
    assert scene.disk.waiting == []
    assert not scene.queue.busy


def test_a_queued_upload_is_found_until_it_is_durable(scene):
    assert scene.queue.of("dev-1") is None
    scene.queue.append(verified("dev-1"))
    assert scene.queue.of("dev-1").digest == verified("dev-1").digest
    scene.flush()
    assert scene.queue.of("dev-1") is not None
    assert scene.queue.valid == ()
    scene.disk.done()
    assert scene.queue.of("dev-1") is None


def test_queued_uploads_hold_no_vector(scene):
    scene.queue.append(verified("dev-1"))
    assert len(scene.queue.of("dev-1").body) == 0


def test_a_withdrawn_upload_is_not_committed(scene):
    for name in NAMES:
        scene.queue.append(verified(name))
    scene.queue.withdraw(scene.queue.of("dev-2"))
    scene.flush()
    scene.disk.done()
    assert scene.batches == [["dev-1", "dev-3"]]
    assert [c.device for c, _ in scene.store.uploads(1)] == ["dev-1", "dev-3"]


def test_an_upload_that_can_not_be_written_is_not_queued(scene, monkeypatch):
    def full(*_args):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(scene.store, "append", full)
    with pytest.raises(OSError, match="No space left"):
        scene.queue.append(verified("dev-1"))
    assert scene.states()[0] is UploadState.RECEIVING
    assert not scene.queue.busy
