"""Order, completeness and acknowledgements of the inbox."""

import signal
import threading

import pytest

from shoal.transport.base import Message
from shoal.transport.inbox import BATCH_EVENTS, Inbox


def drain(inbox, most=BATCH_EVENTS):
    """Return the items of each batch until the inbox is empty."""
    batches = []
    while batch := list(inbox.batch(0.01, most)):
        batches.append(batch)
    return batches


def test_last_queued_is_acknowledged_first():
    """Some brokers (amqtt) send the next message only after the acknowledgement of the one before."""
    inbox, sent = Inbox(), []

    def send():
        sent.append(len(sent))
        inbox.put(Message("t", b"", acknowledge=send if len(sent) < 20 else lambda: None))

    send()
    handled = 0
    while batch := list(inbox.batch(0.05)):
        handled += len(batch)
    assert handled == 20


def test_error_leaves_the_rest_queued():
    """An error leaves the message at hand unacknowledged and the rest queued."""
    inbox, acknowledged = Inbox(), []
    for i in range(3):
        inbox.put(Message("t", bytes([i]), acknowledge=lambda i=i: acknowledged.append(i)))

    def handle_all():
        for item in inbox.batch(0.01):
            if item.payload == b"\x01":
                raise ValueError("can't be handled")

    with pytest.raises(ValueError, match="can't be handled"):
        handle_all()
    assert acknowledged == [0]
    assert [m.payload for m in inbox.batch(0.01)] == [b"\x02"]


def test_signal_handler_may_put():
    """A signal handler may put while other threads do."""
    inbox, received = Inbox(), []
    previous = signal.signal(signal.SIGUSR1, lambda *_: inbox.put(None))
    try:
        writer = threading.Thread(target=lambda: [inbox.put(Message("t", b"")) for _ in range(2000)])
        writer.start()
        for _ in range(20):
            signal.raise_signal(signal.SIGUSR1)
            received += inbox.batch(0.01)
        writer.join()
        received += [item for batch in drain(inbox) for item in batch]
    finally:
        signal.signal(signal.SIGUSR1, previous)
    assert received.count(None) == 20
    assert len(received) == 2020
