"""A backup of an aggregator's directory: whole at any time, refused if it is altered or older, and harmless if it is old."""

import dataclasses
import time
from unittest.mock import Mock

import pytest

from aggregator.membership import TOLD_FILE, AggregatorMembership
from aggregator.rounds.state import Order
from aggregator.shards import membership as workers
from aggregator.storage.backup import restore, save
from aggregator.storage.signed_runs import CHOICE_FILE, ORDERS_FILE, OwnerOrders, read_orders
from crypto.seal.passphrase import Lock
from shoal.digests import sha256
from shoal.errors import ConfigError, IntegrityError, NotEnrolledError, ShoalError, UntrustedError
from shoal.membership import backup as backups
from shoal.membership.directory import GRANT_FILE, KEY_FILE, LEAST_FILE, ROSTER_FILE
from shoal.owner.enrolment.recovery import pack
from shoal.protocol.codec import encode
from tests.helpers.parties import Parties
from tests.helpers.run_places import RunPlace

RUN = b"r" * 16


@pytest.fixture
def parties(tmp_path):
    made = Parties(tmp_path, "dev-1", "dev-2")
    (tmp_path / "server" / CHOICE_FILE).write_bytes(b"a choice")
    (tmp_path / "server" / CHOICE_FILE).chmod(0o600)
    OwnerOrders(tmp_path / "server").accept(7, RUN, Order.PAUSE)
    return made


@pytest.fixture
def server(parties, tmp_path):
    return tmp_path / "server"


def moved(directory, tmp_path):
    """Back a directory up, restore that elsewhere, and return the backup and the other directory."""
    made = save(directory, tmp_path / "file")
    restore(tmp_path / "file", tmp_path / "again")
    return made, tmp_path / "again"


def contents(directory):
    return {path.name: path.read_bytes() for path in directory.iterdir() if path.is_file() and path.name[0] != "."}


def test_holds_what_can_not_be_had_again(server, tmp_path):
    """It holds what the aggregator can t get again."""
    (server / "run-000001").mkdir()
    (server / "runs" / "000001.run").write_bytes(b"a run")
    before = contents(server)
    made, again = moved(server, tmp_path)
    assert (made.fleet, made.roster) == ("reef", AggregatorMembership(server).roster.sequence)
    assert (tmp_path / "file").stat().st_mode & 0o777 == 0o600
    after, kept = contents(again), (KEY_FILE, LEAST_FILE, ROSTER_FILE, GRANT_FILE, CHOICE_FILE)
    assert {name: after[name] for name in kept} == {name: before[name] for name in kept}
    assert set(after) == {*kept, ORDERS_FILE, TOLD_FILE, "backup.last"}
    assert {path.stat().st_mode & 0o777 for path in again.iterdir() if path.is_file()} == {0o600}
    assert list((again / "runs").iterdir()) == []
    assert AggregatorMembership(again).identity.member == AggregatorMembership(server).identity.member
    orders = read_orders(again)
    assert (orders.accepted, orders.of(RUN)) == (7, Order.PAUSE)


def test_empty_directory_is_filled(server, tmp_path):
    """A package or a container has made it, and its parent belongs to root."""
    save(server, tmp_path / "file")
    (tmp_path / "again").mkdir(mode=0o700)
    inode = (tmp_path / "again").stat().st_ino
    restore(tmp_path / "file", tmp_path / "again")
    assert (tmp_path / "again").stat().st_ino == inode


def test_a_worker_has_one_as_well(tmp_path):
    place = RunPlace(tmp_path)
    grant = place.owner.add_helper("worker", workers.init(tmp_path / "worker-0", "worker-0").read_bytes())
    workers.join(tmp_path / "worker-0", grant.read_bytes(), place.owner.fingerprint)
    _, again = moved(tmp_path / "worker-0", tmp_path)
    assert workers.WorkerMembership(again).identity.name == "worker-0"


CHANGES = {
    "newer roster": lambda p: p.server.adopt(_roster(p)),
    "newer keys": lambda p: (p.owner.rotate(), p.server.take_grant(p.grant())),
    "keys in force": lambda p: p.server.promote(p.server.later[0]),
    "an order": lambda p: OwnerOrders(p.server.directory).accept(9, RUN, Order.STOP),
    "a choice": lambda p: (
        OwnerOrders(p.server.directory).choose(b"another"),
        OwnerOrders(p.server.directory).accept(9),
    ),
}


def _roster(parties):
    parties.owner.revoke("dev-2")
    return parties.owner.roster_bytes


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("at", range(6))
def test_change_meanwhile_leaves_a_whole(parties, server, tmp_path, monkeypatch, change, at):
    """A change while it is made leaves a whole one."""
    parties.owner.rotate()
    parties.server.take_grant(parties.grant())
    parties.server.adopt(parties.owner.roster_bytes)
    reads, read = [], backups._read

    def changing(path, most):
        reads.append(path.name)
        if len(reads) == at + 1:
            CHANGES[change](parties)
        return read(path, most)

    monkeypatch.setattr(backups, "_read", changing)
    made, directory = moved(server, tmp_path)
    assert len(reads) > at
    assert made.roster <= parties.owner.roster.sequence
    again = AggregatorMembership(directory)
    assert again.newest_generation >= parties.server.grant.keys_since
    if change == "a choice":  # at the latest the number, so that the request can be made again
        assert read_orders(directory).accepted == 7 or OwnerOrders(directory).choice == b"another"
    # What was missed comes from the broker.
    again.adopt(parties.owner.roster_bytes)
    again.take_grant(parties.grant())
    assert again.newest_generation == parties.owner.roster.keys_since


def altered(data):
    yield from (
        data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :] for at in (0, 31, 32, 40, len(data) // 2, len(data) - 1)
    )
    yield from (data[:-1], data[:40], data[:32], data[1:], data + b"\0", b"", sha256(b""), bytes(1000))


def test_altered_backup_is_refused(parties, server, tmp_path):
    """An altered one and another file are refused."""
    save(server, tmp_path / "file")
    data = (tmp_path / "file").read_bytes()
    owners = pack(parties.owner, Lock(b"correct horse battery"))[1]
    for other in (*altered(data), owners, parties.owner.roster_bytes):
        (tmp_path / "file").write_bytes(other)
        with pytest.raises(IntegrityError) as caught:
            restore(tmp_path / "file", tmp_path / "again")
        assert caught.value.hint
        assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"version": 2}, IntegrityError, "version 2"),
        ({"files": (backups.BackupFile("../x", b"x"),)}, IntegrityError, "outside"),
        ({"files": ()}, NotEnrolledError, "belongs to no fleet"),
        ({"files": "forged"}, UntrustedError, "signature"),
        ({"files": "rolled back"}, UntrustedError, "roster"),
    ],
    ids=["version", "name", "empty", "forged", "rolled back"],
)
def test_a_made_up_one_leaves_nothing(server, tmp_path, changes, error, words):
    made = save(server, tmp_path / "first")
    if isinstance(changes.get("files"), str):
        held = {file.name: file.data for file in made.files}
        if changes["files"] == "forged":
            held[ROSTER_FILE] = bytes(64) + held[ROSTER_FILE][64:]
        else:
            held[LEAST_FILE] = b"99 " + b"0" * 64
        changes = {"files": tuple(backups.BackupFile(*item) for item in held.items())}
    plain = encode(dataclasses.replace(made, **changes))
    (tmp_path / "file").write_bytes(sha256(plain) + plain)
    with pytest.raises(error, match=words):
        restore(tmp_path / "file", tmp_path / "in" / "again")
    assert list((tmp_path / "in").iterdir() if (tmp_path / "in").exists() else []) == []


def test_directory_with_files_is_left_alone(parties, server, tmp_path):
    save(server, tmp_path / "file")
    before = contents(server)
    with pytest.raises(ConfigError, match="exists already"):
        restore(tmp_path / "file", server)
    parties.server.adopt(_roster(parties))
    newer = contents(server)
    with pytest.raises(UntrustedError, match=r"has roster 5, and the backup is of roster 4: it is older"):
        restore(tmp_path / "file", server)
    assert contents(server) == newer != before
    for place in (tmp_path / "full", tmp_path / "a file"):
        place.mkdir() if place.name == "full" else place.write_bytes(b"")
        if place.is_dir():
            (place / "notes").write_bytes(b"")
        with pytest.raises(ConfigError, match="exists already"):
            restore(tmp_path / "file", place)


def test_a_full_disk_leaves_nothing(server, tmp_path, monkeypatch):
    save(server, tmp_path / "file")

    monkeypatch.setattr("aggregator.storage.backup.write_orders", Mock(side_effect=ShoalError("full")))
    with pytest.raises(ShoalError, match="full"):
        restore(tmp_path / "file", tmp_path / "again")
    assert not (tmp_path / "again").exists()


def test_never_written_over_another_file(server, tmp_path):
    """It is written beside the directory and never over another file."""
    with pytest.raises(ConfigError, match="lies in the directory"):
        save(server, server / "file")
    (tmp_path / "file").write_bytes(b"another")
    with pytest.raises(ConfigError, match="exists already"):
        save(server, tmp_path / "file")
    with pytest.raises(NotEnrolledError):
        save(tmp_path, tmp_path.parent / "file-of-nothing")
    assert not (server / "backup.last").exists()


def test_time_of_restore_is_kept(server, tmp_path):
    """The time of the restore is kept by later requests."""
    _, again = moved(server, tmp_path)
    assert read_orders(server).restored_at_s == 0
    OwnerOrders(again).accept(8, RUN, Order.STOP)
    orders = read_orders(again)
    assert (orders.accepted, orders.of(RUN)) == (8, Order.STOP)
    assert 0 <= time.time() - orders.restored_at_s < 60


def test_orders_of_earlier_version_are_read(server):
    (server / ORDERS_FILE).write_text('{"accepted": 3, "orders": {}}')
    assert read_orders(server).accepted == 3
