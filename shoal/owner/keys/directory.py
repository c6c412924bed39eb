"""The owner's directory: keys, secrets, roster, grants, tokens and runs. It must not be copied to the server."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from crypto.seal.envelope import GroupKey
from crypto.seal.identity import Identity, fingerprint, sign_document
from crypto.seal.passphrase import Lock
from shoal.address import BrokerAddress
from shoal.errors import (
    ConfigError,
    IntegrityError,
    NotEnrolledError,
    ShoalError,
    UntrustedError,
    UsageError,
    WireError,
)
from shoal.limits import MAX_LABELS_CHARS
from shoal.membership.grants import (
    AGGREGATOR_ROLE,
    DEVICE_ROLE,
    KEEPER_ROLE,
    OWNER_NAME,
    WORKER_ROLE,
    open_card,
    seal_grant,
)
from shoal.membership.roster import open_roster, shortened
from shoal.owner.keys.broker_users import DEVICE_RESERVED, ENROL_USER, BrokerUsers
from shoal.owner.keys.receiving import RECEIVING_FILE, ReceivingBook
from shoal.owner.keys.settings import broker_ca
from shoal.owner.keys.vault import (
    BACKUP_HINT,
    OWNER_FILE,
    RENEWED_HINT,
    ROSTER_FILE,
    RUNS,
    SECRETS_FILE,
    VERSIONS_FILE,
    FleetSecrets,
    StoredVersions,
    Vault,
    VersionSecrets,
    highest_run,
)
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import (
    SHOWN,
    AggregatorGrant,
    Card,
    DeviceGrant,
    Member,
    ReceivingKeys,
    Roster,
    read_labels,
    write_labels,
)
from shoal.types import check_name
from shoal.util.files import (
    check_directory,
    exclusive,
    named,
    private_directory,
    remove_unfinished,
    sync_directory,
    write_atomic,
    write_private,
)

if TYPE_CHECKING:
    from crypto.mask.schedule import VersionKey

GRANTS: Final = "grants"
HELPERS: Final = {WORKER_ROLE: "workers", KEEPER_ROLE: "keepers"}
"""Folders with the cards of the aggregator's workers, and of the keepers that runs can name."""
CHANGE_WAIT_S: Final = 120.0
"""How long one `shoal-fleet` waits while another changes the fleet: writing new grants for 5000 devices that joined by
file takes some 20 s, and publishing takes at most `connection.FLUSH_S`."""
ROLES_HINT: Final = "add-device takes a device's card, add-aggregator the aggregator's"
OTHER_NAME_HINT: Final = (
    "the same device, installed again: shoal-fleet replace OWNER NAME, and enrol it again while that waits. Another device gets "
    "another name, in a new directory: shoal-edge enrol DIR --name NAME, with the same enrolment line; or shoal-edge init"
)
LISTS_HINT: Final = "shoal-fleet show lists the devices"
LABELS_HINT: Final = (
    "write KEY=VALUE: a key of a-z, 0-9 and '_', a value of ASCII letters and digits with single ' ', '.', '_' or '-' between, "
    f"in all at most {MAX_LABELS_CHARS} characters a device"
)
LOCKED_HINT: Final = "wait for the other shoal-fleet to end"
RUNS_AFTER_RESTORE: Final = 1000
"""Run numbers that are skipped after a restore, since some may have been used after the backup."""
ROSTER_LIFE_S: Final = 365 * 24 * 3600
"""A roster that is not renewed for a year ends the fleet."""


class FleetDirectory:
    """A fleet and its owner's keys, loaded from the owner's directory.

    Attributes:
        path: the directory; owner: the owner's keys; secrets: the fleet's shared secrets; roster: the newest roster.
        receiving: the devices' receiving keys.
        users: the broker's users; none before the first `shoal-fleet broker-config`.
    """

    def __init__(self, path: Path, lock: Lock | None = None) -> None:
        """Open a fleet that `create` made; ``lock`` holds the passphrase, if there is one.

        Raises:
            NotEnrolledError: there is no fleet in ``path``.
            ConfigError: the owner's key is under a passphrase and none is given.
            UntrustedError: the passphrase is wrong.
            IntegrityError: a file is damaged.
        """
        if not (path / SECRETS_FILE).exists():
            raise NotEnrolledError(f"{path} holds no fleet", hint="shoal-fleet init DIR --name NAME --broker URL")
        self.path = path
        check_directory(path)
        self._vault = Vault(path, lock)
        self._changing = False
        self.users: BrokerUsers
        self.secrets: FleetSecrets
        self.roster: Roster
        self.receiving = ReceivingBook()
        self._signed = self._receiving_bytes = b""
        self.owner = Identity.from_bytes(self._vault.read(OWNER_FILE), path / OWNER_FILE)
        self._read_state()
        if self._vault.is_changing:
            # A change that a crash interrupted is completed here. If another program holds the lock, it is still at work
            # on it: reading must not wait for that.
            with suppress(ConfigError), self.changing(wait_s=0.0):
                pass

    @contextmanager
    def changing(self, wait_s: float | None = None) -> Iterator[None]:
        """Lock the fleet against other `shoal-fleet` programs and re-read its state; re-entrant.

        Code that reads the state and signs, writes or publishes something based on it must run inside.

        Args:
            wait_s: how long to wait for another program; None is CHANGE_WAIT_S.

        Raises:
            ConfigError: another program holds the lock for longer than ``wait_s``.
        """
        if self._changing:
            yield
            return
        with exclusive(self.path, wait_s=CHANGE_WAIT_S if wait_s is None else wait_s, hint=LOCKED_HINT):
            remove_unfinished(self.path)
            left_over = self._vault.carry_out()
            self._read_state()
            self._changing = True
            try:
                if left_over:
                    self._finish_change()
                yield
            finally:
                self._changing = False

    def _read_state(self) -> None:
        self.secrets, signed = self._vault.state()
        self.users = BrokerUsers(self.path)
        self._read_receiving()
        if signed and signed == self._signed:
            return
        key, fleet = self.owner.member.sign_key, self.secrets.fleet
        try:
            # now_s=0: the owner must be able to open an expired roster, to sign it again.
            self.roster = open_roster(signed, owner_key=key, fleet=fleet, least_sequence=0, now_s=0)
        except ShoalError as error:
            raise IntegrityError(f"{self.path / ROSTER_FILE} is damaged: {error}", hint=BACKUP_HINT) from error
        self._signed = signed

    def _read_receiving(self) -> None:
        if not (self.path / RECEIVING_FILE).exists():
            raise IntegrityError(
                f"{self.path} has no {RECEIVING_FILE}: it was lost, or an earlier version of Shoal made this fleet",
                hint=RENEWED_HINT,
            )
        data = self._vault.read(RECEIVING_FILE)
        if data == self._receiving_bytes:
            return
        with named(self.path / RECEIVING_FILE, BACKUP_HINT):
            self.receiving = ReceivingBook.from_bytes(data)
        self._receiving_bytes = data

    def _store_receiving(self, book: ReceivingBook) -> None:
        if book != self.receiving:
            data = book.to_bytes()
            self._vault.write(RECEIVING_FILE, data)
            self.receiving, self._receiving_bytes = book, data

    @classmethod
    def create(cls, path: Path, name: str, broker: str, lock: Lock | None = None) -> FleetDirectory:
        """Create a fleet with fresh keys and an empty roster; with ``lock``, owner key and secrets are encrypted.

        Raises:
            ConfigError: the directory holds a fleet already, or the name or the address is not valid.
        """
        check_name(name, "fleet")
        BrokerAddress.parse(broker)
        private_directory(path)
        with exclusive(path, wait_s=CHANGE_WAIT_S, hint=LOCKED_HINT):
            if (path / SECRETS_FILE).exists():
                raise ConfigError(
                    f"{path} holds a fleet already", hint="its keys can't be made again: use another directory"
                )
            owner = Identity.generate(OWNER_NAME)
            vault = Vault(path, lock)
            vault.write(OWNER_FILE, owner.reveal())
            issued, expires = _life()
            first = Roster(
                fleet=name,
                sequence=1,
                issued_at_s=issued,
                expires_at_s=expires,
                aggregator=None,
                devices=(),
                revoked=(),
            )
            write_private(path / ROSTER_FILE, sign_document(owner, first))
            for sub in (GRANTS, RUNS):
                private_directory(path / sub)
            vault.write(RECEIVING_FILE, ReceivingBook().to_bytes())
            # The secrets are written last: their file marks a complete fleet.
            vault.write(SECRETS_FILE, encode(FleetSecrets.fresh(name, broker)))
        return cls(path, lock)

    @property
    def name(self) -> str:
        """The fleet's name."""
        return self.secrets.fleet

    @property
    def fingerprint(self) -> str:
        """The owner's fingerprint, which each party compares when it joins."""
        return fingerprint(self.owner.member)

    @property
    def version_key(self) -> VersionKey:
        """The newest key version as drawn. The owner doesn't step it, so it can open every checkpoint under this version."""
        from crypto.mask.schedule import VersionKey  # imports numpy

        return VersionKey(self.name, self.roster.keys_since, self.secrets.version_secret)

    @property
    def versions(self) -> tuple[VersionSecrets, ...]:
        """The newest key version and the earlier ones under which a run may have ended, newest first.

        Raises:
            IntegrityError: the file of the earlier ones is damaged.
        """
        newest = self._newest_version()
        earlier = self._earlier_versions().versions
        return (newest, *(v for v in reversed(earlier) if v.number < newest.number))

    def forget_versions_before(self, number: int) -> None:
        """Erase the secrets of key versions before ``number``; durable on return."""
        with self.changing():
            earlier = self._earlier_versions()
            left = earlier.since(number)
            if left != earlier:
                self._vault.write(VERSIONS_FILE, encode(left))

    def _newest_version(self) -> VersionSecrets:
        return VersionSecrets(self.roster.keys_since, self.secrets.version_secret, self.secrets.broadcast_key)

    def _earlier_versions(self) -> StoredVersions:
        path = self.path / VERSIONS_FILE
        if not path.exists():
            return StoredVersions()
        with named(path, BACKUP_HINT):
            return decode(self._vault.read(VERSIONS_FILE), StoredVersions)

    @property
    def broadcast(self) -> GroupKey:
        """The key that devices and the aggregator share."""
        return GroupKey(self.name, "broadcast", self.secrets.broadcast_key)

    @property
    def roster_bytes(self) -> bytes:
        """The roster as signed."""
        return self._signed

    @property
    def broker(self) -> str:
        """The broker's address without user and password."""
        return str(BrokerAddress.parse(self.secrets.broker))

    def broker_for(self, user: str) -> str:
        """Return the broker's address as ``user`` connects to it."""
        return self.users.address(self.secrets.broker, user)

    @property
    def broker_ca(self) -> bytes:
        """The CA's certificate by which parties know the broker, as grants and lines have it; see `settings.broker_ca`."""
        return broker_ca(self.path, self.secrets.broker)

    def add_device(self, card_bytes: bytes, expected_fingerprint: str = "") -> Path:
        """Add a device, or renew the grant of one that is listed; return the path of its grant.

        The card of a listed device may bring newer receiving keys. See `admission_draws` for the secrets of a new one.

        Raises:
            UntrustedError: the card is not a device's, or does not have the expected fingerprint.
            ConfigError: the name is taken by another device.
        """
        card = self._checked(card_bytes, DEVICE_ROLE, expected_fingerprint)
        with self.changing():
            self.check_device(card)
            if self.listed(card.member):
                self._store_receiving(self.receiving.taking(_receiving_of([card])))
            else:
                self._admit([card])
            return self._write_grant(card)

    def add_devices(self, cards: Iterable[bytes]) -> None:
        """Add many new devices under one signature of the roster, without grants; `add_device` then writes one for a device.

        Raises:
            UntrustedError: a card is not a device's; no device is added then.
            ConfigError: a name is taken or not allowed for a device; no device is added then.
        """
        with self.changing():
            taken = {device.name for device in self.roster.devices if not self._is_replaced(device)}
            new = []
            for data in cards:
                card = self._checked(data, DEVICE_ROLE, "")
                if card.member.name in taken:
                    raise ConfigError(
                        f"the fleet has had another device called {card.member.name!r}", hint=OTHER_NAME_HINT
                    )
                self.check_name(card.member.name)
                taken.add(card.member.name)
                new.append(card)
            self._admit(new)

    @property
    def admission_draws(self) -> bool:
        """Whether an admission draws new secrets, because those in force have the keys of an earlier run."""
        return self.secrets.next_run > 1

    def _admit(self, cards: list[Card]) -> None:
        """Sign a roster with new devices, under new secrets if `admission_draws`; one draw serves for all of them.

        A device with the name of one that is replaced takes its index and labels, always under new secrets.
        """
        new = {card.member.name: card.member for card in cards}
        gone = [device.name for device in self.roster.devices if device.name in new]
        kept = tuple(new.pop(device.name, device) for device in self.roster.devices)
        changes = {
            "devices": (*kept, *new.values()),
            "revoked": tuple(name for name in self.roster.revoked if name not in gone),
        }
        # Before the roster: each listed device has receiving keys, also after a crash in between.
        book = self.receiving.admitting(_receiving_of(cards))
        for name in gone:
            self._grant_path(name).unlink(missing_ok=True)
        if not (self.admission_draws or gone):
            self._store_receiving(book)
            self._sign(**changes)
            return
        self._draw_secrets(book.advanced(name for name in self.roster.active() if name not in gone), **changes)

    def take_receiving(self, found: Mapping[str, ReceivingKeys]) -> None:
        """Store the receiving keys in ``found``, by device, that are newer than those known; durable on return.

        A device of the roster whose keys are unknown, which happens after `adopt` alone, gets its entry here.
        """
        with self.changing():
            lost = {d: found[d] for d in self.roster.active() if d in found and d not in self.receiving.devices}
            self._store_receiving(self.receiving.admitting(lost).taking(found))

    def check_device(self, card: Card) -> None:
        """Check that a device may have this name with these keys.

        Raises:
            ConfigError: the name is reserved or another device's, or there is no aggregator yet.
            UntrustedError: a device with these keys was replaced.
        """
        aggregator = self.roster.aggregator
        if aggregator is None:
            raise ConfigError(
                "the fleet has no aggregator yet, and devices pin its keys when they join",
                hint="shoal-fleet add-aggregator first",
            )
        self.check_name(card.member.name)
        self._check_unburned(card)
        name = card.member.name
        listed = next((d for d in self.roster.devices if d.name == name and not self._is_replaced(d)), None)
        if self._shown().get(name, name) != name or (listed is not None and not self.listed(card.member)):
            raise ConfigError(f"the fleet has had another device called {name!r}", hint=OTHER_NAME_HINT)

    def _check_unburned(self, card: Card) -> None:
        if self._is_replaced(card.member):
            raise UntrustedError(
                "a device with these keys was replaced, and they are never taken again", hint=OTHER_NAME_HINT
            )

    def _is_replaced(self, device: Member) -> bool:
        return self.users.is_replaced(fingerprint(device))

    def burn(self, card: Card) -> None:
        """Record that the device of a card's name gives way to the card's: its own keys are never taken again.

        It stays in the fleet until the card is added. Durable on return.

        Raises:
            UsageError: there is no such device.
            UntrustedError: a device with the card's keys was replaced.
        """
        with self.changing():
            self._check_unburned(card)
            name = card.member.name
            listed = next((d for d in self.roster.devices if d.name == name), None)
            if listed is None:
                raise UsageError(f"device {name!r} is not in the roster", hint=LISTS_HINT)
            self.users.replace(name, fingerprint(listed))

    def _shown(self) -> dict[str, str]:
        """Return the devices that have a shown name, by that name in lower case."""
        found = ((name, read_labels(self.roster.labels_of(name)).get(SHOWN, "")) for name in self.roster.active())
        return {shown.lower(): name for name, shown in found if shown}

    def named(self, text: str) -> str:
        """Return the name of the device that has this name or this shown name; ``text`` itself without one."""
        return text if self.roster.device(text) is not None else self._shown().get(text.lower(), text)

    def label(self, names: Iterable[str], changes: Mapping[str, str]) -> None:
        """Sign a roster in which devices have other labels; no secret changes.

        Args:
            names: the devices.
            changes: key -> value; an empty one removes the label.

        Raises:
            UsageError: there is no such device, a label is malformed, or another device has the shown name.
        """
        with self.changing():
            texts = [self.roster.labels_of(device.name) for device in self.roster.devices]
            places = {device.name: place for place, device in enumerate(self.roster.devices)}
            for name in names:
                if self.roster.device(name) is None:
                    raise UsageError(f"device {name!r} is not in the roster", hint=LISTS_HINT)
                labels = {**read_labels(texts[places[name]]), **changes}
                text = write_labels({key: value for key, value in labels.items() if value})
                try:
                    read_labels(text)
                except WireError as error:
                    raise UsageError(f"{name}: {error}", hint=LABELS_HINT) from error
                shown = changes.get(SHOWN, "").lower()
                holder = shown if self.roster.device(shown) is not None else self._shown().get(shown, name)
                if holder != name:
                    raise UsageError(f"another device is called {changes[SHOWN]!r}", hint=LISTS_HINT)
                texts[places[name]] = text
            self._sign(labels=shortened(texts))

    def check_name(self, name: str) -> None:
        """Check that a device may be called ``name``.

        Raises:
            ConfigError: the name is not valid in a topic, or another user of the broker has it.
        """
        check_name(name, "device")
        aggregator = self.roster.aggregator
        if name in DEVICE_RESERVED or (aggregator is not None and name == aggregator.name):
            raise ConfigError(
                f"a device can't be called {name!r}: another user of the broker has that name",
                hint=OTHER_NAME_HINT,
            )

    def add_aggregator(self, card_bytes: bytes, expected_fingerprint: str = "") -> Path:
        """Set the fleet's aggregator, or renew its grant; return the path of the grant.

        Raises:
            UntrustedError: the card is not an aggregator's, or does not have the expected fingerprint.
            ConfigError: the fleet has another aggregator, or the name is reserved.
        """
        card = self._aggregator_card(card_bytes, expected_fingerprint)
        with self.changing():
            if self.roster.aggregator is None:
                self._sign(aggregator=card.member)
            elif self.roster.aggregator != card.member:
                raise ConfigError(
                    f"the fleet has an aggregator already ({fingerprint(self.roster.aggregator)})",
                    hint="shoal-fleet replace-aggregator puts another one in its place, if its machine or directory is lost",
                )
            return self._write_grant(card)

    def replace_aggregator(self, card_bytes: bytes, expected_fingerprint: str = "", order: bytes = b"") -> Path:
        """Put another aggregator in the place of the fleet's, under new secrets, and return the path of its grant.

        The keys of the one before are never accepted again, and its user at the broker gets another password. Again with the
        same card it only writes the grant, with the run package of the standing ``order`` in it.

        Raises:
            UntrustedError: as `add_aggregator`, or the card is of an aggregator that was replaced before.
            ConfigError: the fleet has no aggregator yet, or another party has the name.
        """
        card = self._aggregator_card(card_bytes, expected_fingerprint)
        name = card.member.name
        with self.changing():
            before = self.roster.aggregator
            if before is None:
                raise ConfigError("the fleet has no aggregator yet", hint="shoal-fleet add-aggregator DIR CARD")
            if card.member == before:
                return self._write_grant(card, order)
            if self.users.is_replaced(fingerprint(card.member)):
                raise UntrustedError(
                    f"this aggregator ({fingerprint(card.member)}) was replaced before, and its keys are never taken again",
                    hint="make new ones in a new directory: shoal-aggregator init DIR",
                )
            if name in {member.name for member in (*self.roster.devices, *self.workers, *self.keepers)}:
                raise ConfigError(f"another party of the fleet is called {name!r}", hint="init it with another name")
            # First: after a crash in between, the same call goes on from here.
            self.users.replace(before.name, fingerprint(before))
            self._grant_path(before.name).unlink(missing_ok=True)
            self._draw_secrets(self.receiving.advanced(self.roster.active()), aggregator=card.member)
            return self._write_grant(card)

    def _aggregator_card(self, data: bytes, expected: str) -> Card:
        card = self._checked(data, AGGREGATOR_ROLE, expected)
        if card.member.name in (OWNER_NAME, ENROL_USER):
            raise ConfigError(f"an aggregator can't be called {card.member.name!r}", hint="init it with another name")
        return card

    @property
    def workers(self) -> tuple[Member, ...]:
        """The aggregator's workers, in the order of their names; the next run is signed for all of them."""
        return self._helpers(WORKER_ROLE)

    @property
    def keepers(self) -> tuple[Member, ...]:
        """The keepers that a run can name, in the order of their names."""
        return self._helpers(KEEPER_ROLE)

    def _helpers(self, role: str) -> tuple[Member, ...]:
        folder = self.path / HELPERS[role]
        if not folder.exists():
            return ()
        return tuple(open_card(path.read_bytes()).member for path in sorted(folder.glob("*.card")))

    def keeper(self, name: str) -> Member:
        """Return the keeper called ``name``.

        Raises:
            UsageError: there is none.
        """
        found = {member.name: member for member in self.keepers}
        if name not in found:
            hint = f"there are {', '.join(found)}" if found else "shoal-keeper init DIR, then shoal-fleet add-keeper"
            raise UsageError(f"the fleet has no keeper {name!r}", hint=hint)
        return found[name]

    def add_helper(self, role: str, card_bytes: bytes, expected_fingerprint: str = "") -> Path:
        """Add a worker of the aggregator or a keeper, or renew its grant; return the path of the grant.

        One with the name of an earlier one takes its place in the runs that are signed from now on.

        Raises:
            UntrustedError: the card is not for this role, or does not have the expected fingerprint.
            ConfigError: the name is taken by another party.
        """
        card = self._checked(card_bytes, role, expected_fingerprint)
        name = card.member.name
        self.check_name(name)
        others = {other for other in HELPERS if other != role}
        if name in {m.name for m in (*self.roster.devices, *(m for other in others for m in self._helpers(other)))}:
            raise ConfigError(
                f"another party of the fleet is called {name!r}", hint=f"init the {role} with another name"
            )
        with self.changing():
            private_directory(self.path / HELPERS[role])
            write_atomic(self.path / HELPERS[role] / f"{name}.card", card_bytes)
            return self._write_grant(card)

    def remove_helper(self, role: str, name: str) -> None:
        """Forget a worker or a keeper; runs that are signed from now on do without it.

        Raises:
            UsageError: there is none of this name.
        """
        with self.changing():
            path = self.path / HELPERS[role] / f"{name}.card"
            if not path.exists():
                raise UsageError(f"there is no {role} {name!r}")
            path.unlink()
            self._grant_path(name).unlink(missing_ok=True)

    def revoke(self, name: str) -> None:
        """Revoke a device and draw new secrets; a run in progress uses them from its next round on.

        The grant files of the remaining parties are rewritten. A party that joined through the broker has no grant file; it
        gets its new grant there.

        Raises:
            UsageError: there is no such device.
            ConfigError: it is revoked already.
        """
        with self.changing():
            if name in self.roster.revoked:
                raise ConfigError(f"device {name!r} is revoked already", hint=LISTS_HINT)
            if self.roster.device(name) is None:
                raise UsageError(f"device {name!r} is not in the roster", hint=LISTS_HINT)
            left = (device for device in self.roster.active() if device != name)
            self._draw_secrets(self.receiving.advanced(left), revoked=(*self.roster.revoked, name))

    def rotate(self) -> None:
        """Draw new secrets without revoking a device; otherwise as `revoke`."""
        with self.changing():
            self._draw_secrets(self.receiving.advanced(self.roster.active()))

    def sign_beyond(self, sequence: int) -> None:
        """Sign a roster with a sequence above ``sequence`` and new secrets.

        This repairs a directory that was restored from a backup, or of which a copy has signed other rosters. Run numbers
        and secrets used since the backup are unknown here: the secrets are replaced, and run numbers continue after a gap
        that is wider than a fleet uses between two backups.
        """
        with self.changing():
            self.secrets = dataclasses.replace(self.secrets, next_run=self.secrets.next_run + RUNS_AFTER_RESTORE)
            book = self.receiving.advanced(self.roster.active())
            self._draw_secrets(book, sequence=max(sequence, self.roster.sequence) + 1)

    def adopt(self, signed: bytes) -> None:
        """Replace the roster by a newer one of this owner's, in a directory restored from a backup.

        Its secrets are not here, so call `sign_beyond` next.

        Raises:
            UntrustedError: this owner did not sign it for this fleet, or it is older than the directory's.
            IntegrityError: it is malformed.
        """
        with self.changing():
            least, key = self.roster.sequence, self.owner.member.sign_key
            roster = open_roster(signed, owner_key=key, fleet=self.name, least_sequence=least, now_s=0)
            # Before the roster: its number is that of secrets which are unknown here.
            self._store_version()
            # Of a device that was replaced since the backup, the receiving keys here are the earlier one's.
            same = {n: e for n, e in self.receiving.devices.items() if self.roster.device(n) == roster.device(n)}
            self._store_receiving(ReceivingBook(same))
            write_private(self.path / ROSTER_FILE, signed)
            self.roster, self._signed = roster, signed

    def _store_version(self) -> None:
        """Store the secrets in force for models that are sealed under them, unless they are stored."""
        earlier = self._earlier_versions()
        if self.secrets.version_secret not in {v.version_secret for v in earlier.versions}:
            self._vault.write(VERSIONS_FILE, encode(earlier.adding(self._newest_version())))

    def _draw_secrets(self, receiving: ReceivingBook, **changes: object) -> None:
        """Draw new secrets, and put them in force together with a roster that has these ``changes``.

        ``receiving`` names the keys to which the new secrets are sealed.
        """
        sequence = changes.pop("sequence", self.roster.sequence + 1)
        roster = self._next_roster(**{"sequence": sequence, "keys_since": sequence, **changes})
        fresh = FleetSecrets.fresh(self.name, self.secrets.broker)
        secrets = dataclasses.replace(fresh, next_run=self.secrets.next_run)
        signed = sign_document(self.owner, roster)
        self._store_receiving(receiving)
        if self.admission_draws:
            # Before the change: it erases the only other copy.
            self._store_version()
        self._vault.change(secrets, signed)
        self.secrets, self.roster, self._signed = secrets, roster, signed
        self._finish_change()

    def _finish_change(self) -> None:
        """Rewrite the grant files under the new secrets, then remove the journal."""
        for name in self.roster.revoked:
            self._grant_path(name).unlink(missing_ok=True)
        private_directory(self.path / GRANTS)
        kept = [card for card in self.cards() if self._grant_path(card.member.name).exists()]
        for card in kept:
            write_atomic(self._grant_path(card.member.name), self.grant_for(card), sync_name=False)
        sync_directory(self.path / GRANTS)
        self._vault.end_change()

    def take_run(self, count: int = 1) -> int:
        """Allocate ``count`` run numbers and return the first; durable on return."""
        with self.changing():
            # Secrets restored from a backup may count from a number that a later run file already has.
            run = max(self.secrets.next_run, highest_run(self.path) + 1)
            taken = dataclasses.replace(self.secrets, next_run=run + count)
            self._vault.write(SECRETS_FILE, encode(taken))
            self.secrets = taken
            return run

    def cards(self) -> tuple[Card, ...]:
        """Return the cards of the fleet's members: the aggregator, its workers, and the devices that are not revoked."""
        r = self.roster
        active = (d for d in r.devices if d.name not in r.revoked)
        devices = [Card(DEVICE_ROLE, d, self.receiving.of(d.name).receiving) for d in active]
        helpers = (Card(role, member) for role in HELPERS for member in self._helpers(role))
        return (*([Card(AGGREGATOR_ROLE, r.aggregator)] if r.aggregator else []), *helpers, *devices)

    def grant_for(self, card: Card, *, renewal: bool = False, order: bytes = b"") -> bytes:
        """Return a grant with the newest secrets, sealed to the card's holder; call it in `changing`.

        A device's grant is sealed to its next receiving key, also if the card lists older ones.

        Args:
            card: the recipient's card.
            renewal: leave out the roster, which a member receives separately.
            order: see `AggregatorGrant`.
        """
        s = self.secrets
        key, broker = self.owner.member.sign_key, self.broker_for(card.member.name)
        roster, since = b"" if renewal else self.roster_bytes, self.roster.keys_since
        grant: AggregatorGrant | DeviceGrant
        if card.role != DEVICE_ROLE:
            grant = AggregatorGrant(
                fleet=s.fleet,
                owner_key=key,
                broker=broker,
                broker_ca=self.broker_ca,
                roster=roster,
                keys_since=since,
                broadcast_key=s.broadcast_key,
                order=order,
            )
        else:
            known, version = self.receiving.of(card.member.name), self.version_key
            card = dataclasses.replace(card, receiving=known.receiving)
            grant = DeviceGrant(
                fleet=s.fleet,
                owner_key=key,
                broker=broker,
                broker_ca=self.broker_ca,
                roster=roster,
                keys_since=since,
                receiving=known.number,
                broadcast_key=s.broadcast_key,
                version_secret=version.reveal(),
                next_run=version.next_run,
            )
        return seal_grant(self.owner, card, grant)

    def listed(self, member: Member) -> bool:
        """Return whether a device of the fleet, not revoked, has exactly this name and these keys."""
        return self.roster.device(member.name) == member

    def renew(self) -> None:
        """Sign the roster again, valid for another year."""
        with self.changing():
            self._sign()

    def _checked(self, data: bytes, role: str, expected: str) -> Card:
        card = open_card(data)
        if card.role != role:
            raise UntrustedError(f"this card asks to be {card.role!r}, not {role!r}", hint=ROLES_HINT)
        if expected and fingerprint(card.member) != expected.strip().lower():
            raise UntrustedError(f"this card has fingerprint {fingerprint(card.member)}, not {expected}")
        return card

    def _next_roster(self, **changes: object) -> Roster:
        issued, expires = _life()
        changes = {"sequence": self.roster.sequence + 1, **changes}
        return dataclasses.replace(self.roster, issued_at_s=issued, expires_at_s=expires, **changes)  # type: ignore[arg-type]

    def _sign(self, **changes: object) -> None:
        roster = self._next_roster(**changes)
        signed = sign_document(self.owner, roster)
        write_private(self.path / ROSTER_FILE, signed)
        self.roster, self._signed = roster, signed

    def _write_grant(self, card: Card, order: bytes = b"") -> Path:
        path = self._grant_path(card.member.name)
        write_private(path, self.grant_for(card, order=order))
        return path

    def _grant_path(self, name: str) -> Path:
        return self.path / GRANTS / f"{name}.grant"


def _receiving_of(cards: Iterable[Card]) -> dict[str, ReceivingKeys]:
    """Return the receiving keys on devices' cards, by name."""
    return {card.member.name: card.receiving for card in cards if card.receiving is not None}


def _life() -> tuple[int, int]:
    now = int(time.time())
    return now, now + ROSTER_LIFE_S
