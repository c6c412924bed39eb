"""A device's stored upload: durable in one of two slots, private, and refused if damaged.

An upload in pieces is stored as one, and a torn piece is found. Its residual is private to it, and None after any damage.
"""

import dataclasses
import hashlib

import numpy as np
import pytest

from crypto.seal.envelope import SealedMessage
from crypto.seal.replay import ReplayWatermark
from edge_client.storage import pending_upload
from edge_client.storage.pending_upload import (
    PENDING_FILES,
    PendingUpload,
    PendingUploadFiles,
    Residual,
    parse_residual,
    pieces_of,
    stored,
    transfer_of,
)
from shoal.errors import ConfigError, IntegrityError, WireError
from shoal.protocol.chunking import Fingerprint, transfer_id
from shoal.transport.stored import StoredBytes
from shoal.util.files import private_directory, write_private
from tests.helpers.power_cuts import cut_at

MARK = ReplayWatermark(3, 1, 7, b"n" * 16)
EMPTY = PendingUpload(ReplayWatermark(0, 0, 0, bytes(16)), bytes(16), b"")


@pytest.fixture
def directory(tmp_path):
    return private_directory(tmp_path / "device")


@pytest.fixture
def files(directory):
    return PendingUploadFiles(directory)


def later(rounds=1):
    """Return the mark ``rounds`` rounds on."""
    return dataclasses.replace(MARK, round=MARK.round + rounds)


DAMAGES = [
    lambda d: d[:0],
    lambda d: d[:20],
    lambda d: d[:-1],
    lambda d: b"X" + d[1:],
    lambda d: d[:4] + b"\x01" + d[5:],
    lambda d: d[:9] + bytes([d[9] ^ 1]) + d[10:],
    lambda d: d[:-1] + bytes([d[-1] ^ 1]),
    lambda d: d[:-9] + b"X" + d[-8:],
]


def two_rounds(directory):
    """Store an upload for each of two rounds and return their bytes and slots, oldest first."""
    files = PendingUploadFiles(directory)
    files.load()
    kept = []
    for rounds in (0, 1):
        sealed = bytes(range(100 + rounds))
        files.save(later(rounds), transfer_id(sealed), sealed)
        kept.append((sealed, directory / PENDING_FILES[1 - rounds]))
    return kept


def test_the_newest_pending_upload_is_loaded(directory, files):
    """Two slots are overwritten in turn, also by a shorter upload; a restart continues with the right one."""
    assert files.load() == EMPTY
    for rounds, sealed in enumerate((b"sealed bytes", bytes(100), b"short", bytes(range(200)))):
        files.save(later(rounds), transfer_id(sealed), sealed)
        expected = PendingUpload(later(rounds), transfer_id(sealed), sealed)
        assert files.load() == expected
        assert PendingUploadFiles(directory).load() == expected


def test_long_upload_is_read_from_its_slot(directory, files, monkeypatch):
    """It stays there while the next upload is saved, to the other slot."""
    monkeypatch.setattr(pending_upload, "STORED_FROM_BYTES", 100)
    files.load()
    kept = files.save(MARK, transfer_id(bytes(100)), bytes(range(100)))
    files.save(later(), transfer_id(b"next"), b"next")
    assert (type(kept), len(kept), bytes(kept), bytes(kept[7:9])) == (StoredBytes, 100, bytes(range(100)), b"\x07\x08")
    assert files.save(later(2), transfer_id(b"short"), b"short") == b"short"


@pytest.mark.parametrize("damage", DAMAGES)
def test_slot_torn_by_power_cut_leaves_other(directory, damage):
    """The torn upload had never been sent: the round before is the newest valid one, and is not overwritten."""
    (older, _), (_, path) = two_rounds(directory)
    write_private(path, damage(path.read_bytes()))
    again = PendingUploadFiles(directory)
    assert again.load() == PendingUpload(MARK, transfer_id(older), older)
    again.save(later(2), transfer_id(b"new"), b"new")
    assert PendingUploadFiles(directory).load() == PendingUpload(later(2), transfer_id(b"new"), b"new")


@pytest.mark.parametrize("damage", DAMAGES)
def test_two_damaged_slots_are_refused(directory, damage):
    """An empty watermark would let an old announcement be replayed."""
    for _, path in two_rounds(directory):
        write_private(path, damage(path.read_bytes()))
    with pytest.raises(IntegrityError, match="are damaged") as caught:
        PendingUploadFiles(directory).load()
    assert "replayed" in caught.value.hint


def test_earlier_slots_are_refused(directory):
    """Their watermark can't be read, and another one would let announcements be replayed."""
    old = b"SHM1" + bytes([64]) + bytes(4 * 3 + 16 + 16 + 4 + 4)
    for name in PENDING_FILES:
        write_private(directory / name, old + hashlib.sha256(old).digest())
    with pytest.raises(IntegrityError, match="of an earlier version of Shoal") as caught:
        PendingUploadFiles(directory).load()
    assert "init or enrol a new directory" in caught.value.hint


def test_answered_upload_is_recognised(directory, files):
    """The slot without the bytes counts, not the other one, which still holds the upload itself."""
    for rounds in range(3):
        files.save(later(rounds), transfer_id(b"sealed"), b"sealed")
        assert not files.load().answered
        files.save(later(rounds), transfer_id(b"sealed"), b"")
        again = PendingUploadFiles(directory).load()
        assert again == PendingUpload(later(rounds), transfer_id(b"sealed"), b"")
        assert again.answered
    assert not EMPTY.answered


def test_readable_mark_is_refused(directory, files):
    """A mark that others could read is refused."""
    files.save(MARK, transfer_id(b"sealed"), b"sealed")
    (directory / PENDING_FILES[0]).chmod(0o644)
    with pytest.raises((IntegrityError, ConfigError), match="readable by others"):
        files.load()


def test_slot_that_can_t_be_opened_is_error(directory, files):
    (directory / PENDING_FILES[0]).mkdir()
    with pytest.raises(ConfigError, match="can't write") as caught:
        files.save(MARK, b"t" * 16, b"")
    assert "permissions" in caught.value.hint


def test_upload_and_residual_are_one_write(directory, files):
    """An upload and its residual are stored together."""
    files.load()
    for rounds in (3, 1, 2):
        files.save(*of_round(rounds))
        assert files.load() in (PendingUpload(*of_round(3)), PendingUpload(*of_round(rounds)))
    assert PendingUploadFiles(directory).load() == PendingUpload(*of_round(3))


def of_round(rounds):
    """Return mark, transfer id, upload and residual of a round."""
    sealed = bytes(range(100 + rounds)) * 3
    vector = np.full(300 + rounds, rounds + 1, np.float32)
    transfer = transfer_id(sealed)
    return (
        later(rounds),
        transfer,
        sealed,
        Residual.of(vector, run_id=b"r" * 16, round_=rounds, model=0, transfer=transfer),
    )


def test_no_residual_from_an_older_upload(files):
    """An upload without a residual takes none from an older one in its slot."""
    files.load()
    files.save(*of_round(0))
    files.save(*of_round(1))
    mark, transfer, sealed, _ = of_round(2)
    files.save(mark, transfer, sealed)
    assert files.load() == PendingUpload(mark, transfer, sealed, None)


def test_power_cut_may_lose_the_residual(directory, files):
    """The disk may write in any order: the device sends the upload, and adds nothing to the next one."""
    files.load()
    mark, transfer, sealed, residual = of_round(0)
    files.save(mark, transfer, sealed, residual)
    path = max((directory / name for name in PENDING_FILES), key=lambda p: p.stat().st_size)
    data = path.read_bytes()
    write_private(path, data[:-40] + bytes([data[-40] ^ 1]) + data[-39:])
    assert files.load() == PendingUpload(mark, transfer, sealed, None)


def test_kill_at_any_write_leaves_one_round(tmp_path):
    seen, cuts, ended = set(), 0, False
    while not ended:
        directory = private_directory(tmp_path / str(cuts))
        files = PendingUploadFiles(directory)
        files.load()
        for rounds in (0, 1):
            files.save(*of_round(rounds))
        ended = cut_at(cuts, files.save, *of_round(2))
        found = PendingUploadFiles(directory).load()
        assert found in (PendingUpload(*of_round(1)), PendingUpload(*of_round(2)))
        seen.add(found.mark.round - MARK.round)
        cuts += 1
    assert seen == {1, 2}
    assert cuts > 2


def sealed(payload):
    return SealedMessage(payload, transfer_id(payload), Fingerprint.of(payload).signed)


PIECES = [sealed(b"SHE1 header"), sealed(b"SHE1 first part"), sealed(b"SHE1 second")]


@pytest.mark.parametrize("pieces", [PIECES, PIECES[:1]])
def test_pieces_come_back_in_order(pieces):
    assert pieces_of(stored(pieces)) == pieces
    assert transfer_of(stored(pieces)) == pieces[0].transfer_id


def test_torn_pieces_are_found():
    whole = stored(PIECES)
    assert transfer_of(whole[:-1] + b"?") == b""
    assert transfer_of(whole[:-1]) == b""
    with pytest.raises(WireError, match="does not fit"):
        pieces_of(whole + b"more")


RUN, TRANSFER = b"r" * 16, b"t" * 16
VECTOR = np.random.default_rng(0).standard_normal(600).astype(np.float32)


def residual(transfer=TRANSFER, **changes):
    return Residual.of(VECTOR, **({"run_id": RUN, "round_": 4, "model": 2, "transfer": transfer} | changes))


def test_residual_comes_back_rounded():
    """With one percent of rounding; a job that is repeated seals its upload anew, under another transfer id."""
    found = parse_residual(residual().to_bytes() + b"bytes of an older, longer slot", TRANSFER)
    assert found == residual()
    assert (found.head.run_id, found.head.round, found.head.model, found.head.length) == (RUN, 4, 2, 600)
    assert np.linalg.norm(found.vector() - VECTOR) < 0.02 * np.linalg.norm(VECTOR)
    assert len(found.to_bytes()) < 600 * 1.2
    assert (residual(b"x" * 16).vector() == found.vector()).all()
    assert parse_residual(residual().to_bytes(), b"x" * 16) is None, "of another upload"


@pytest.mark.parametrize("at", [0, 4, 5, 30, 60, 300, -1])
def test_damage_is_found(at):
    data = bytearray(residual().to_bytes())
    data[at] ^= 1
    assert parse_residual(bytes(data), TRANSFER) is None


def test_every_cut_is_found():
    data = residual().to_bytes()
    assert all(parse_residual(data[:end], TRANSFER) is None for end in range(len(data)))


def test_the_vector_is_in_no_repr():
    assert repr(residual()) == "Residual(round=4, model=2, length=600)"
