"""Faults of the loopback network, decided by rules and one seed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

from shoal_lab.loopback.transport import Hop, Passage

from shoal.errors import UsageError
from shoal.protocol.topics import matches


@dataclass(frozen=True, slots=True)
class FaultRule:
    """Faults of the messages that a rule matches; chances are between 0 and 1.

    Attributes:
        topic_filter: MQTT filter on the topic.
        client: the client at the end of the hop that is not the broker; None for any.
        hop: only this hop; None for both.
        drop: chance that the message is lost, although its sender counts it as acknowledged.
        duplicate: chance that it arrives twice.
        delay_s: bounds of a uniform delay in seconds.
        reorder: chance that it is held back by another uniform delay below ``reorder_s``, so that later ones overtake.
        reorder_s: longest such hold, in seconds.
    """

    topic_filter: str = "#"
    client: str | None = None
    hop: Hop | None = None
    drop: float = 0.0
    duplicate: float = 0.0
    delay_s: tuple[float, float] = (0.0, 0.0)
    reorder: float = 0.0
    reorder_s: float = 1.0

    def __post_init__(self) -> None:
        if not all(0.0 <= chance <= 1.0 for chance in (self.drop, self.duplicate, self.reorder)):
            raise UsageError("a chance in a fault rule is not between 0 and 1")
        if not 0.0 <= self.delay_s[0] <= self.delay_s[1] or self.reorder_s < 0.0:
            raise UsageError("a delay in a fault rule is negative or its bounds are swapped")

    def applies(self, passage: Passage) -> bool:
        """Tell whether this rule decides about ``passage``."""
        return (
            self.hop in (None, passage.hop)
            and self.client in (None, passage.client)
            and matches(self.topic_filter, passage.topic)
        )


class RuledFaults:
    """Faults by rules and one seeded random stream; the first rule that applies decides, no rule is a clean passage."""

    def __init__(self, rules: Sequence[FaultRule], *, seed: int) -> None:
        self._rules = tuple(rules)
        self._random = Random(seed)

    def __call__(self, passage: Passage) -> Sequence[float]:
        """Return the delay in seconds of every copy of the message that arrives."""
        for rule in self._rules:
            if rule.applies(passage):
                return self._fate(rule)
        return (0.0,)

    def _fate(self, rule: FaultRule) -> Sequence[float]:
        chance = self._random.random
        if chance() < rule.drop:
            return ()
        copies = 2 if chance() < rule.duplicate else 1
        return [self._delay(rule) for _ in range(copies)]

    def _delay(self, rule: FaultRule) -> float:
        delay = self._random.uniform(*rule.delay_s)
        if self._random.random() < rule.reorder:
            delay += self._random.uniform(0.0, rule.reorder_s)
        return delay
