"""The queue between a transport's network thread and the loop that handles its events.

Rules:

- Events are returned in the order in which they were put, each exactly once.
- A message is acknowledged to the broker after the loop has handled it, never before. A broker sends at most
  `limits.RECEIVE_MAXIMUM` messages ahead of the acknowledgements, so the queue stays short however slow the loop is.
- ``put`` may be called from any thread and from a signal handler.

Both daemons use it. The commands that wait for one answer (`shoal-edge enrol`, `shoal-fleet approve`) and the load bench have
plain queues: they need neither stop requests nor acknowledgement after handling.

Example::

    inbox = Inbox()
    transport = MqttTransport(url, "client", inbox.put, manual_ack=True)
    signal.signal(signal.SIGTERM, lambda *_: inbox.put(None))
    for event in inbox.batch(wait_s=0.25):
        if event is None:
            break
        handle(event)
"""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from typing import Final

from shoal.transport.base import Message, TransportEvent

BATCH_EVENTS: Final = 512
"""Most events between two passes of the loop's other work, such as commits and timers."""

ACKNOWLEDGE_AT: Final = 8
"""Handled messages that are acknowledged together while more are queued, since each batch wakes the network thread. Some
brokers send only one message ahead of the acknowledgements, so all are acknowledged once the queue is empty."""

Item = TransportEvent | Callable[[], None] | None
"""A transport's event, a callback for the loop's own thread, or None: a request to stop."""


class Inbox:
    """A first-in, first-out queue of transport events, callbacks and stop requests."""

    def __init__(self) -> None:
        # Not queue.Queue: its lock is not reentrant, and a signal handler may interrupt the thread that holds it.
        self._items: queue.SimpleQueue[Item] = queue.SimpleQueue()

    def put(self, item: Item) -> None:
        """Add an item; never blocks."""
        self._items.put(item)

    def batch(self, wait_s: float, most: int = BATCH_EVENTS) -> Iterator[Item]:
        """Yield at most ``most`` queued items, and wait at most ``wait_s`` seconds for the first.

        Handled messages are acknowledged when the queue is empty, and otherwise ACKNOWLEDGE_AT at a time. If the caller
        stops early, by an exception or otherwise, the message at hand is not acknowledged and the others stay queued.
        """
        handled: list[Message] = []
        try:
            for number in range(most):
                if len(handled) == ACKNOWLEDGE_AT:
                    _acknowledge(handled)
                try:
                    item = self._items.get(timeout=wait_s) if number == 0 else self._items.get_nowait()
                except queue.Empty:
                    return
                yield item
                # The caller has handled the item once it asks for the next one.
                if isinstance(item, Message):
                    handled.append(item)
        finally:
            _acknowledge(handled)


def _acknowledge(handled: list[Message]) -> None:
    for message in handled:
        message.acknowledge()
    handled.clear()
