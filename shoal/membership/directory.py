"""A party's membership on disk: its keys, the owner's grant and the newest roster, in one private directory.

Rules:

- The membership file is written last when a party joins, so a crash before that leaves a party that has not joined.
- `roster.least` records the newest roster that was ever in force. An older roster is a rollback, and another roster of the
  same sequence is a fork; both are refused, also when someone copies the file here.
- A device erases the receiving key of a delivery once the delivery is stored. A crash in between leaves a grant that names a
  key which is still there; the next start erases it.
- New secrets wait in a file of their own until a run needs them, then replace the grant in force.
"""

from __future__ import annotations

import dataclasses
import hmac
import logging
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Generic, TypeVar

from crypto.seal.envelope import GroupKey, SealError, open_from_group
from crypto.seal.identity import Identity, open_document
from crypto.seal.receiving import ReceivingSecrets
from shoal.errors import ConfigError, IntegrityError, NotEnrolledError, ShoalError, UntrustedError, WireError
from shoal.membership.grants import DEVICE_ROLE, make_card, open_grant, open_renewal, peek_grant
from shoal.membership.roster import MOST_DIGITS, RosterForkError, digest_of, has_expired, open_roster
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import AggregatorGrant, DeviceGrant, Roster
from shoal.protocol.messages import Sealed
from shoal.util.files import (
    check_directory,
    exclusive,
    named,
    private_directory,
    read_private,
    write_atomic,
    write_private,
)

LOG = logging.getLogger("shoal.membership")
KEY_FILE: Final = "identity.key"
RECEIVING_FILE: Final = "receiving.key"
GRANT_FILE: Final = "membership.bin"
NEXT_FILE: Final = "membership.next"
"""Prefix of a file with a grant of newer secrets, followed by their roster sequence; the first round under them puts it in
force."""
MOST_LATER: Final = 8
"""Grants with newer secrets that are stored; if there are more, the oldest are removed."""

ROSTER_FILE: Final = "roster.signed"
LEAST_FILE: Final = "roster.least"
"""File with the highest sequence of a roster that was ever in force, in decimal digits, and that roster's SHA-256 in hex."""
CARD_MODE: Final = 0o644
"""A card holds public keys only, and people copy it."""
WAIT_S: Final = 2.0
"""How long to wait for another program in the directory to end."""
BUSY_HINT: Final = "end `shoal-edge run` or `shoal-aggregator serve` there first"

DAMAGED_HINT: Final = (
    "check that this is the program's directory; if so, join again with a grant that shoal-fleet add-device, "
    "add-aggregator or add-keeper makes for the card there"
)

OTHER_VERSION_HINT: Final = (
    f"{DAMAGED_HINT}. If an earlier version of Shoal made the fleet, "
    "make a new one, and init or enrol in a new directory"
)

NO_RECEIVING_HINT: Final = (
    "check that this is the device's directory; if so, init or enrol a new one under another name, and have the owner revoke "
    "this one"
)

_WAITING: Final = re.compile(re.escape(NEXT_FILE) + r"\.(\d{10})", re.ASCII)

_LEAST: Final = re.compile(rb"(\d{1,%d}) ([0-9a-f]{64})" % MOST_DIGITS)

G = TypeVar("G", AggregatorGrant, DeviceGrant)


def make_identity(directory: Path, name: str, role: str) -> Path:
    """Make a party's keys in ``directory`` and return the path of the card to carry to the owner.

    If a crash has left keys of this name without a card, only the card is written.

    Raises:
        ConfigError: the directory holds keys already, or another program runs there.
        NotEnrolledError: a device's directory holds keys, but no receiving keys.
    """
    identity = Identity.generate(name)  # checks the name before anything is written
    private_directory(directory)
    with exclusive(directory, wait_s=WAIT_S, hint=BUSY_HINT):
        card = _card_path(directory, name)
        if (directory / KEY_FILE).exists():
            identity = Identity.load(directory / KEY_FILE)
            if identity.name != name or card.exists():
                raise ConfigError(
                    f"{directory} holds keys already", hint="use another directory, or remove this one first"
                )
        else:
            if role == DEVICE_ROLE:
                ReceivingSecrets.generate().save(directory / RECEIVING_FILE)
            identity.save(directory / KEY_FILE)
        receiving = load_receiving(directory).public if role == DEVICE_ROLE else None
        write_atomic(card, make_card(identity, role, receiving), mode=CARD_MODE)
    return card


def _card_path(directory: Path, name: str) -> Path:
    return directory / f"{name}.card"


def load_receiving(directory: Path) -> ReceivingSecrets:
    """Return the receiving keys of the device in ``directory``.

    Raises:
        NotEnrolledError: there are none.
        IntegrityError: the file is damaged.
    """
    path = directory / RECEIVING_FILE
    if not path.exists():
        raise NotEnrolledError(
            f"{directory} has no receiving keys: another program or an earlier version of Shoal made it, or they were lost",
            hint=NO_RECEIVING_HINT,
        )
    return ReceivingSecrets.load(path)


def erase_receiving(
    directory: Path, identity: Identity, held: ReceivingSecrets, grant: AggregatorGrant | DeviceGrant
) -> ReceivingSecrets:
    """Erase the receiving key of a stored grant and those before it, make new ones, and put their public halves on the card.

    Call it once the grant is on the disk. The card comes first: if a crash leaves a card with keys that were never stored, the
    grant still names a key that is held, and the next call writes the card again.

    Args:
        directory: the device's directory.
        identity: the device's keys.
        held: its receiving keys.
        grant: a grant that is stored there; nothing happens for an aggregator's.

    Returns:
        The receiving keys that are held now.
    """
    if not isinstance(grant, DeviceGrant) or grant.receiving < held.first:
        return held
    left = held.after(grant.receiving)
    write_atomic(_card_path(directory, identity.name), make_card(identity, DEVICE_ROLE, left.public), mode=CARD_MODE)
    left.save(directory / RECEIVING_FILE)
    return left


def accept_grant(directory: Path, grant_file: bytes, kind: type[G], owner_fingerprint: str) -> None:
    """Store the owner's grant for the keys in ``directory``.

    Raises:
        NotEnrolledError: there are no keys yet.
        UntrustedError: the grant is another owner's or another party's, or as for `store_grant`.
        ConfigError: as for `store_grant`.
    """
    if not (directory / KEY_FILE).exists():
        raise NotEnrolledError(f"{directory} holds no keys yet", hint="run init there first")
    receiving = load_receiving(directory) if issubclass(kind, DeviceGrant) else None
    identity = Identity.load(directory / KEY_FILE)
    store_grant(directory, open_grant(identity, grant_file, kind, owner_fingerprint, receiving))


def store_grant(directory: Path, grant: AggregatorGrant | DeviceGrant) -> None:
    """Put an opened grant in force: write its roster, then the membership file; then erase a device's receiving key.

    Raises:
        UntrustedError: the grant has no roster, or one that is not the owner's, has expired, is older than one that was in
            force, or does not match the grant's keys.
        ConfigError: the directory belongs to another fleet, or a program that would overwrite the grant runs there.
    """
    if not grant.roster:
        raise UntrustedError(
            "this grant only renews the keys of a party that has already joined",
            hint="ask the owner for a new one: shoal-fleet add-device, or add-aggregator",
        )
    now_s = int(time.time())
    roster = open_roster(grant.roster, owner_key=grant.owner_key, fleet=grant.fleet, least_sequence=0, now_s=now_s)
    if roster.keys_since != grant.keys_since:
        raise UntrustedError(f"a grant with keys of roster {grant.keys_since} and a roster of keys {roster.keys_since}")
    with exclusive(directory, wait_s=WAIT_S, hint=BUSY_HINT):
        _check_follows(directory, grant, roster)
        write_private(directory / ROSTER_FILE, grant.roster)
        _raise_least(directory, roster.sequence, grant.roster)
        # Written last: it makes the directory a member's, and a crash before it is repaired by joining again.
        write_private(directory / GRANT_FILE, _kept(grant))
        for since, path in _waiting(directory):
            if since <= grant.keys_since:
                path.unlink()
        if isinstance(grant, DeviceGrant):
            erase_receiving(directory, Identity.load(directory / KEY_FILE), load_receiving(directory), grant)


def _check_follows(directory: Path, grant: AggregatorGrant | DeviceGrant, roster: Roster) -> None:
    """Check that a grant may replace the one in ``directory``; arguments as in `store_grant`.

    The other files there, above all a device's replay watermark, belong to one fleet.
    """
    seen = (least_roster(directory), _in_file(directory / ROSTER_FILE, grant.owner_key))
    least = max(sequence for sequence, _ in seen)
    if (directory / GRANT_FILE).exists():
        try:
            held = decode(read_private(directory / GRANT_FILE), type(grant))
        except WireError:
            held = grant  # damaged: joining again repairs it
        if (held.fleet, held.owner_key) != (grant.fleet, grant.owner_key):
            raise ConfigError(
                f"{directory} belongs to fleet {held.fleet!r}, and this grant is of another fleet or owner",
                hint="use another directory: init there, and have the owner add the new card",
            )
        least = max(least, held.keys_since)
    for sequence, digest in seen:
        _check_same(roster.sequence, grant.roster, sequence, digest)
    if roster.sequence < least:
        raise UntrustedError(
            f"a grant with roster {roster.sequence} after roster {least}: refused as a rollback",
            hint="join with the newest grant, from the owner's grants folder",
        )


def _check_same(sequence: int, signed: bytes, known_sequence: int, known_digest: bytes) -> None:
    """Check that the roster ``signed`` is no fork: a known sequence with other bytes.

    Raises:
        RosterForkError: it is.
    """
    if sequence == known_sequence and not hmac.compare_digest(digest_of(signed), known_digest):
        raise RosterForkError(sequence)


def _in_file(path: Path, owner_key: bytes) -> tuple[int, bytes]:
    """Return sequence and SHA-256 of a roster file, expired or not; (0, b"") without one that the owner signed."""
    try:
        signed = read_private(path)
        return open_document(signed, Roster, owner_key).sequence, digest_of(signed)
    except ShoalError:
        return 0, b""


def least_roster(directory: Path) -> tuple[int, bytes]:
    """Return sequence and SHA-256 of the newest roster that was ever in force; (0, b"") if there was none.

    Raises:
        IntegrityError: the file that records it is damaged.
    """
    path = directory / LEAST_FILE
    if not path.exists():
        return 0, b""
    found = _LEAST.fullmatch(read_private(path))
    if found is None:
        raise IntegrityError(
            f"{path} is damaged, or of an earlier version of Shoal",
            hint=f"remove it only if {ROSTER_FILE} there is the owner's newest roster",
        )
    return int(found[1]), bytes.fromhex(found[2].decode())


def _raise_least(directory: Path, sequence: int, signed: bytes) -> None:
    write_private(directory / LEAST_FILE, f"{sequence} {digest_of(signed).hex()}".encode())


def _waiting(directory: Path) -> list[tuple[int, Path]]:
    """Return the files of grants with newer secrets, and the roster sequence of each, oldest first."""
    named = ((_WAITING.fullmatch(path.name), path) for path in directory.glob(f"{NEXT_FILE}.*"))
    return sorted((int(match[1]), path) for match, path in named if match is not None)


def _kept(grant: AggregatorGrant | DeviceGrant) -> bytes:
    """Return the bytes of a grant's file: the grant without its roster, which has a file of its own."""
    return encode(dataclasses.replace(grant, roster=b""))


class Membership(Generic[G]):
    """A party that belongs to a fleet.

    Attributes:
        directory: the party's files; identity: its private keys; group: the fleet's broadcast key.
        receiving: a device's receiving keys; None for an aggregator.
        roster, roster_bytes: the newest roster, decoded and as the owner signed it.
        later: grants with newer secrets that no run has used yet, oldest first. After two changes of the fleet in a row, a
            run may use the secrets in between.
    """

    def __init__(self, directory: Path, kind: type[G], *, expired: bool = False) -> None:
        """Load what `accept_grant` left in ``directory``.

        Args:
            directory: the party's directory.
            kind: the type of its grant.
            expired: accept an expired roster; the caller must then wait for a newer one, see `expired`.

        Raises:
            NotEnrolledError: no party has joined there, or a device has no receiving keys.
            UntrustedError: the roster is not the owner's, older than one that was in force before, or has expired.
            RosterForkError: another roster of its sequence was in force before.
        """
        if not (directory / GRANT_FILE).exists():
            raise NotEnrolledError(f"{directory} belongs to no fleet", hint="run init there, then join with a grant")
        check_directory(directory)
        self.directory = directory
        self.identity = Identity.load(directory / KEY_FILE)
        self._kind: type[G] = kind
        self.receiving: ReceivingSecrets | None
        self.receiving = load_receiving(directory) if issubclass(kind, DeviceGrant) else None
        self.grant: G
        self.later: list[G]
        try:
            self._read_grants()
        except ConfigError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise
            self._read_grants()  # a running program put the next grant in force between two reads
        self._forks: set[bytes] = set()
        self._least, digest = least_roster(directory)
        self.roster_bytes = read_private(directory / ROSTER_FILE)
        with named(directory / ROSTER_FILE, DAMAGED_HINT):
            self.roster = self._open(self.roster_bytes, self._least, expired=expired)
        _check_same(self.roster.sequence, self.roster_bytes, self._least, digest)

    def _read_grants(self) -> None:
        self._use(self._grant_in(self.directory / GRANT_FILE))
        held = self.grant.keys_since
        waiting = _waiting(self.directory)
        self.later = [self._grant_in(path) for since, path in waiting if since > held]

    def _grant_in(self, path: Path) -> G:
        data = read_private(path)
        try:
            return decode(data, self._kind)
        except WireError as error:
            raise IntegrityError(
                f"{path} is damaged, or an earlier version of Shoal wrote it: {error}", hint=OTHER_VERSION_HINT
            ) from error

    def _use(self, grant: G) -> None:
        self.grant = grant
        self.group = self._broadcast(grant)

    @staticmethod
    def _broadcast(grant: G) -> GroupKey:
        return GroupKey(grant.fleet, "broadcast", grant.broadcast_key)

    @property
    def next(self) -> G | None:
        """The grant with the newest secrets; None if the one in force has them."""
        return self.later[-1] if self.later else None

    @property
    def newest_generation(self) -> int:
        """Roster sequence at which the newest stored secrets were drawn."""
        return (self.next or self.grant).keys_since

    @property
    def keys_since(self) -> int:
        """Highest known roster sequence at which the owner drew secrets, from the newest roster or the newest grant."""
        return max(self.roster.keys_since, self.newest_generation)

    @property
    def expired(self) -> bool:
        """Whether the roster has expired, by this machine's clock."""
        return has_expired(self.roster, int(time.time()))

    @property
    def fleet(self) -> str:
        """The fleet's name."""
        return self.grant.fleet

    @property
    def broker(self) -> str:
        """The broker's address as the owner gave it."""
        return self.grant.broker

    @property
    def owner_key(self) -> bytes:
        """The pinned owner's Ed25519 key, 32 bytes."""
        return self.grant.owner_key

    def reload(self) -> bool:
        """Read the roster file again, put its roster in force, and return whether it was another one.

        Raises:
            UntrustedError: the roster is not the owner's, rolled back, or expired; a restart refuses it as well.
            RosterForkError: it is another roster of the sequence in force.
        """
        data = read_private(self.directory / ROSTER_FILE)
        if data == self.roster_bytes:
            self._keep_least()
            return False
        with named(self.directory / ROSTER_FILE, DAMAGED_HINT):
            roster = self._open(data, self.roster.sequence)
        self.check_fork(roster.sequence, data)
        self.roster, self.roster_bytes = roster, data
        self._keep_least()
        return True

    def _keep_least(self) -> None:
        if self.roster.sequence > self._least:
            _raise_least(self.directory, self.roster.sequence, self.roster_bytes)
            self._least = self.roster.sequence

    def adopt(self, data: bytes) -> bool:
        """Put a roster from the network in force if it is newer than ours and than the roster file; return whether it is.

        Raises:
            UntrustedError: the roster is not the owner's, rolled back, or expired.
            RosterForkError: it is another roster of the sequence in force.
        """
        try:
            self.reload()
        except ShoalError as error:  # a bad roster file must not block a newer roster from the network
            if isinstance(error, RosterForkError):
                LOG.error("roster file refused", extra={"kv": {"reason": error, "hint": error.hint}})
        roster = self._open(data, self.roster.sequence)
        self.check_fork(roster.sequence, data)
        if roster.sequence == self.roster.sequence:
            return False
        # The roster first, then its sequence: a crash in between leaves a roster newer than the record, which is accepted.
        write_private(self.directory / ROSTER_FILE, data)
        self.roster, self.roster_bytes = roster, data
        self._keep_least()
        return True

    def check_fork(self, sequence: int, signed: bytes) -> None:
        """Check that a roster which the owner ``signed`` is no fork of ours: our sequence with other bytes.

        Raises:
            RosterForkError: it is.
        """
        _check_same(sequence, signed, self.roster.sequence, digest_of(self.roster_bytes))

    def is_new_fork(self, signed: bytes) -> bool:
        """Record a roster that was refused as a fork; return whether it is new, so that each fork is reported once.

        On an open broker anyone can repeat the owner's messages, which would otherwise fill the log.
        """
        digest = digest_of(signed)
        new = digest not in self._forks
        self._forks.add(digest)
        return new

    def take_grant(self, data: bytes) -> bool:
        """Store a grant from the broker if its secrets are newer than all stored ones; return whether they are.

        Its roster arrives in a message of its own. A device then erases the receiving key of the grant.

        Raises:
            ErasedKeyError: the grant has newer secrets, but is sealed to a receiving key that we do not have.
            UntrustedError: the grant is not the owner's, or is for another party or fleet.
        """
        # Before opening it: the broker retains each delivery, and we have erased the key of one that we have stored.
        if peek_grant(data).keys_since <= self.newest_generation:
            return False
        grant = open_renewal(self.identity, data, self._kind, self.owner_key, self.receiving)
        if grant.fleet != self.fleet:
            raise UntrustedError(f"keys of fleet {grant.fleet!r}")
        write_private(self._file_of(grant), _kept(grant))
        self.later.append(dataclasses.replace(grant, roster=b""))
        while len(self.later) > MOST_LATER:
            self._file_of(self.later.pop(0)).unlink(missing_ok=True)
        self.erase_spent()
        return True

    def erase_spent(self) -> None:
        """Erase the receiving keys of all stored grants, and the files of grants that are not waiting any more.

        A start calls it in case a crash came between storing and erasing.
        """
        for since, path in _waiting(self.directory):
            if since <= self.grant.keys_since:
                path.unlink(missing_ok=True)
        stored: list[AggregatorGrant | DeviceGrant] = [self.grant]
        stored += self.later
        for grant in stored:
            if self.receiving is not None:
                self.receiving = erase_receiving(self.directory, self.identity, self.receiving, grant)

    def _replace(self, grant: G) -> None:
        """Put ``grant`` in force, on disk first."""
        write_private(self.directory / GRANT_FILE, _kept(grant))
        self._use(grant)

    def open_under_any(
        self, payload: memoryview, head: Sealed, at: int, sender_sign_key: bytes, signed: bytes
    ) -> tuple[GroupKey, memoryview]:
        """Open a group envelope with any stored broadcast key: the one in use, the one in force, or a later one.

        Args:
            payload: the envelope.
            head: its head, from `read_head`.
            at: offset of the sealed part, from `read_head`.
            sender_sign_key: 32 bytes, Ed25519.
            signed: the envelope's `Fingerprint.signed`.

        Returns:
            The key that opened the envelope, and its plaintext.

        Raises:
            SealError: no stored key opens it, or it was altered or is not the sender's.
        """
        refused = SealError()
        for group in self._groups():
            try:
                return group, open_from_group(group, payload, head, at, sender_sign_key, signed)
            except SealError as error:
                refused = error
        raise refused

    def _groups(self) -> Iterator[GroupKey]:
        """Yield the stored broadcast keys, the one in use first."""
        yield self.group
        held = (self._broadcast(self.grant), *map(self._broadcast, self.later))
        yield from (group for group in held if group != self.group)

    def newer(self, generation: int) -> G | None:
        """Return the newest waiting grant whose secrets are not newer than roster ``generation``; None without one."""
        return next((g for g in reversed(self.later) if g.keys_since <= generation), None)

    def promote(self, grant: G, replacement: G | None = None) -> None:
        """Put a waiting grant in force and delete the older ones; messages sealed under those can no longer be opened.

        Args:
            grant: one of ``later``.
            replacement: the same grant with secrets of a later time, which is stored instead.
        """
        at = self.later.index(grant) + 1
        gone, self.later = self.later[:at], self.later[at:]
        self._replace(replacement or grant)
        for old in gone:
            self._file_of(old).unlink(missing_ok=True)

    def _file_of(self, grant: G) -> Path:
        return self.directory / f"{NEXT_FILE}.{grant.keys_since:010d}"

    def _open(self, data: bytes, least_sequence: int, *, expired: bool = False) -> Roster:
        return open_roster(
            data,
            owner_key=self.grant.owner_key,
            fleet=self.grant.fleet,
            least_sequence=least_sequence,
            now_s=0 if expired else int(time.time()),
        )
