"""Retained messages of brokers that send none to a filter with a wildcard, such as RabbitMQ 3.10.

MQTT has a broker send the retained messages of all topics that a filter matches. RabbitMQ sends only that of a topic which is
spelled out. A transport therefore requests a filter ``x/#`` that it asks for again as topics as well: ``x`` and ``x/0``, and
after each chunk ``x/i`` the next one. It stops once the broker has shown that it serves wildcards, by a retained message more
than these requests explain.

Example: a device restarts in the middle of a run and asks again for ``s/plan/#``. RabbitMQ answers ``s/plan/0`` alone, then
``s/plan/1``, which the transport requests next, and so on to the last chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

from shoal.protocol.topics import MAX_CHUNK_INDEX, chunk_topic

Request = tuple[str, bool]
"""A topic or filter, and whether to subscribe to it or to end the subscription."""


@dataclass(slots=True)
class _Asked:
    """A requested topic: the filter and the chunk that it stands for, and the requests that no retained message has answered."""

    topic_filter: str
    index: int
    unanswered: int = 0


class ExactTopics:
    """Decides which topics a client requests beside its filters. Not safe for several threads.

    Attributes:
        served: whether the broker has sent a retained message to a filter with a wildcard.
        needed: whether it has sent one to an exact topic, and none to a filter so far.
    """

    def __init__(self) -> None:
        self.served = self.needed = False
        self._asked: dict[str, _Asked] = {}
        self._spelled_out: set[str] = set()

    def requested(self, topic_filter: str, *, again: bool) -> list[Request]:
        """Return the requests to send beside a SUBSCRIBE for ``topic_filter``.

        Args:
            topic_filter: the filter; one that does not end with ``/#`` or has another wildcard needs none, or can have none.
            again: whether the client has subscribed to it before.
        """
        if not topic_filter.endswith("#") and "+" not in topic_filter:
            self._spelled_out.add(topic_filter)
        if self.served or not (again or self.needed) or not topic_filter.endswith("/#") or "+" in topic_filter:
            return []
        return [self._ask(topic_filter, -1), self._ask(topic_filter, 0)]

    def _ask(self, topic_filter: str, index: int) -> Request:
        base = topic_filter.removesuffix("/#")
        topic = base if index < 0 else chunk_topic(base, index)
        self._asked.setdefault(topic, _Asked(topic_filter, index)).unanswered += 1
        return topic, True

    def arrived(self, topic: str) -> list[Request]:
        """Return the requests to send after a retained message on ``topic``."""
        if self.served or topic in self._spelled_out:
            return []
        asked = self._asked.get(topic)
        if asked is None or not asked.unanswered:
            self.served, self.needed = True, False
            return self._dropped(list(self._asked))
        asked.unanswered -= 1
        self.needed = True
        return [self._ask(asked.topic_filter, asked.index + 1)] if 0 <= asked.index < MAX_CHUNK_INDEX else []

    def dropped(self, topic_filter: str) -> list[Request]:
        """Return the requests to send beside an UNSUBSCRIBE for ``topic_filter``."""
        return self._dropped([topic for topic, asked in self._asked.items() if asked.topic_filter == topic_filter])

    def _dropped(self, topics: list[str]) -> list[Request]:
        for topic in topics:
            del self._asked[topic]
        return [(topic, False) for topic in topics]
