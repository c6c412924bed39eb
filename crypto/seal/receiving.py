"""Private receiving keys of a device: X25519, each for one delivery of secrets, and erased once the delivery is stored.

Someone who steals the device later, and has recorded every message, opens none of the deliveries that it has stored. The
device holds several keys at a time, because two deliveries may wait for it before it can publish more.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NoReturn

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from shoal import limits
from shoal.errors import IntegrityError
from shoal.protocol.documents import ReceivingKeys
from shoal.util.files import read_private, write_private

KEY_FILE_MAGIC: Final = b"shoal-receiving-1\n"
KEY_BYTES: Final = 32
_FIRST: Final = struct.Struct("<I")


@dataclass(frozen=True, slots=True, repr=False)
class ReceivingSecrets:
    """The private halves of a device's receiving keys. Never printed or pickled; stored only in a file of mode 0600.

    Attributes:
        first: number of the first key; the others follow.
        raws: the keys as bytes, `limits.RECEIVING_KEYS` of them: few are ever used, and making a key takes time.
    """

    first: int
    raws: tuple[bytes, ...]

    @classmethod
    def generate(cls) -> ReceivingSecrets:
        """Return the first keys of a new device."""
        return cls(1, ()).after(0)

    @property
    def public(self) -> ReceivingKeys:
        """The public halves."""
        return ReceivingKeys(self.first, tuple(key.public_key().public_bytes_raw() for key in self.privates))

    @property
    def privates(self) -> tuple[X25519PrivateKey, ...]:
        """The keys."""
        return tuple(map(X25519PrivateKey.from_private_bytes, self.raws))

    def private(self, number: int) -> X25519PrivateKey | None:
        """Return the key with this number; None if it is erased or not made yet."""
        place = number - self.first
        return X25519PrivateKey.from_private_bytes(self.raws[place]) if 0 <= place < len(self.raws) else None

    def after(self, number: int) -> ReceivingSecrets:
        """Return the keys without number ``number`` and those before it, filled up with fresh ones."""
        first = max(self.first, number + 1)
        held = self.raws[first - self.first :]
        fresh = (X25519PrivateKey.generate().private_bytes_raw() for _ in range(limits.RECEIVING_KEYS - len(held)))
        return ReceivingSecrets(first, (*held, *fresh))

    def save(self, path: Path) -> None:
        """Replace the keys in ``path``, mode 0600, by these; durable before it returns."""
        write_private(path, KEY_FILE_MAGIC + _FIRST.pack(self.first) + b"".join(self.raws))

    @classmethod
    def load(cls, path: Path) -> ReceivingSecrets:
        """Read a file that `save` wrote.

        Raises:
            ConfigError: the file can't be read.
            IntegrityError: it does not hold receiving keys.
        """
        data = read_private(path)
        begin = len(KEY_FILE_MAGIC) + _FIRST.size
        if not data.startswith(KEY_FILE_MAGIC) or len(data) != begin + limits.RECEIVING_KEYS * KEY_BYTES:
            raise IntegrityError(
                f"{path} is damaged, or an earlier version of Shoal made it",
                hint="init or enrol a new directory under another name",
            )
        (first,) = _FIRST.unpack(data[len(KEY_FILE_MAGIC) : begin])
        raws = (data[at : at + KEY_BYTES] for at in range(begin, len(data), KEY_BYTES))
        return cls(first, tuple(raws))

    def __repr__(self) -> str:
        return f"ReceivingSecrets(first={self.first}, <secret>)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("private keys can't be pickled")
