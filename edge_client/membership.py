"""A device's place in a fleet: its own keys and the secret of each key version."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from crypto.seal.envelope import (
    GroupKey,
    SealError,
    is_from,
    open_from_member,
    peek_from_group,
    read_expected,
    read_head,
)
from crypto.seal.identity import peek_document
from shoal.errors import NotEnrolledError, UntrustedError
from shoal.membership.directory import DAMAGED_HINT, Membership, accept_grant, make_identity
from shoal.membership.grants import DEVICE_ROLE
from shoal.membership.roster import aggregator_of
from shoal.membership.signed_plans import open_plan
from shoal.protocol import channels
from shoal.protocol.codec import U32, Fixed32, decode, encode, message
from shoal.protocol.documents import DeviceGrant, Member, Roster, RosterChange, RunPackage
from shoal.util.files import named, read_private, write_private

if TYPE_CHECKING:
    from crypto.mask.schedule import VersionKey
    from shoal.protocol.messages import Sealed

REVOKED_HINT: Final = (
    "these keys are never taken again: init or enrol a new directory, under another name or, with "
    "shoal-fleet replace, the same"
)


ROSTERS: Final = (channels.ROSTER.purpose, channels.ROSTER_CHANGE.purpose)
"""Messages that may come from an aggregator that our roster does not name yet."""
EARLIER_FILE: Final = "versions.earlier"
"""File with the secrets of key versions before the one in force, for runs that the owner signed under them earlier."""
MOST_EARLIER: Final = 8
"""Key versions in that file; of more, the oldest are erased, and a run that was signed under them must be signed again."""


@message(75)
@dataclass(frozen=True, slots=True)
class EarlierVersion:
    """The secret of an earlier key version, for run number ``next_run`` and later ones."""

    number: U32
    next_run: U32
    secret: Fixed32 = field(repr=False)


@message(76)
@dataclass(frozen=True, slots=True)
class EarlierVersions:
    """Contents of EARLIER_FILE, ascending by number."""

    versions: tuple[EarlierVersion, ...]


def _load_earlier(directory: Path) -> tuple[EarlierVersion, ...]:
    path = directory / EARLIER_FILE
    if not path.exists():
        return ()
    data = read_private(path)
    with named(path, DAMAGED_HINT):
        return decode(data, EarlierVersions).versions


class DeviceMembership(Membership[DeviceGrant]):
    """A device that belongs to a fleet.

    Attributes:
        index: its index in the roster, by which announcements address it.
    """

    def __init__(self, directory: Path) -> None:
        """Load the membership that `join` has stored in ``directory``.

        An expired roster is accepted, since without it the device could not receive a newer one; see `expired`.

        Raises:
            NotEnrolledError: no device has joined there, or it has lost its receiving keys.
            UntrustedError: the roster is not signed by the owner, or older than one that was in force before.
        """
        super().__init__(directory, DeviceGrant, expired=True)
        self._earlier = _load_earlier(directory)

    @property
    def name(self) -> str:
        """The device's name."""
        return self.identity.name

    @property
    def index(self) -> int:
        """The device's index in the roster.

        Raises:
            UntrustedError: the device is revoked, or listed with other keys.
        """
        for index, member in enumerate(self.roster.devices):
            if member == self.identity.member and self.name not in self.roster.revoked:
                return index
        raise UntrustedError(f"{self.name} is not in the fleet's roster any more", hint=REVOKED_HINT)

    @property
    def listed(self) -> bool:
        """Whether the newest roster lists this device as a member."""
        return self.roster.device(self.name) == self.identity.member

    def open_broadcast(self, payload: memoryview, signed: bytes) -> tuple[str, memoryview]:
        """Open a message from the aggregator to the fleet; return its purpose and plaintext.

        A run package that the owner made with newer secrets puts those in force. Any message under a newer broadcast key
        makes that the key for our own messages: the next round is under the newer secrets. A roster, or a change, may come
        from an aggregator that the owner has put in the place of ours: see `_from_successor`.

        Args:
            payload: a group envelope.
            signed: its `Fingerprint.signed`.

        Raises:
            UntrustedError: the message is of another fleet, or not from the aggregator.
            SealError: it is sealed under a key that we do not have, or altered.
        """
        head, at = read_head(payload)
        sender = aggregator_of(self.roster)
        if head.purpose in ROSTERS and not is_from(payload, head, sender.sign_key, signed):
            self.group, plain = self._from_successor(payload, head, at, signed)
            return head.purpose, plain
        if (head.fleet, head.sender) != (self.fleet, sender.name):
            raise UntrustedError(f"a message of {head.sender!r} in {head.fleet!r}")
        group, plain = self.open_under_any(payload, head, at, sender.sign_key, signed)
        if group.secret != self.grant.broadcast_key and head.purpose == channels.RUN.purpose and not self.expired:
            self._put_in_force(plain)
        if group != self.group:
            self.group = group
        return head.purpose, plain

    def _from_successor(self, payload: memoryview, head: Sealed, at: int, signed: bytes) -> tuple[GroupKey, memoryview]:
        """Open a roster, or a change, of an aggregator that our roster does not name: the owner may have replaced ours.

        The contents must name their sender as the aggregator, and be sealed under secrets that the owner drew after our roster:
        the aggregator that was replaced does not have those. Whoever adopts the roster checks that the owner signed it.

        Returns:
            The key that opened the message, and its plaintext.

        Raises:
            UntrustedError: it is another party's, or under older secrets.
        """
        newer = (grant for grant in (self.grant, *self.later) if grant.keys_since > self.roster.sequence)
        for group in map(self._broadcast, newer):
            with suppress(SealError):
                plain = peek_from_group(group, payload, at)
                whole = head.purpose == channels.ROSTER.purpose
                named_ = peek_document(plain, Roster) if whole else decode(plain, RosterChange)
                sender = named_.aggregator
                if (
                    sender is not None
                    and sender.name == head.sender
                    and is_from(payload, head, sender.sign_key, signed)
                ):
                    return group, plain
        raise UntrustedError(f"a {head.purpose} of {head.sender!r}, who is not this fleet's aggregator")

    def open_from_worker(self, workers: Sequence[Member], payload: memoryview, signed: bytes) -> tuple[str, memoryview]:
        """Open a message from a worker of the run's aggregator to the fleet; return its purpose and plaintext.

        Args:
            workers: the plan's.
            payload: a group envelope.
            signed: its `Fingerprint.signed`.

        Raises:
            UntrustedError: the message is of another fleet, or not from a worker.
            SealError: it is sealed under a key that we do not have, or altered.
        """
        head, at = read_head(payload)
        sender = next((worker for worker in workers if worker.name == head.sender), None)
        if sender is None or head.fleet != self.fleet:
            raise UntrustedError(f"a message of {head.sender!r} in {head.fleet!r}")
        return head.purpose, self.open_under_any(payload, head, at, sender.sign_key, signed)[1]

    def open_own_roster(self, payload: memoryview, signed: bytes) -> bytes:
        """Return the signed roster that the aggregator has sealed to this device alone; the owner's signature is not checked yet.

        Args:
            payload: a member envelope.
            signed: its `Fingerprint.signed`.

        Raises:
            UntrustedError: the message is of another fleet, for another device, or not from the aggregator.
            SealError: it is not sealed to us, or altered.
        """
        sender = aggregator_of(self.roster)
        wanted = channels.REVOCATION.head(self.fleet, sender.name, self.name)
        head, at = read_expected(payload, wanted, f"a roster for {self.name}")
        plain, _ = open_from_member(self.identity, payload, head, at, sender.sign_key, signed)
        return bytes(plain)

    def _put_in_force(self, package: memoryview) -> None:
        """Put the secrets of a run's plan in force; they may be older than the broadcast key that its package came under."""
        plan = open_plan(decode(package, RunPackage).plan, self.owner_key)
        grant = self.newer(plan.roster_sequence)
        if grant is not None:
            self.promote(grant)

    def grant_of(self, generation: int) -> DeviceGrant:
        """Return the grant with the secrets of key version ``generation``.

        Raises:
            NotEnrolledError: we have no secrets of that key version.
        """
        for grant in (self.grant, *self.later):
            if grant.keys_since == generation:
                return grant
        raise NotEnrolledError(
            f"no keys of roster {generation} have come yet", hint="the owner leaves them with `shoal-fleet publish`"
        )

    def version_key(self, generation: int) -> VersionKey:
        """Return the secret of key version ``generation`` for the first run that the device has not begun under it.

        Call `keep_version` once a chain that was derived from it is stored.

        Raises:
            NotEnrolledError: we have no secrets of that key version.
        """
        from crypto.mask.schedule import VersionKey

        held = next((v for v in self._earlier if v.number == generation), None)
        if held is not None:
            return VersionKey(self.fleet, held.number, held.secret, held.next_run)
        grant = self.grant_of(generation)
        return VersionKey(self.fleet, generation, grant.version_secret, grant.next_run)

    def keep_version(self, key: VersionKey) -> None:
        """Store a version's stepped secret, durably, and put that version in force, if it is not older than the one in force.

        Older versions are stepped as far, so that nothing of this run or an earlier one follows from them. They stay for later
        runs that the owner signed before it drew newer keys. A key for an earlier run than the stored one changes nothing.

        Raises:
            NotEnrolledError: we have no secrets of that key version.
        """
        if key.next_run < self.version_key(key.number).next_run:
            return
        over = [g for g in (self.grant, *self.later) if g.keys_since < key.number]
        older = [*self._earlier, *(EarlierVersion(g.keys_since, g.next_run, g.version_secret) for g in over)]
        if older:
            # Before the grant in force is replaced: a crash in between leaves a version in both files.
            self._keep_earlier(older, key.next_run)
        if all(g.keys_since != key.number for g in (self.grant, *self.later)):
            return
        grant = self.grant_of(key.number)
        stepped = replace(grant, version_secret=key.reveal(), next_run=key.next_run)
        if grant is self.grant:
            group = self.group  # messages may come under a newer version already
            self._replace(stepped)
            self.group = group
        else:
            self.promote(grant, stepped)

    def _keep_earlier(self, older: list[EarlierVersion], next_run: int) -> None:
        from crypto.mask.schedule import VersionKey

        stepped = {}
        for version in older[-MOST_EARLIER:]:
            key = VersionKey(self.fleet, version.number, version.secret, version.next_run)
            key.skip_to_run(max(next_run, version.next_run))
            stepped[version.number] = EarlierVersion(version.number, key.next_run, key.reveal())
        earlier = tuple(version for _, version in sorted(stepped.items()))
        if earlier != self._earlier:
            write_private(self.directory / EARLIER_FILE, encode(EarlierVersions(earlier)))
            self._earlier = earlier


def init(directory: Path, name: str) -> Path:
    """Make the device's keys; return the card for the owner."""
    return make_identity(directory, name, DEVICE_ROLE)


def join(directory: Path, grant_file: bytes, owner_fingerprint: str) -> DeviceMembership:
    """Accept the owner's grant and return the membership."""
    accept_grant(directory, grant_file, DeviceGrant, owner_fingerprint)
    return DeviceMembership(directory)
