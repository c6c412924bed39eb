"""The owner's one-time enrolment tokens: one private file each, which also records the device that used it."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from crypto.seal.identity import fingerprint
from shoal.errors import ConfigError, ShoalError, UntrustedError, UsageError
from shoal.membership.enrol_requests import token_id
from shoal.owner.keys.broker_users import ENROL_USER
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol.codec import U64, decode, encode, message
from shoal.protocol.enrolment import Token
from shoal.util.files import named, read_private, write_private

TOKENS: Final = "tokens"
TOKEN_SECRET_BYTES: Final = 16
FORGOTTEN_AFTER_S: Final = 7 * 24 * 3600
"""Expired tokens are removed after this time; a request with an unknown token is refused all the same."""

MAX_LIFE_S: Final = 30 * 24 * 3600
_UNITS: Final = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_ID: Final = re.compile(r"[0-9a-f]{16}")


@message(98)
@dataclass(frozen=True, slots=True)
class TokenFile:
    """A token file.

    Attributes:
        made_at_s: unix seconds; used_by: fingerprint of the device that it admitted, empty while unused.
    """

    token: Token
    made_at_s: U64
    used_by: str


class TokenStore:
    """The tokens of one fleet."""

    def __init__(self, fleet: FleetDirectory) -> None:
        self._fleet = fleet
        self._folder = fleet.path / TOKENS

    def issue(self, count: int, life_s: int, now_s: int) -> list[Token]:
        """Make and store ``count`` tokens, each of which admits one device within ``life_s`` seconds of ``now_s`` (unix seconds).

        Raises:
            ConfigError: the fleet has no aggregator yet; a token names its fingerprint.
        """
        with self._fleet.changing():
            aggregator = self._fleet.roster.aggregator
            if aggregator is None:
                raise ConfigError(
                    "the fleet has no aggregator yet, and devices pin its keys when they join",
                    hint="shoal-fleet add-aggregator first",
                )
            same = Token(
                fleet=self._fleet.name,
                broker=self._fleet.broker_for(ENROL_USER),
                broker_ca=self._fleet.broker_ca,
                owner=self._fleet.fingerprint,
                aggregator=fingerprint(aggregator),
                expires_at_s=now_s + life_s,
                secret=b"",
            )
            tokens = [replace(same, secret=os.urandom(TOKEN_SECRET_BYTES)) for _ in range(count)]
            for token in tokens:
                self._write(TokenFile(token, now_s, ""))
            return tokens

    def find(self, name: str) -> TokenFile:
        """Return the token with the id ``name``.

        Raises:
            UntrustedError: there is no such token.
            ConfigError, IntegrityError: its file can't be read, or is damaged.
        """
        path = self._path(name)
        # The name may be a stranger's: with other characters the path could lead out of the folder.
        if not _ID.fullmatch(name) or not path.exists():
            raise UntrustedError("a line that this owner did not issue, or that expired long ago")
        with named(path, "remove it, and give the device a new line: shoal-fleet invite"):
            return decode(read_private(path), TokenFile)

    def use(self, name: str, by: str) -> None:
        """Mark a token as used by the device with fingerprint ``by``; durable before it returns.

        Raises:
            UntrustedError: another device has used it.
        """
        file = self.find(name)
        if file.used_by not in ("", by):
            raise UntrustedError(f"the line was used before, by {file.used_by}")
        self._write(replace(file, used_by=by))

    def used_by(self, by: str) -> str:
        """Return the id of the token that the device with fingerprint ``by`` has used; empty if absent."""
        return next((name for name, file in self._all(lambda _: None) if file.used_by == by), "")

    def old(self, now_s: int, complain: Callable[[str], None]) -> list[str]:
        """Return the ids of tokens that expired more than FORGOTTEN_AFTER_S ago; ``complain`` gets damaged files."""
        return [name for name, f in self._all(complain) if now_s > f.token.expires_at_s + FORGOTTEN_AFTER_S]

    def forget(self, names: Iterable[str]) -> None:
        """Remove tokens; it is no error if another program has removed one already."""
        with self._fleet.changing():
            for name in names:
                self._path(name).unlink(missing_ok=True)

    def _all(self, complain: Callable[[str], None]) -> list[tuple[str, TokenFile]]:
        found = []
        for path in sorted(self._folder.glob("*.token")):
            try:
                found.append((path.stem, self.find(path.stem)))
            except ShoalError as error:
                complain(f"skipped {path.name}: {error}{f'; {error.hint}' if error.hint else ''}")
        return found

    def _path(self, name: str) -> Path:
        return self._folder / f"{name}.token"

    def _write(self, file: TokenFile) -> None:
        write_private(self._path(token_id(file.token.secret)), encode(file))


def seconds(text: str, most_s: int = MAX_LIFE_S) -> int:
    """Return the seconds of a duration: ``90s``, ``30m``, ``12h``, ``2d``.

    Raises:
        UsageError: ``text`` is no duration, or longer than ``most_s``.
    """
    found = re.fullmatch(r"([1-9][0-9]{0,6})([smhd])", text.strip())
    span = int(found[1]) * _UNITS[found[2]] if found else 0
    if not 0 < span <= most_s:
        raise UsageError(
            f"{text!r} is not a duration", hint=f"a number with s, m, h or d, at most {most_s // 86400}d: 30m"
        )
    return span
