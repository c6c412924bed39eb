"""The store at which the members of a process group find each other: their addresses, which travel in sealed messages.

torch.distributed's own store listens on a port, keeps what anyone writes to it, and lists it to anyone who asks. This one opens
no socket. A member's address goes over MQTT, signed and sealed, and nothing else gets into the store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch.distributed as dist

from shoal.errors import UntrustedError
from shoal.protocol.jobs import GroupAddress

JOIN_S: Final = 60.0
"""Longest time for all workers to join a new process group: a busy machine takes half of it to load torch."""
KEYS_PER_MEMBER: Final = 4
"""Most addresses that a group has for each member; Gloo writes one."""


class MeetingStore(dist.Store):  # type: ignore[name-defined, misc]
    """The addresses of one generation of a process group (`torch.distributed.Store`).

    Args:
        generation: of the group.
        members: number of its members.
        send: sends this member's own addresses to the others.
    """

    def __init__(self, generation: str, members: int, send: Callable[[GroupAddress], None]) -> None:
        super().__init__()
        self.generation = generation
        self._most = KEYS_PER_MEMBER * members
        self._send = send
        self._found: dict[str, bytes] = {}
        self._changed = threading.Condition()
        self._given_up = False

    def take(self, addresses: Sequence[GroupAddress]) -> None:
        """Take the addresses of other members; those of another generation are left out, and none is ever replaced.

        Raises:
            UntrustedError: they are more than a group has.
        """
        with self._changed:
            for address in addresses:
                if address.generation == self.generation:
                    if address.key not in self._found and len(self._found) == self._most:
                        raise UntrustedError(f"more than {self._most} addresses for one process group")
                    self._found.setdefault(address.key, address.value)
            self._changed.notify_all()

    def give_up(self) -> None:
        """End all waits: another generation has begun."""
        with self._changed:
            self._given_up = True
            self._changed.notify_all()

    def set(self, key: str, value: bytes) -> None:
        """Keep this member's own address, and send it to the others."""
        address = GroupAddress(self.generation, key, bytes(value))
        self.take([address])
        self._send(address)

    def get(self, key: str) -> bytes:
        """Return an address once it is here; raises as `wait`."""
        self.wait([key])
        return self._found[key]

    def wait(self, keys: Sequence[str], *_timeout: Any) -> None:
        """Wait until addresses are here.

        Raises:
            RuntimeError: one did not come within JOIN_S, or the group was given up.
        """
        with self._changed:
            self._changed.wait_for(lambda: self._given_up or self._holds(keys), JOIN_S)
            if not self._holds(keys):
                raise RuntimeError(f"no address of a member within {JOIN_S:g} s, or the group was given up")

    def _holds(self, keys: Sequence[str]) -> bool:
        return all(key in self._found for key in keys)
