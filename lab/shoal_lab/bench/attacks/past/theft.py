"""Theft of a device: all strings of 32 bytes in its files and memory, its private keys, and its derived masks."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Final

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from crypto.mask.derivation import MaskKey
from crypto.mask.kdf import SECRET_BYTES
from crypto.seal.identity import Identity
from crypto.seal.receiving import ReceivingSecrets
from edge_client.runtime import DeviceRuntime
from shoal.membership.directory import KEY_FILE, RECEIVING_FILE
from shoal.simulation.loopback_fleet import LoopbackFleet
from shoal.transport.loopback import LoopbackBroker, LoopbackTransport

LARGEST_FILE: Final = 1000
"""Bytes of the largest file that is searched at every offset: larger ones hold sealed bytes, vectors, or receiving keys."""
PUBLIC: Final = ("roster.*", "*.card", "status.json")
OUTSIDE: Final = (ModuleType, type, LoopbackFleet, LoopbackBroker, LoopbackTransport)
"""Objects of this process that are no part of the device's memory, and lead out of it."""


@dataclass(frozen=True, slots=True, repr=False)
class Loot:
    """The secrets taken from one device.

    Attributes:
        identity: the device's keys.
        secrets: strings of 32 bytes, each of which may be a secret of any kind.
        privates: keys that may open grants.
        masks: derived masks in its memory.
    """

    identity: Identity
    secrets: frozenset[bytes]
    privates: tuple[X25519PrivateKey, ...]
    masks: tuple[MaskKey, ...] = field(default=())

    def __or__(self, other: Loot) -> Loot:
        """Return the secrets taken from one device at two times."""
        return Loot(
            self.identity,
            self.secrets | other.secrets,
            (*self.privates, *other.privates),
            (*self.masks, *other.masks),
        )


def steal(directory: Path, runtime: DeviceRuntime | None = None) -> Loot:
    """Return the secrets in a device's directory and, if it is running, in its memory."""
    identity = Identity.load(directory / KEY_FILE)
    receiving = ReceivingSecrets.load(directory / RECEIVING_FILE)
    secrets, masks = set(_in_files(directory)), []
    for thing in _in_memory(runtime) if runtime is not None else ():
        if isinstance(thing, MaskKey):
            masks.append(thing)
        else:
            secrets.add(bytes(thing))
    return Loot(identity, frozenset(secrets), (identity.seal_private, *receiving.privates), tuple(masks))


def _in_files(directory: Path) -> Iterator[bytes]:
    for path in directory.rglob("*"):
        if path.is_file() and not any(path.match(pattern) for pattern in PUBLIC):
            data = path.read_bytes()
            if len(data) <= LARGEST_FILE:
                yield from (data[at : at + SECRET_BYTES] for at in range(len(data) - SECRET_BYTES + 1))


def _in_memory(root: object) -> Iterator[bytes | MaskKey]:
    """Return the derived masks and the strings of 32 bytes among the objects that ``root`` leads to."""
    seen, stack = set[int](), [root]
    while stack:
        thing = stack.pop()
        if id(thing) in seen or isinstance(thing, OUTSIDE):
            continue
        seen.add(id(thing))
        if isinstance(thing, bytes):
            if len(thing) == SECRET_BYTES:
                yield thing
        elif isinstance(thing, FunctionType):
            # Not its globals, through which everything in this process can be reached.
            stack += [cell.cell_contents for cell in thing.__closure__ or ()]
        else:
            if isinstance(thing, MaskKey):
                yield thing
            stack += gc.get_referents(thing)
