"""Ask the aggregator on an MQTT connection that lasts for one command of `shoal-fleet`."""

from __future__ import annotations

import queue
import time
from typing import TYPE_CHECKING, Any, Final

from shoal.errors import BrokerUnreachableError, NotReadyError
from shoal.owner.broker.address import beside_client_id, owner_address
from shoal.owner.console.asking import Question
from shoal.transport.base import Connected, Disconnected
from shoal.transport.mqtt import MqttTransport

if TYPE_CHECKING:
    from collections.abc import Callable

    from shoal.owner.keys.directory import FleetDirectory
    from shoal.protocol.requests import RequestAction
    from shoal.transport.base import TransportEvent

POLL_S: Final = 0.05
TELL_S: Final = 2.0
"""Time to the first line of progress, and between two."""
ATTEMPTS: Final = 3
"""Most requests for one command: another console may overtake one."""
SILENT_HINT: Final = (
    "the aggregator is not running or has no connection to the broker: shoal-aggregator status DIR on its machine says which. If "
    "`shoal-fleet broker-config` of an earlier version made the access list, make it again. A request that arrives within 10 "
    "minutes is still carried out; sending it again is safe"
)


def ask(
    fleet: FleetDirectory, wait_s: float, tell: Callable[[str], None], action: RequestAction, **parts: Any
) -> tuple[bytes, int]:
    """Send a request and return the document of the answer, and its time in unix seconds by the aggregator's clock.

    Args:
        fleet: the owner's directory.
        wait_s: seconds to wait for the answer once the broker has the request.
        tell: called with lines of progress.
        action: of the request.
        parts: further arguments of `Question`.

    Raises:
        BrokerUnreachableError: no broker answers, it refuses the owner's user, or the connection was lost.
        NotReadyError: the aggregator does not answer.
        UsageError, UntrustedError, ConfigError, StorageError: as `Question.document`.
    """
    for attempt in range(ATTEMPTS):
        question = Question(fleet, action, **parts)
        _exchange(fleet, wait_s, tell, question)
        if not question.overtaken or attempt == ATTEMPTS - 1:
            break
    document = question.document()
    assert question.answer is not None, "without an answer there is no document"
    return document, question.answer.answered_at_s


def _exchange(fleet: FleetDirectory, wait_s: float, tell: Callable[[str], None], question: Question) -> None:
    """Send a request and wait for its answer.

    Raises:
        BrokerUnreachableError, NotReadyError: as `ask`.
    """
    inbox: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
    transport = MqttTransport(owner_address(fleet), beside_client_id(fleet.name), inbox.put, session_expiry_s=0)
    try:
        transport.start(require=True)
        question.send(transport)
        began_s = told_s = sent_s = online_s = time.monotonic()
        lost = ""
        while question.answer is None:
            now_s = time.monotonic()
            if not lost:
                online_s = now_s
            elif now_s - online_s >= wait_s:
                raise BrokerUnreachableError(
                    f"the connection to the broker was lost before the answer came: {lost}",
                    hint="run this again when the broker is back: a request that was carried out already changes nothing",
                )
            if lost or transport.pending():
                sent_s = now_s
            elif now_s - sent_s >= wait_s:
                raise NotReadyError(f"the aggregator did not answer within {wait_s:g} s", hint=SILENT_HINT)
            if now_s - told_s >= TELL_S:
                told_s = now_s
                tell(_progress(transport, now_s - began_s))
            try:
                event = inbox.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if isinstance(event, Disconnected):
                lost = event.reason
            elif isinstance(event, Connected) and lost:
                # In chunks that the broker takes by now. A request that was carried out changes nothing.
                lost = ""
                question.send(transport)
            question.on_event(event, time.monotonic())
    finally:
        transport.close()


def _progress(transport: MqttTransport, seconds: float) -> str:
    left = transport.pending()
    if left:
        return f"sending the request: {transport.bytes_sent / 1e6:.1f} MB sent, {left} parts left"
    return f"waiting for the aggregator's answer ({seconds:.0f} s)"
