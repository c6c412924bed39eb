"""The notice to all devices: the owner's order for the run that is served, and the owner's choice of models.

It is one small retained message, published again when its contents or the broadcast key have changed, and after the broker was
away. A device that restarts finds it on the broker. Without a run or an order a notice says so, in place of an earlier one.

Example: the owner pauses run 2. The notice says PAUSED of run 2, until the owner resumes it or another run is served.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from aggregator.rounds.orders import Order
from crypto.seal.envelope import seal_message_to_group
from shoal.protocol import channels
from shoal.protocol.codec import encode
from shoal.protocol.messages import Notice, RunOrder
from shoal.protocol.topics import Topics
from shoal.transport.base import Connected, Disconnected
from shoal.transport.retained import RetainedPublisher

if TYPE_CHECKING:
    from aggregator.membership import AggregatorMembership
    from aggregator.storage.owner_orders import OwnerOrders
    from crypto.seal.envelope import GroupKey
    from shoal.protocol.documents import RunPlan
    from shoal.transport.base import Transport, TransportEvent

ORDERS: Final = {
    Order.GO: RunOrder.NONE,
    Order.PAUSE: RunOrder.PAUSED,
    Order.STOP: RunOrder.STOPPED,
    Order.STOP_NOW: RunOrder.STOPPED,
}
NO_RUN: Final = bytes(16)


class NoticeBoard:
    """Publishes the notice of one fleet.

    Args:
        membership: the aggregator's, with the broadcast key in use.
        transport: client of the broker.
        orders: the owner's orders, on disk.
        clock: returns unix seconds.
    """

    def __init__(
        self,
        membership: AggregatorMembership,
        transport: Transport,
        orders: OwnerOrders,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._membership, self._clock = membership, clock
        self._retained = RetainedPublisher(transport)
        self._topic = Topics(membership.fleet).notice
        self._orders = orders
        self._published: tuple[GroupKey, Notice] | None = None
        self._lost = False

    def on_event(self, event: TransportEvent) -> None:
        """Publish the notice again once the broker is back, which may have lost it."""
        if isinstance(event, Disconnected):
            self._lost = True
        elif isinstance(event, Connected) and self._lost:
            self._lost = False
            self._retained.republish()

    def keep_up(self, plan: RunPlan | None) -> None:
        """Publish the notice if it has changed.

        Args:
            plan: of the run that is served; None if none is.
        """
        order = Order.GO if plan is None else self._orders.of(plan.run_id)
        notice = Notice(
            fleet=self._membership.fleet,
            sequence=self._orders.accepted,
            sent_at_s=int(self._clock()),
            run=0 if plan is None else plan.run,
            run_id=NO_RUN if plan is None else plan.run_id,
            order=ORDERS[order],
            choice=self._orders.choice,
        )
        now = self._membership.group, notice
        if self._published is not None and _same(self._published, now):
            return
        head = channels.NOTICE.head(notice.fleet, self._membership.identity.name)
        sealed = seal_message_to_group(self._membership.identity, now[0], head, encode(notice))
        self._retained.publish(self._topic, sealed.payload, kind=channels.NOTICE.kind, name=sealed.transfer_id)
        self._published = now


def _same(before: tuple[GroupKey, Notice], now: tuple[GroupKey, Notice]) -> bool:
    """Return whether two notices say the same under one key; requests that only read change the number alone."""
    (old_key, old), (key, new) = before, now
    return old_key == key and (old.run_id, old.order, old.choice) == (new.run_id, new.order, new.choice)
