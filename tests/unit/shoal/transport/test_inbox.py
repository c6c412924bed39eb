"""Order, completeness and acknowledgements of the inbox."""

import signal
import threading
import time

import pytest

from shoal.transport.base import Connected, Disconnected, Message
from shoal.transport.inbox import ACKNOWLEDGE_AT, BATCH_EVENTS, Inbox


def drain(inbox, most=BATCH_EVENTS):
    """Return the items of each batch until the inbox is empty."""
    batches = []
    while batch := list(inbox.batch(0.01, most)):
        batches.append(batch)
    return batches


@pytest.mark.parametrize("kind", ["message", "callback", "connection", "stop"])
def test_long_backlog_comes_out_in_order(kind):
    """A backlog longer than a batch comes out whole and in order."""
    make = {
        "message": lambda i: Message("t", str(i).encode()),
        "callback": lambda i: lambda: i,
        "connection": lambda i: Disconnected(str(i)) if i % 2 else Connected(session_present=True),
        "stop": lambda _: None,
    }[kind]
    inbox, items = Inbox(), [make(i) for i in range(BACKLOG)]
    for item in items:
        inbox.put(item)
    batches = drain(inbox)
    assert [len(b) for b in batches] == [BATCH_EVENTS, BATCH_EVENTS, 3]
    assert [i for b in batches for i in b] == items


def test_acknowledged_after_handling():
    """A message is acknowledged after it was handled; an empty inbox returns after the wait."""
    inbox, log = Inbox(), []
    for i in range(3):
        inbox.put(Message("t", b"", acknowledge=lambda i=i: log.append(f"acknowledged {i}")))
    for number, _ in enumerate(inbox.batch(0.01)):
        log.append(f"handled {number}")
    assert log == [f"{what} {i}" for what in ("handled", "acknowledged") for i in range(3)]
    began = time.monotonic()
    assert list(inbox.batch(0.05)) == []
    assert time.monotonic() - began >= 0.05


def test_few_handled_wait_while_more_queue():
    """Few handled messages wait while more are queued."""
    inbox, acknowledged = Inbox(), []
    for i in range(3 * ACKNOWLEDGE_AT):
        inbox.put(Message("t", b"", acknowledge=lambda i=i: acknowledged.append(i)))
    for handled, _ in enumerate(inbox.batch(0.01)):
        assert handled - ACKNOWLEDGE_AT <= len(acknowledged) <= handled
    assert acknowledged == list(range(3 * ACKNOWLEDGE_AT))


BACKLOG = 2 * BATCH_EVENTS + 3


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
