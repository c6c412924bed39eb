"""A party's place in a fleet: its keys, the owner's grant and the newest roster, in one private directory."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Final, Generic, TypeVar

from crypto.seal.envelope import GroupKey, SealError, open_from_group
from crypto.seal.grants import make_card, open_grant, open_renewal
from crypto.seal.identity import Identity
from crypto.seal.roster import open_roster
from support.files import private_directory, read_private, write_private
from wire.codec import decode, encode
from wire.documents import AggregatorGrant, DeviceGrant, Roster
from wire.errors import ConfigError, NotEnrolledError, UntrustedError
from wire.messages import Sealed

KEY_FILE: Final = "identity.key"
GRANT_FILE: Final = "membership.bin"
NEXT_FILE: Final = "membership.next"
"""With the roster sequence behind it: a grant with newer secrets, in force from the first run or mask epoch made with them."""
MOST_LATER: Final = 8
"""Grants with newer secrets that are kept; of more the oldest go."""

ROSTER_FILE: Final = "roster.signed"

G = TypeVar("G", AggregatorGrant, DeviceGrant)


def make_identity(directory: Path, name: str, role: str) -> Path:
    """Make a party's keys where they belong; return the card to carry to the owner.

    Raises:
        ConfigError: there are keys already.
    """
    if (directory / KEY_FILE).exists():
        raise ConfigError(f"{directory} holds keys already", hint="use another directory, or remove this one first")
    private_directory(directory)
    identity = Identity.generate(name)
    identity.save(directory / KEY_FILE)
    card = directory / f"{name}.card"
    card.write_bytes(make_card(identity, role))
    return card


def accept_grant(directory: Path, grant_file: bytes, kind: type[G], owner_fingerprint: str) -> None:
    """Store the owner's grant for the keys in ``directory``.

    Raises:
        NotEnrolledError: there are no keys yet.
        UntrustedError: the grant is another owner's, or for somebody else.
    """
    if not (directory / KEY_FILE).exists():
        raise NotEnrolledError(f"{directory} holds no keys yet", hint="run init there first")
    store_grant(directory, open_grant(Identity.load(directory / KEY_FILE), grant_file, kind, owner_fingerprint))


def store_grant(directory: Path, grant: AggregatorGrant | DeviceGrant) -> None:
    """Store an opened grant as the one in force; the membership file, written last, is what makes a member.

    Raises:
        UntrustedError: its roster is not the owner's, has expired, or is not the one that its keys were drawn for.
    """
    if not grant.roster:
        raise UntrustedError(
            "this grant only renews the keys of somebody who belongs to the fleet",
            hint="ask the owner for a new one: shoal-fleet add-device, or add-aggregator",
        )
    now_s = int(time.time())
    roster = open_roster(grant.roster, owner_key=grant.owner_key, fleet=grant.fleet, least_sequence=0, now_s=now_s)
    if roster.keys_since != grant.keys_since:
        raise UntrustedError(f"a grant with keys of roster {grant.keys_since} and a roster of keys {roster.keys_since}")
    write_private(directory / ROSTER_FILE, grant.roster)
    write_private(directory / GRANT_FILE, _kept(grant))
    for path in directory.glob(f"{NEXT_FILE}.[0-9]*"):
        path.unlink()


def _kept(grant: AggregatorGrant | DeviceGrant) -> bytes:
    """Return a grant as its file holds it: the roster has a file of its own."""
    return encode(dataclasses.replace(grant, roster=b""))


class Membership(Generic[G]):
    """A party that belongs to a fleet.

    Attributes:
        directory: where its files are; identity: its private keys; group: the fleet's broadcast key.
        roster, roster_bytes: the newest roster, and as the owner signed it.
        later: grants with newer secrets that no run has called for yet, oldest first. A fleet that the owner changes
            twice in a row may go through the secrets in between.
    """

    def __init__(self, directory: Path, kind: type[G]) -> None:
        """Load what `accept_grant` left in ``directory``.

        Raises:
            NotEnrolledError: nobody has joined there.
            UntrustedError: the roster is not the owner's, or has expired.
        """
        if not (directory / GRANT_FILE).exists():
            raise NotEnrolledError(f"{directory} belongs to no fleet", hint="run init there, then join with a grant")
        self.directory = directory
        self.identity = Identity.load(directory / KEY_FILE)
        self._kind: type[G] = kind
        self.grant: G
        self._use(decode(read_private(directory / GRANT_FILE), kind))
        held = self.grant.keys_since
        waiting = sorted((int(p.suffix[1:]), p) for p in directory.glob(f"{NEXT_FILE}.[0-9]*"))
        self.later: list[G] = [decode(read_private(p), kind) for since, p in waiting if since > held]
        self.roster_bytes = read_private(directory / ROSTER_FILE)
        self.roster = self._open(self.roster_bytes, 0)

    def _use(self, grant: G) -> None:
        self.grant = grant
        self.group = self._broadcast(grant)

    @staticmethod
    def _broadcast(grant: G) -> GroupKey:
        return GroupKey(grant.fleet, "broadcast", grant.broadcast_key)

    @property
    def next(self) -> G | None:
        """The grant with the newest secrets, where those in force are not."""
        return self.later[-1] if self.later else None

    @property
    def keys_since(self) -> int:
        """Roster sequence at which the owner last drew secrets, as far as we know: by the newest roster, or the newest keys."""
        return max(self.roster.keys_since, (self.next or self.grant).keys_since)

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
        """Read the roster file again; return whether it holds another roster, which is then in force."""
        data = read_private(self.directory / ROSTER_FILE)
        if data == self.roster_bytes:
            return False
        self.roster, self.roster_bytes = self._open(data, self.roster.sequence), data
        return True

    def adopt(self, data: bytes) -> bool:
        """Take up a roster from the network; return whether it is newer than ours.

        Raises:
            UntrustedError: not the owner's, rolled back, or expired.
        """
        roster = self._open(data, self.roster.sequence)
        if roster.sequence == self.roster.sequence:
            return False
        write_private(self.directory / ROSTER_FILE, data)
        self.roster, self.roster_bytes = roster, data
        return True

    def take_grant(self, data: bytes) -> bool:
        """Keep a grant that came through the broker for later; return whether its secrets are newer than all we have.

        The roster that goes with them comes by itself.

        Raises:
            UntrustedError: not the owner's, for somebody else, or of another fleet.
        """
        grant = open_renewal(self.identity, data, self._kind, self.owner_key)
        if grant.fleet != self.fleet:
            raise UntrustedError(f"keys of fleet {grant.fleet!r}")
        if grant.keys_since <= (self.next or self.grant).keys_since:
            return False
        write_private(self._file_of(grant), _kept(grant))
        self.later.append(dataclasses.replace(grant, roster=b""))
        while len(self.later) > MOST_LATER:
            self._file_of(self.later.pop(0)).unlink(missing_ok=True)
        return True

    def _replace(self, grant: G) -> None:
        """Put ``grant`` in the place of the one in force."""
        write_private(self.directory / GRANT_FILE, _kept(grant))
        self._use(grant)

    def open_under_any(
        self, payload: memoryview, head: Sealed, at: int, sender_sign_key: bytes, signed: bytes
    ) -> tuple[GroupKey, memoryview]:
        """Return what opens a group envelope, and its plaintext: the broadcast key in use, the one in force or a later one.

        Args:
            payload: the envelope.
            head: with ``at``, from `read_head`.
            at: where the sealed part begins.
            sender_sign_key: 32 bytes, Ed25519.
            signed: the envelope's `Fingerprint.signed`.

        Raises:
            SealError: under no key that we hold, altered, or not the sender's.
        """
        held: list[GroupKey] = [self._broadcast(self.grant)]
        held += [self._broadcast(grant) for grant in self.later]
        refused = SealError()
        for group in (self.group, *(g for g in held if g != self.group)):
            try:
                return group, open_from_group(group, payload, head, at, sender_sign_key, signed)
            except SealError as error:
                refused = error
        raise refused

    def newer(self, generation: int) -> G | None:
        """Return the newest grant that is not in force yet and whose secrets were drawn by roster ``generation``."""
        return next((g for g in reversed(self.later) if g.keys_since <= generation), None)

    def promote(self, grant: G) -> None:
        """Put one of the newer grants in force and forget those before; what they have sealed can't be read any more."""
        at = self.later.index(grant) + 1
        gone, self.later = self.later[:at], self.later[at:]
        self._replace(grant)
        for old in gone:
            self._file_of(old).unlink(missing_ok=True)

    def _file_of(self, grant: G) -> Path:
        return self.directory / f"{NEXT_FILE}.{grant.keys_since:010d}"

    def _open(self, data: bytes, least_sequence: int) -> Roster:
        return open_roster(
            data,
            owner_key=self.grant.owner_key,
            fleet=self.grant.fleet,
            least_sequence=least_sequence,
            now_s=int(time.time()),
        )
