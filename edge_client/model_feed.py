"""Which models a device receives: exactly those behind the topic labels that its part in the round calls for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from edge_client.inventory import Inventory
    from wire.topics import Topics
    from wire.transport import Transport

REFETCH_S: Final = 5.0
"""A device that has waited this long for a model subscribes anew: the broker then sends what it retains."""
WAITING_S: Final = 60.0
"""The same for one that waits for a mask epoch that may not have begun, which can take any time."""


class ModelFeed:
    """The subscriptions to models of one device.

    Attributes:
        labels: topic labels of what is received.
    """

    def __init__(self, transport: Transport, topics: Topics) -> None:
        self._transport = transport
        self._topics = topics
        self.labels: tuple[str, ...] = ()
        self._since_s = 0.0

    def follow(self, labels: tuple[str, ...], models: Inventory | None, now_s: float) -> None:
        """Receive what is behind ``labels`` and nothing else; what came behind others is dropped from ``models``."""
        for label in set(self.labels) - set(labels):
            self._transport.unsubscribe(f"{self._topics.model(label)}/#")
            if models is not None:
                models.drop(label)
        for label in labels:
            if label not in self.labels:
                self._transport.subscribe(f"{self._topics.model(label)}/#")
        self.labels, self._since_s = labels, now_s

    def overdue(self, now_s: float, patience_s: float) -> bool:
        """Whether something has been waited for longer than that, or so long again since this was last true."""
        if now_s - self._since_s <= patience_s:
            return False
        self._since_s = now_s
        return True
