"""Subscriptions to the means and checkpoints of a round: exactly those that the device's assignment needs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from shoal.protocol.topics import TopicKind

if TYPE_CHECKING:
    from edge_client.run.held_models import HeldModels
    from shoal.protocol.topics import Topics
    from shoal.transport.base import Transport


class ModelFeed:
    """The subscriptions of one device to means and checkpoints.

    Attributes:
        labels: the topic labels that it has subscribed to.
    """

    def __init__(self, transport: Transport, topics: Topics) -> None:
        self._transport = transport
        self._topics = topics
        self.labels: tuple[str, ...] = ()

    @property
    def bases(self) -> tuple[str, ...]:
        """The base topics of the labels."""
        return tuple(map(self._topics.model, self.labels))

    def follow(self, labels: tuple[str, ...], models: HeldModels | None) -> None:
        """Subscribe to ``labels`` and unsubscribe from all others, whose transfers are dropped from ``models``."""
        for label in set(self.labels) - set(labels):
            self._transport.unsubscribe(self._topics.filter(TopicKind.MODEL, label))
            if models is not None:
                models.drop(label)
        for label in labels:
            if label not in self.labels:
                self._transport.subscribe(self._topics.filter(TopicKind.MODEL, label))
        self.labels = labels
