"""The owner's directory: keys, mask secret, roster, cards, grants and runs. Keep it off the server."""

from __future__ import annotations

import dataclasses
import os
import time
from pathlib import Path
from typing import Final

from crypto.mask.secret import MaskSecret
from crypto.seal.envelope import KEY_BYTES, GroupKey
from crypto.seal.grants import AGGREGATOR_ROLE, DEVICE_ROLE, OWNER_NAME, open_card, seal_grant
from crypto.seal.identity import Identity, fingerprint
from crypto.seal.roster import open_roster
from crypto.seal.signed import sign_document
from support.files import private_directory, read_private, write_private
from wire.address import BrokerAddress
from wire.codec import decode, encode, message
from wire.documents import AggregatorGrant, Card, DeviceGrant, Roster
from wire.errors import ConfigError, NotEnrolledError, UntrustedError
from wire.types import check_name

OWNER_FILE: Final = "owner.key"
SECRETS_FILE: Final = "secrets.bin"
ROSTER_FILE: Final = "roster.signed"
GRANTS: Final = "grants"
RUNS: Final = "runs"
ROSTER_LIFE_S: Final = 365 * 24 * 3600
"""A roster that is not renewed for a year ends the fleet."""


@message(96)
@dataclasses.dataclass(frozen=True, slots=True)
class FleetSecrets:
    """What secrets.bin holds; mode 0600."""

    fleet: str
    broker: str
    mask_secret: bytes = dataclasses.field(repr=False)
    content_key: bytes = dataclasses.field(repr=False)
    broadcast_key: bytes = dataclasses.field(repr=False)


class FleetDirectory:
    """A fleet as its owner holds it."""

    def __init__(self, path: Path) -> None:
        """Open what `create` made.

        Raises:
            NotEnrolledError: there is no fleet.
        """
        if not (path / SECRETS_FILE).exists():
            raise NotEnrolledError(f"{path} holds no fleet", hint="shoal-fleet init DIR --name NAME --broker URL")
        self.path = path
        self.owner = Identity.load(path / OWNER_FILE)
        self.secrets = decode(read_private(path / SECRETS_FILE), FleetSecrets)
        self.roster = open_roster(
            read_private(path / ROSTER_FILE),
            owner_key=self.owner.member.sign_key,
            fleet=self.secrets.fleet,
            least_sequence=0,
            now_s=0,
        )

    @classmethod
    def create(cls, path: Path, name: str, broker: str) -> FleetDirectory:
        """Make a fleet with fresh keys and an empty roster.

        Raises:
            ConfigError: there is one already, or the name or the address is not valid.
        """
        if (path / SECRETS_FILE).exists():
            raise ConfigError(
                f"{path} holds a fleet already", hint="its keys can't be made again: use another directory"
            )
        check_name(name, "fleet")
        BrokerAddress.parse(broker)
        private_directory(path)
        owner = Identity.generate(OWNER_NAME)
        owner.save(path / OWNER_FILE)
        secrets = FleetSecrets(
            name, broker, MaskSecret.generate().reveal(), os.urandom(KEY_BYTES), os.urandom(KEY_BYTES)
        )
        write_private(path / SECRETS_FILE, encode(secrets))
        write_private(path / ROSTER_FILE, sign_document(owner, Roster(name, 1, *_life(), None, (), ())))
        for sub in (GRANTS, RUNS):
            private_directory(path / sub)
        return cls(path)

    @property
    def name(self) -> str:
        """The fleet's name."""
        return self.secrets.fleet

    @property
    def fingerprint(self) -> str:
        """The owner's fingerprint, which everyone who joins compares."""
        return fingerprint(self.owner.member)

    @property
    def mask_secret(self) -> MaskSecret:
        """The secret from which every mask of the fleet is derived."""
        return MaskSecret.from_bytes(self.secrets.mask_secret)

    @property
    def content(self) -> GroupKey:
        """The key that devices and the owner share, and the aggregator does not have."""
        return GroupKey(self.name, "content", self.secrets.content_key)

    @property
    def roster_bytes(self) -> bytes:
        """The roster as signed."""
        return read_private(self.path / ROSTER_FILE)

    def add_device(self, card_bytes: bytes, expected_fingerprint: str = "") -> Path:
        """Add a device, or give a new grant to one that is listed; return the grant for it.

        Raises:
            UntrustedError: not a device's card, or not of the expected fingerprint.
            ConfigError: the name is taken by another device.
        """
        card = self._checked(card_bytes, DEVICE_ROLE, expected_fingerprint)
        if self.roster.aggregator is None:
            raise ConfigError(
                "the fleet has no aggregator yet, and a device must know whom to believe",
                hint="shoal-fleet add-aggregator first",
            )
        listed = next((d for d in self.roster.devices if d.name == card.member.name), None)
        if listed is None:
            self._sign(devices=(*self.roster.devices, card.member))
        elif listed != card.member or card.member.name in self.roster.revoked:
            raise ConfigError(
                f"the fleet has had another device called {card.member.name!r}",
                hint="init the device with another name",
            )
        s = self.secrets
        grant = DeviceGrant(
            s.fleet,
            self.owner.member.sign_key,
            s.broker,
            self.roster_bytes,
            s.broadcast_key,
            s.mask_secret,
            s.content_key,
        )
        return self._write_grant(card, grant)

    def add_aggregator(self, card_bytes: bytes, expected_fingerprint: str = "") -> Path:
        """Name the fleet's aggregator; return the grant for it.

        Raises:
            UntrustedError: not an aggregator's card, or not of the expected fingerprint.
            ConfigError: the fleet has another one.
        """
        card = self._checked(card_bytes, AGGREGATOR_ROLE, expected_fingerprint)
        if self.roster.aggregator is None:
            self._sign(aggregator=card.member)
        elif self.roster.aggregator != card.member:
            raise ConfigError(
                f"the fleet has an aggregator already ({fingerprint(self.roster.aggregator)})",
                hint="a fleet keeps one aggregator; make a new fleet to change it",
            )
        s = self.secrets
        grant = AggregatorGrant(s.fleet, self.owner.member.sign_key, s.broker, self.roster_bytes, s.broadcast_key)
        return self._write_grant(card, grant)

    def renew(self) -> None:
        """Sign the roster again for another year."""
        self._sign()

    def next_run(self) -> int:
        """Return the number of the next run."""
        return max((int(p.stem) for p in (self.path / RUNS).glob("*.run")), default=0) + 1

    def _checked(self, data: bytes, role: str, expected: str) -> Card:
        card = open_card(data)
        if card.role != role:
            raise UntrustedError(f"this card asks to be {card.role!r}, not {role!r}")
        if expected and fingerprint(card.member) != expected.strip().lower():
            raise UntrustedError(f"this card has fingerprint {fingerprint(card.member)}, not {expected}")
        return card

    def _sign(self, **changes: object) -> None:
        issued, expires = _life()
        self.roster = dataclasses.replace(
            self.roster,
            sequence=self.roster.sequence + 1,
            issued_at_s=issued,
            expires_at_s=expires,
            **changes,  # type: ignore[arg-type]
        )
        write_private(self.path / ROSTER_FILE, sign_document(self.owner, self.roster))

    def _write_grant(self, card: Card, grant: DeviceGrant | AggregatorGrant) -> Path:
        path = self.path / GRANTS / f"{card.member.name}.grant"
        write_private(path, seal_grant(self.owner, card, grant))
        return path


def _life() -> tuple[int, int]:
    now = int(time.time())
    return now, now + ROSTER_LIFE_S
