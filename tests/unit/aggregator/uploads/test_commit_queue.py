"""The queue of uploads for the disk: batches, their order, and uploads taken out again."""

import pytest

from aggregator.storage.store import Store
from aggregator.storage.upload import OpenedUpload, UploadRef
from aggregator.uploads.commit_queue import CommitQueue
from aggregator.uploads.states import UploadEvent, UploadState, UploadTable
from tests.helpers.plans import digest_of, engine_of, resumed, run_plan, upload_of
from tests.helpers.uploads import SlowDisk

RUN = run_plan()
NAMES = ("dev-1", "dev-2", "dev-3")


class Queue:
    """A queue with a slow disk, and the batches that became durable."""

    def __init__(self, directory):
        self.store, self.disk, self.table = Store(directory / "run", RUN), SlowDisk(), UploadTable()
        self.queue = CommitQueue(self.store, self.disk, self.table)
        self.batches = []

    def written(self, device):
        """Return an upload of ``device`` that is written and not appended."""
        engine = engine_of(RUN)
        header, body = upload_of(engine, resumed(engine, NAMES), device)
        digest = digest_of(header, body)
        self.table.move(UploadRef(device, b"t" * 16), UploadEvent.COMPLETE)
        self.store.open_updates(header.round)
        return self.store.write(OpenedUpload(header, UploadRef(device, b"t" * 16), digest, 1.0, memoryview(body)))

    def flush(self):
        self.queue.flush(lambda batch, _: self.batches.append([upload.ref.device for upload in batch]))

    def states(self):
        return [self.table.state(UploadRef(name, b"t" * 16)) for name in NAMES]


@pytest.fixture
def scene(tmp_path):
    made = Queue(tmp_path)
    yield made
    made.store.close()


def test_uploads_that_arrive_during_a_commit_are_in_the_next_batch(scene):
    for name in NAMES[:2]:
        scene.queue.append(scene.written(name))
    scene.flush()
    scene.queue.append(scene.written(NAMES[2]))
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
    upload = scene.written("dev-1")
    scene.queue.append(upload)
    assert scene.queue.of("dev-1") is upload
    scene.flush()
    assert scene.queue.of("dev-1") is not None
    assert scene.queue.valid == ()
    scene.disk.done()
    assert scene.queue.of("dev-1") is None


def test_a_withdrawn_upload_is_not_committed(scene):
    for name in NAMES:
        scene.queue.append(scene.written(name))
    scene.queue.withdraw(scene.queue.of("dev-2"))
    scene.flush()
    scene.disk.done()
    assert scene.batches == [["dev-1", "dev-3"]]
    assert [c.device for c in scene.store.uploads(1)] == ["dev-1", "dev-3"]
