"""Finds another program that uses our identity, such as one that serves a copy of our directory.

A broker ends the connection of a client when another one connects with its id, and mosquitto does so without a word. So do bad
links. After some short connections, a program therefore opens a second one, under an id that no other has, where it tells its
start (``birth``) on the topic of its own presence and hears those of others. Whoever hears of a later start names it, and the
later program ends once it was named `NAMED` times. Only presences count that we signed, and that come as they are published: a
retained one, a will, or the presence of an earlier start shows no program that runs now.

Example: the programs of births 5 and 9 throw each other out. 5 hears 9 and publishes a presence with the rival 9; 9 hears that,
and tells its birth again; after the third time it ends, and 5 goes on.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final, NamedTuple

from shoal.errors import ShoalError
from shoal.transport.base import Connected, Message, Transport, TransportEvent

_log = logging.getLogger(__name__)

WATCH_S: Final = 60.0
"""Time for which the second connection stays; the presences that name a program have to come within it."""

NAMED: Final = 3
"""Presences that name the same later start, after which that program ends."""


class Witness(NamedTuple):
    """Speaks for one start of a program.

    Attributes:
        topic: of its presence.
        birth: number of this start, which grows with every start.
        presence: returns the presence of this start, which names a later one that uses its identity; 0 for none.
        read: returns birth and rival of a presence, or None for an offline one; raises a ShoalError if we have not signed it.
    """

    topic: str
    birth: int
    presence: Callable[[int], bytes]
    read: Callable[[bytes], tuple[int, int] | None]


class RivalWatch:
    """What one such connection hears and says, for `WATCH_S`.

    Args:
        witness: of this program.
        give_way: called if a program that began earlier has our identity.
    """

    def __init__(self, witness: Witness, give_way: Callable[[], None]) -> None:
        self._witness = witness
        self._give_way = give_way
        self._until_s = time.monotonic() + WATCH_S
        self._named = 0
        self._rival = 0
        self._publish: Callable[[str, bytes], None]

    def follow(self, transport: Transport) -> None:
        """Take a client with an id of its own, whose events go to `on_event`; it is not started."""
        self._publish = transport.publish
        transport.subscribe(self._witness.topic)

    @property
    def over(self) -> bool:
        """Whether the time of this watch is over."""
        return time.monotonic() > self._until_s

    def on_event(self, event: TransportEvent) -> None:
        """Handle an event of the second connection."""
        if isinstance(event, Connected):
            self._tell(0)
        elif isinstance(event, Message) and event.payload and not event.retained:
            try:
                told = self._witness.read(event.payload)
            except ShoalError as error:
                _log.debug("not our presence: %s", error)
            else:
                self._hear(*(told or (self._witness.birth, 0)))

    def _hear(self, birth: int, rival: int) -> None:
        own = self._witness.birth
        if birth > own:
            if birth != self._rival:
                _log.warning("another program uses the identity of this one, and is told to end: it began later")
            self._rival = birth
            self._tell(birth)
        elif birth < own:
            # Told again to one that has come since; it may also be an earlier start of ours, heard late.
            self._named += rival == own
            if self._named >= NAMED:
                self._give_way()
            else:
                self._tell(0)

    def _tell(self, rival: int) -> None:
        self._publish(self._witness.topic, self._witness.presence(rival))
