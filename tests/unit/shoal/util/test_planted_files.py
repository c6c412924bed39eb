"""Files that other users planted in a state directory are refused and never written through."""

from __future__ import annotations

import os
import sqlite3
import stat

import pytest

from aggregator import membership as aggregators
from aggregator.storage.store import DATABASE, Store
from aggregator.storage.vector_log import UpdateFiles
from crypto.seal.identity import Identity
from crypto.seal.replay import ReplayWatermark
from edge_client import membership as enrolment
from edge_client.storage.pending_upload import PENDING_FILES, PendingUploadFiles
from shoal.errors import ConfigError
from shoal.membership.directory import KEY_FILE
from shoal.owner.keys.directory import FleetDirectory
from shoal.util.files import (
    LOCK_FILE,
    check_directory,
    exclusive,
    in_use,
    open_own,
    private_directory,
    read_private,
    write_atomic,
    write_private,
)
from tests.helpers.plans import run_plan
from tests.helpers.refusals import refused

STRANGER = 12345
"""A user id that is not ours."""

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file to another user")


def mode(path):
    return stat.S_IMODE(path.lstat().st_mode)


def foreign(path):
    os.chown(path, STRANGER, STRANGER)
    return path


@pytest.fixture
def bait(tmp_path):
    """A file that everybody can read, to which a planted link leads."""
    path = tmp_path / "bait"
    path.write_bytes(b"")
    path.chmod(0o666)
    return path


PLANTS = {
    "world-readable file": lambda path, _: (path.write_bytes(b""), path.chmod(0o666)),
    "symbolic link": lambda path, bait: path.symlink_to(bait),
    "hard link": lambda path, bait: path.hardlink_to(bait),
    "dangling link": lambda path, bait: path.symlink_to(bait.with_name("elsewhere")),
}


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS.keys())
def test_no_key_goes_into_a_planted_file(tmp_path, bait, plant):
    """Under the name of the file itself, and under the name that could be foreseen for the temporary one."""
    state = private_directory(tmp_path / "state")
    for name in (KEY_FILE, f".{KEY_FILE}.{os.getpid()}.new"):
        plant(state / name, bait)
    identity = Identity.generate("dev-1")
    identity.save(state / KEY_FILE)
    assert bait.read_bytes() == b""
    assert not (tmp_path / "elsewhere").exists()
    assert mode(state / KEY_FILE) == 0o600
    assert stat.S_ISREG((state / KEY_FILE).lstat().st_mode)
    assert (state / KEY_FILE).lstat().st_nlink == 1
    assert Identity.load(state / KEY_FILE).member == identity.member


@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS.keys())
def test_a_name_that_was_guessed_is_refused(tmp_path, bait, plant, monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda count: b"\xab" * count)
    planted = tmp_path / f".key.{'ab' * 8}.{os.getpid()}.new"
    plant(planted, bait)
    with pytest.raises(ConfigError, match="can't write"):
        write_atomic(tmp_path / "key", b"secret")
    assert bait.read_bytes() == b""
    assert os.path.lexists(planted)


def open_store(state):
    return Store(state, run_plan())


@pytest.mark.parametrize(
    ("planted", "opening"),
    [
        ([LOCK_FILE], lambda state: exclusive(state, wait_s=0, hint="-").__enter__()),
        (PENDING_FILES, lambda state: PendingUploadFiles(state).save(ReplayWatermark(), b"", b"sealed")),
        (["updates/000001.f32"], lambda state: UpdateFiles(state / "updates", lambda _: 0).open(1)),
        ([DATABASE], open_store),
        ([f"{DATABASE}-wal"], open_store),
        ([f"{DATABASE}-shm"], open_store),
        ([f"{DATABASE}-journal"], open_store),
    ],
    ids=["lock", "slot", "updates", "database", "wal", "shm", "journal"],
)
@pytest.mark.parametrize("plant", PLANTS.values(), ids=PLANTS.keys())
def test_planted_files_are_not_opened(tmp_path, bait, plant, planted, opening):
    """Files that are written in place are not opened where others planted them."""
    state = private_directory(tmp_path / "state")
    private_directory(state / "updates")
    for name in planted:
        plant(state / name, bait)
    with pytest.raises(ConfigError) as caught:
        opening(state)
    assert caught.value.hint
    assert bait.read_bytes() == b""


def test_database_is_private_from_the_start(tmp_path, monkeypatch):
    """The database is private before sqlite opens it."""
    seen = []

    def connect(path, **options):
        seen.append(mode(path))
        return real(path, **options)

    real = sqlite3.connect
    monkeypatch.setattr(sqlite3, "connect", connect)
    before = os.umask(0)
    try:
        Store(tmp_path / "run-000001", run_plan()).close()
    finally:
        os.umask(before)
    assert seen == [0o600]


@pytest.mark.parametrize("link", [PLANTS["symbolic link"], PLANTS["dangling link"]], ids=["link", "dangling link"])
def test_a_secret_is_not_read_through_a_link(tmp_path, bait, link):
    bait.chmod(0o600)
    link(tmp_path / "secret", bait)
    with pytest.raises(ConfigError, match="is a link"):
        read_private(tmp_path / "secret")
    assert not in_use(tmp_path)


def test_passphrase_file_may_be_link_or_pipe(tmp_path):
    """A person names it; Kubernetes links secrets, and a shell passes them through pipes."""
    write_private(tmp_path / "real", b"phrase")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    assert read_private(tmp_path / "link", follow=True) == b"phrase"
    ours, theirs = os.pipe()
    os.write(theirs, b"phrase")
    os.close(theirs)
    try:
        assert read_private(tmp_path / f"/dev/fd/{ours}", follow=True) == b"phrase"
    finally:
        os.close(ours)


def test_pipe_holds_nothing_up(tmp_path):
    """A pipe in a state directory holds nothing up."""
    os.mkfifo(tmp_path / "secret", 0o600)
    with pytest.raises(ConfigError, match="is not a file"):
        read_private(tmp_path / "secret")
    with pytest.raises(ConfigError, match="is not a file"):
        open_own(tmp_path / "secret")


def private_directory_of(path, bits=0o700):
    path.mkdir()
    path.chmod(bits)
    return path


PLACES = {
    "group-writable": lambda tmp: private_directory_of(tmp / "state", 0o770),
    "world-writable": lambda tmp: private_directory_of(tmp / "state", 0o707),
    "sticky and world-writable": lambda tmp: private_directory_of(tmp / "state", 0o1777),
    "in a world-writable one": lambda tmp: private_directory_of(private_directory_of(tmp / "open", 0o777) / "state"),
}
PROGRAMS = {
    "owner": lambda path: FleetDirectory.create(path, "reef", "mqtt://loopback"),
    "aggregator": aggregators.init,
    "device": lambda path: enrolment.init(path, "dev-1"),
    "store": lambda path: Store(path, run_plan()),
}


@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
@pytest.mark.parametrize("place", PLACES.values(), ids=PLACES.keys())
def test_no_start_where_others_can_write(tmp_path, place, program):
    """No program begins in a directory that others can write to."""
    path = place(tmp_path)
    with refused(ConfigError, hint="chmod"):
        program(path)
    assert list(path.iterdir()) == []


@needs_root
@pytest.mark.parametrize("program", PROGRAMS.values(), ids=PROGRAMS.keys())
def test_no_start_in_anothers_directory(tmp_path, program):
    """Nor is a planted key used: he would know the private key of a party that is enrolled with it."""
    path = foreign(private_directory_of(tmp_path / "state"))
    with pytest.raises(ConfigError, match="belongs to another user"):
        program(path)
    assert list(path.iterdir()) == []
    write_private(tmp_path / KEY_FILE, b"key")
    with pytest.raises(ConfigError, match=f"belongs to another user \\(uid {STRANGER}\\)"):
        read_private(foreign(tmp_path / KEY_FILE))


@pytest.mark.parametrize(
    ("party", "opening"),
    [
        ("owner", FleetDirectory),
        ("server", aggregators.AggregatorMembership),
        ("dev-1", enrolment.DeviceMembership),
    ],
)
def test_stops_once_opened_to_others(tmp_path, party, opening):
    """No program goes on in a directory that was opened to others."""
    owner = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://loopback")
    grant = owner.add_aggregator(aggregators.init(tmp_path / "server").read_bytes())
    aggregators.join(tmp_path / "server", grant.read_bytes(), owner.fingerprint)
    grant = owner.add_device(enrolment.init(tmp_path / "dev-1", "dev-1").read_bytes())
    enrolment.join(tmp_path / "dev-1", grant.read_bytes(), owner.fingerprint)
    opening(tmp_path / party)
    (tmp_path / party).chmod(0o770)
    with refused(ConfigError, "others can write to the directory", hint=f"chmod go-w {tmp_path / party}"):
        opening(tmp_path / party)


def test_the_usual_places_are_accepted(tmp_path):
    """Below /tmp with its sticky bit, below a directory of the user's own group, and where others can only read."""
    for bits in (0o1777, 0o775, 0o755):
        above = private_directory_of(tmp_path / f"{bits:o}", bits)
        check_directory(private_directory(above / "state"))
        check_directory(private_directory_of(above / "readable", 0o755))
    with pytest.raises(ConfigError, match="can't read"):
        check_directory(tmp_path / "missing")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a file of root's")
def test_credential_may_look_readable(tmp_path, monkeypatch):
    """An access list lets the service's user read it, and the mode shows that as the group's right. Others still may not."""
    path = tmp_path / "http_token"
    path.write_bytes(b"token")
    path.chmod(0o440)
    with pytest.raises(ConfigError, match="readable by others"):
        read_private(path)
    monkeypatch.setenv("CREDENTIALS_DIRECTORY", str(tmp_path))
    assert read_private(path) == b"token"
    path.chmod(0o444)
    with pytest.raises(ConfigError, match="readable by others"):
        read_private(path)
