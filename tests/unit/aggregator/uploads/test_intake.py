"""Uploads in the hands of workers: order, copies, events, late ones, crashes, floods, and real threads."""

import queue
from contextlib import closing
from unittest.mock import Mock

import pytest

from aggregator.rounds.state import DeadlinePassed, WentOffline
from aggregator.uploads.states import UploadState
from aggregator.workers import ThreadWorkers
from shoal.protocol.messages import Action
from tests.helpers.uploads import DEVICES, LENGTH, Scene, Sent, SlowDisk, SlowWorkers

VECTOR_BYTES = 4 * LENGTH


@pytest.fixture
def workers():
    return SlowWorkers()


@pytest.fixture
def scene(tmp_path, workers):
    with closing(Scene(tmp_path, intake=workers)) as made:
        yield made


def written_bytes(scene):
    """Return how many bytes the file of the open round holds."""
    return scene.store._updates._ends.get(scene.state.round, 0)


def verify(workers, *devices):
    """Let workers verify the oldest upload of each device, and the driver settle it."""
    for device in devices:
        workers.run(device)
        workers.call_back(device)


def texts(scene):
    return [str(error) for error in scene.take_refused()]


def test_worker_verifies_driver_settles(scene, workers):
    """An upload is verified by a worker and settled by the driver."""
    packet = scene.packet("dev-1")
    scene.send(packet)
    assert scene.state_of(packet) is UploadState.VERIFYING
    assert written_bytes(scene) == 0
    workers.run("dev-1")
    assert scene.state_of(packet) is UploadState.VERIFYING
    assert written_bytes(scene) == VECTOR_BYTES
    workers.call_back("dev-1")
    assert scene.state_of(packet) is UploadState.VALID
    assert scene.publisher.take() == []
    scene.commit()
    assert scene.publisher.take() == [Sent("dev-1", packet.transfer, Action.ACK)]
    assert scene.durable(1) == {"dev-1": packet.digest}


def test_copies_in_hand_change_nothing(scene, workers):
    """A copy and a reminder of an upload in hand change nothing."""
    packet = scene.packet("dev-1")
    scene.send_all(packet, packet)
    scene.remind(packet)
    assert scene.publisher.take() == []
    assert len(workers.jobs["dev-1"]) == 1
    workers.finish()
    scene.commit()
    assert scene.publisher.take() == [Sent("dev-1", packet.transfer, Action.ACK)]


def test_of_two_uploads_in_hand_first_counts(scene, workers):
    first, second = scene.packet("dev-1"), scene.packet("dev-1", value=2.0)
    scene.send_all(first, second)
    workers.finish()
    assert (scene.state_of(first), scene.state_of(second)) == (UploadState.VALID, UploadState.REFUSED)
    assert texts(scene) == ["upload of dev-1 for round 1: another upload came before"]
    scene.commit()
    third = scene.packet("dev-1", value=3.0)
    scene.send(third)
    workers.finish()
    refused = [(s.transfer, s.reason) for s in scene.publisher.take() if s.action is Action.REFUSED]
    assert refused == [
        (second.transfer, "another upload came before"),
        (third.transfer, "another upload was stored before"),
    ]
    assert scene.durable(1) == {"dev-1": first.digest}


def test_others_overtake_a_slow_upload(scene, workers):
    """Uploads of other devices overtake a slow one."""
    packets = {device: scene.packet(device) for device in DEVICES}
    scene.send_all(*packets.values())
    verify(workers, "dev-3", "dev-2")
    states = [scene.state_of(packet) for packet in packets.values()]
    assert states == [UploadState.VERIFYING, UploadState.VALID, UploadState.VALID]


@pytest.mark.parametrize("kind", ["forged", "wrong digest", "for another run"])
def test_dropped_upload_may_come_again(scene, workers, kind):
    """An upload that is dropped may be sent again."""
    real = scene.packet("dev-1")
    chunks = real.chunks
    if kind == "wrong digest":
        # The same transfer id over other bytes.
        scene.uploads.receive("dev-1", chunks[0][:-1] + bytes([chunks[0][-1] ^ 1]), 0.0)
        for chunk in chunks[1:]:
            scene.uploads.receive("dev-1", chunk, 0.0)
        packet = real
    else:
        changes = {"signer": "dev-2"} if kind == "forged" else {"run": 2, "run_id": bytes(16)}
        packet = scene.packet("dev-1", **changes)
        scene.send(packet)
    assert scene.state_of(packet) is UploadState.VERIFYING
    workers.finish()
    assert scene.state_of(packet) is UploadState.RECEIVING
    assert scene.publisher.take() == []
    assert len(texts(scene)) == 1
    assert scene._inbound.chunks.refused["digest"] == (kind == "wrong digest")
    assert written_bytes(scene) == 0
    scene.send(real)
    workers.finish()
    assert scene.state_of(real) is UploadState.VALID


def test_unfit_upload_is_not_written(scene, workers):
    """A flood of copies under other ids, or of second uploads, takes no disk."""
    first = scene.packet("dev-1")
    scene.send(first)
    workers.finish()
    again = scene.packet("dev-1")
    assert again.transfer != first.transfer, "sealing draws a key each time"
    for packet in (again, scene.packet("dev-1", value=2.0), scene.packet("dev-2", tested=1)):
        scene.send(packet)
        workers.finish()
    assert written_bytes(scene) == VECTOR_BYTES


def test_event_waits_for_earlier_uploads(scene, workers):
    """The last device goes offline right after its upload: the round closes with the upload, not without it."""
    scene.send_all(*map(scene.packet, DEVICES))
    verify(workers, "dev-1", "dev-2")
    scene.commit()
    scene.feed(WentOffline("dev-3"))
    assert scene.state.round == 1
    assert "dev-3" in scene.state.online
    workers.finish()
    scene.commit()
    assert (scene.state.round, set(scene.durable(1))) == (2, set(DEVICES))
    assert "dev-3" not in scene.state.online


def test_event_leaves_later_uploads(scene, workers):
    """A flood of forged uploads would otherwise hold it back for ever."""
    scene.feed(DeadlinePassed(1))
    assert scene.state.deadline_passed
    scene.send(scene.packet("dev-1", signer="dev-2"))
    scene.feed(WentOffline("dev-3"))
    scene.send(scene.packet("dev-2", signer="dev-1"))
    verify(workers, "dev-1")
    assert "dev-3" not in scene.state.online


def test_commit_leaves_later_uploads(scene, workers):
    """A commit does not wait for uploads that arrive later."""
    scene.send_all(scene.packet("dev-2", signer="dev-1"), scene.packet("dev-1"))
    verify(workers, "dev-1")
    scene.uploads.flush()
    assert scene.disk.waiting == [], "the one before it may be in the same batch"
    scene.send(scene.packet("dev-3", signer="dev-1"))
    verify(workers, "dev-2")
    scene.commit()
    assert set(scene.durable(1)) == {"dev-1"}


@pytest.mark.parametrize("ran", [False, True])
def test_upload_in_hand_of_a_closed_round(scene, workers, ran):
    """Written or not: it never reaches the file that the next round takes over."""
    scene.feed(DeadlinePassed(1))
    late = scene.packet("dev-3", value=3.0)
    for device in ("dev-1", "dev-2"):
        scene.send(scene.packet(device))
        workers.finish()
    scene.uploads.flush()
    scene.send(late)
    if ran:
        workers.run("dev-3")
    scene.disk.done()
    assert scene.state.round == 2
    scene.snapshot()
    scene.publisher.take()
    workers.finish()
    assert scene.publisher.take() == [Sent("dev-3", late.transfer, Action.REFUSED, "the round is not open")]
    following = [scene.packet(device) for device in DEVICES]
    scene.send_all(*following)
    workers.finish()
    scene.commit()
    assert scene.durable(2) == {packet.device: packet.digest for packet in following}


def test_crash_loses_what_workers_hold(scene, workers):
    """What workers hold is lost in a crash and can be sent again."""
    done, written, waiting = (scene.packet(device) for device in DEVICES)
    scene.send_all(done, written, waiting)
    verify(workers, "dev-1")
    scene.commit()
    workers.run("dev-2")
    scene.restart()
    assert set(scene.state.received) == set()
    scene.send_all(done, written, waiting)
    workers.finish()
    scene.commit()
    assert scene.state.round == 2
    assert scene.durable(1) == {p.device: p.digest for p in (done, written, waiting)}


def test_full_disk_ends_the_driver(scene, workers, monkeypatch):
    """A full disk ends the driver and not only a worker."""
    monkeypatch.setattr("os.pwrite", Mock(side_effect=OSError(28, "No space left on device")))
    scene.send(scene.packet("dev-1"))
    with pytest.raises(OSError, match="No space left"):
        workers.run("dev-1")


def test_threads_change_nothing(tmp_path):
    """Rounds with copies and forgeries among them: the same uploads are stored, whatever the threads' order."""
    handed = queue.SimpleQueue()
    threads = ThreadWorkers(handed.put, "shoal-test", threads=4, most_bytes=20_000)
    scene = Scene(tmp_path, SlowDisk(), threads)
    for round_ in range(1, 9):
        packets = [scene.packet(device) for device in DEVICES]
        sent = 0
        for packet in packets:
            for one in (scene.packet(packet.device, signer="dev-1" if packet.device != "dev-1" else "dev-2"), packet):
                before = scene.uploads.newest
                scene.send_all(one, one)
                sent += scene.uploads.newest - before
        for _ in range(sent):
            handed.get(timeout=10)()
        scene.commit()
        assert scene.state.round == round_ + 1
        assert scene.durable(round_) == {packet.device: packet.digest for packet in packets}
        assert [s.action for s in scene.publisher.take()] == [Action.ACK] * 3
        assert len(scene.take_refused()) >= 3
    threads.close()
    scene.close()
