"""Enrolment over the broker: the owner's one-line token, and the request that a device makes with it."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass, field
from typing import Final

from shoal.address import BrokerAddress
from shoal.digests import sha256
from shoal.errors import ConfigError, WireError
from shoal.protocol.codec import U64, Fixed16, LaterFields, decode, encode, message
from shoal.protocol.documents import Member, require_name

LINE_PREFIX: Final = "shoal1-"
CHECK_BYTES: Final = 4
MAX_LINE_CHARS: Final = 4096
MAX_CA_BYTES: Final = 2048
"""Largest certificate in a line: that of a CA with keys on a curve has 500 bytes, with RSA of 4096 bits 1,400."""
MAX_REASON_BYTES: Final = 512
"""Longest text in a refusal: two of them fit one chunk."""
_HINT: Final = "copy the whole line that `shoal-fleet invite` printed"


@message(20)
@dataclass(frozen=True, slots=True)
class EnrolRequest:
    """A new device's request: the identity that it claims, and a group envelope under the token's key.

    Attributes:
        member: the claimed identity.
        sealed: 32 bytes of HMAC, then an `EnrolStatement`.
    """

    member: Member
    sealed: bytes


@message(21)
@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolStatement:
    """The bytes under the token's HMAC, which bind a request to one device, owner, fleet and token.

    Attributes:
        owner, aggregator: the fingerprints that the device has pinned.
        token: the token's id; expires_at_s: unix seconds, from the line.
        asked_at_s: unix seconds by the device's clock; only displayed.
        card: the device's signed Card.
    """

    fleet: str
    owner: str
    aggregator: str
    token: str
    expires_at_s: U64
    asked_at_s: U64
    card: bytes
    later: LaterFields = ()

    def __post_init__(self) -> None:
        require_name(self.fleet, "fleet name")


@message(151)
@dataclass(frozen=True, slots=True, kw_only=True)
class EnrolRefusal:
    """The owner's refusal of a request, in clear: the new device has no key to open it with.

    Attributes:
        owner: who signs it; the line has the fingerprint.
        token: the token's id; device: fingerprint of the keys that asked.
        reason, hint: for people, at most MAX_REASON_BYTES each.
    """

    owner: Member
    fleet: str
    token: str
    device: str
    reason: str
    hint: str
    later: LaterFields = ()

    def __post_init__(self) -> None:
        require_name(self.fleet, "fleet name")
        if max(len(self.reason.encode()), len(self.hint.encode())) > MAX_REASON_BYTES:
            raise WireError(f"a refusal with a text of over {MAX_REASON_BYTES} bytes")


@message(22)
@dataclass(frozen=True, slots=True, kw_only=True)
class Token:
    """An enrolment token: the broker's URL, the fingerprints to trust, and a secret for one device.

    Attributes:
        broker: URL, with the user and password of new devices if the broker requires them.
        broker_ca: the certificate, DER, of the CA that the broker's is to have; empty for those of the system.
        owner, aggregator: fingerprints.
        expires_at_s: unix seconds by the owner's clock.
        secret: 16 random bytes.
    """

    fleet: str
    broker: str = field(repr=False)
    broker_ca: bytes = field(default=b"", repr=False)
    owner: str
    aggregator: str
    expires_at_s: U64
    secret: Fixed16 = field(repr=False)

    def __post_init__(self) -> None:
        require_name(self.fleet, "fleet name")
        if len(self.broker_ca) > MAX_CA_BYTES:
            raise WireError(f"a CA's certificate of {len(self.broker_ca)} bytes, over {MAX_CA_BYTES}")
        # A WireError like that of any other bad field, since `decode` runs this on received bytes.
        try:
            BrokerAddress.parse(self.broker)
        except ConfigError as error:
            raise WireError(str(error)) from error

    def to_line(self) -> str:
        """Return the line: one word, with a checksum against incomplete copies."""
        data = encode(self)
        return LINE_PREFIX + base64.urlsafe_b64encode(data + _check(data)).decode().rstrip("=")

    @classmethod
    def from_line(cls, line: str) -> Token:
        """Parse a line of `to_line`.

        Raises:
            ConfigError: it is not such a line, or incomplete. The message does not repeat the line, which is a secret.
        """
        text = line.strip()
        if len(text.split()) > 1:
            raise ConfigError(
                f"{len(text.split())} words where one enrolment line belongs",
                hint=f"{_HINT}; a file of several lines is divided, one for each device",
            )
        if not text.startswith(LINE_PREFIX):
            raise ConfigError("this is no enrolment line", hint=_HINT)
        if len(text) > MAX_LINE_CHARS:
            raise ConfigError(f"the enrolment line is longer than {MAX_LINE_CHARS} characters", hint=_HINT)
        body = text.removeprefix(LINE_PREFIX)
        try:
            data = base64.b64decode(body + "=" * (-len(body) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError) as error:
            raise ConfigError("the enrolment line holds characters that do not belong", hint=_HINT) from error
        if len(data) <= CHECK_BYTES or data[-CHECK_BYTES:] != _check(data[:-CHECK_BYTES]):
            raise ConfigError("the enrolment line is damaged or cut off", hint=_HINT)
        try:
            return decode(data[:-CHECK_BYTES], cls)
        except WireError as error:
            raise ConfigError(f"the enrolment line can't be read: {error}", hint=_HINT) from error


def _check(data: bytes) -> bytes:
    return sha256(data)[:CHECK_BYTES]
