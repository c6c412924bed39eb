"""Encryption of a file under a passphrase: Argon2id (RFC 9106) derives a key, AES-256-GCM encrypts.

Layout, little-endian: ``"SHP1" | memory KiB u32 | passes u32 | lanes u32 | salt 16 | nonce 12 | ciphertext``. The bytes before
the nonce and the file's purpose are associated data, so that one encrypted file can't replace another.
"""

from __future__ import annotations

import os
import struct
from typing import Final, NoReturn

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.argon2 import Argon2id

from shoal.errors import ConfigError, IntegrityError, UntrustedError

MAGIC: Final = b"SHP1"
MIN_CHARS: Final = 8
MEMORY_KIB: Final = 64 * 1024
PASSES: Final = 3
LANES: Final = 4
"""RFC 9106 section 4, the second recommended choice: 64 MiB, 3 passes, 4 lanes."""

SALT_BYTES: Final = 16
NONCE_BYTES: Final = 12
KEY_BYTES: Final = 32
_HEAD: Final = struct.Struct("<4sIII16s")
_MOST: Final = (1 << 20, 16, 16)
"""Most memory (1 GiB), passes and lanes; a file that asks for more is damaged or hostile."""


class Lock:
    """Encrypts and decrypts files with one passphrase; a key is derived once for each salt."""

    __slots__ = ("_keys", "_passphrase", "_salt")

    def __init__(self, passphrase: bytes) -> None:
        """Store the passphrase.

        Raises:
            ConfigError: the passphrase is shorter than MIN_CHARS bytes.
        """
        if len(passphrase) < MIN_CHARS:
            raise ConfigError(f"a passphrase has at least {MIN_CHARS} characters", hint="choose a longer one")
        self._passphrase = passphrase
        self._salt = os.urandom(SALT_BYTES)
        self._keys: dict[bytes, AESGCM] = {}

    def close(self, purpose: str, plain: bytes) -> bytes:
        """Return ``plain`` encrypted; ``purpose`` must be the same to open it."""
        head = _HEAD.pack(MAGIC, MEMORY_KIB, PASSES, LANES, self._salt)
        nonce = os.urandom(NONCE_BYTES)
        return head + nonce + self._cipher(head).encrypt(nonce, plain, head + purpose.encode())

    def open(self, purpose: str, data: bytes) -> bytes:
        """Return the plaintext of `close`. Files encrypted later use this file's salt, which spares a key derivation.

        Raises:
            UntrustedError: another passphrase, another purpose, or altered bytes.
            IntegrityError: the bytes are not an encrypted file.
        """
        head, nonce = data[: _HEAD.size], data[_HEAD.size : _HEAD.size + NONCE_BYTES]
        # 16 bytes is the tag of AES-GCM, which an empty plaintext has too.
        if not is_locked(data) or len(data) < _HEAD.size + NONCE_BYTES + 16:
            raise IntegrityError("not a file under a passphrase")
        _, *asked, salt = _HEAD.unpack(head)
        # Argon2 needs at least 8 KiB a lane; the upper bounds keep a damaged file from taking all memory.
        if not all(1 <= value <= most for value, most in zip(asked, _MOST, strict=True)) or asked[0] < 8 * asked[2]:
            raise IntegrityError("a file under a passphrase asks for impossible work")
        try:
            plain = self._cipher(head).decrypt(nonce, data[_HEAD.size + NONCE_BYTES :], head + purpose.encode())
        except InvalidTag as error:
            raise UntrustedError("the passphrase is wrong, or the file was altered") from error
        self._salt = salt
        return plain

    def _cipher(self, head: bytes) -> AESGCM:
        if head not in self._keys:
            _, memory, passes, lanes, salt = _HEAD.unpack(head)
            derivation = Argon2id(salt=salt, length=KEY_BYTES, iterations=passes, lanes=lanes, memory_cost=memory)
            self._keys[head] = AESGCM(derivation.derive(self._passphrase))
        return self._keys[head]

    def __repr__(self) -> str:
        return "Lock(<secret>)"

    def __reduce__(self) -> NoReturn:
        raise TypeError("a passphrase can't be pickled")


def is_locked(data: bytes) -> bool:
    """Return whether ``data`` begins like a file that `Lock.close` made."""
    return data.startswith(MAGIC)
