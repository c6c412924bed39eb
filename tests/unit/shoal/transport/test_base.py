"""Checks of a publish before it is queued, and the defaults of a received message."""

import pytest
from shoal_lab.loopback.transport import LoopbackBroker, LoopbackTransport

from shoal import limits
from shoal.errors import WireError
from shoal.transport.base import PACKET_OVERHEAD_BYTES, Message, check_publish, packet_bytes
from tests.helpers.refusals import refused


def test_largest_publish_is_accepted():
    """One byte more is not, and a smaller limit of the broker's counts; an empty payload clears a retained message."""
    assert packet_bytes("ä", b"123") == 2 + 3 + PACKET_OVERHEAD_BYTES, "the topic counts"
    room = limits.MAX_PACKET_BYTES - PACKET_OVERHEAD_BYTES - 1
    for payload, limit in ((b"", limits.MAX_PACKET_BYTES), (bytes(room), limits.MAX_PACKET_BYTES), (bytes(83), 100)):
        check_publish("t", payload, limit)
    above = f"a publish of {limits.MAX_PACKET_BYTES + 1} bytes is above the limit"
    with refused(WireError, above, hint="in chunks"):
        check_publish("t", bytes(room + 1))
    with pytest.raises(WireError, match="a publish of 101 bytes is above the limit of 100"):
        check_publish("t", bytes(84), 100)


@pytest.mark.parametrize("topic", ["", "#", "a/#", "+", "a/+/b", "a\0b"])
def test_topic_unfit_for_the_broker(topic):
    """A broker ends the connection for such a publish, and it would be resent for ever."""
    with pytest.raises(WireError) as caught:
        check_publish(topic, b"x")
    assert str(caught.value) == f"{topic!r} is not a topic to publish on"


def test_compared_messages_print_no_payload():
    """Messages are compared without their acknowledgement and print no payload."""
    one, other = Message("t", b"secret", acknowledge=list), Message("t", b"secret")
    assert one == other
    assert one != Message("t", b"secret", retained=True)
    assert "secret" not in repr(one)


def test_new_subscription_brings_retained():
    """A new subscription brings the retained messages again."""
    broker, events = LoopbackBroker(), []
    transport = LoopbackTransport(broker, "a", events.append)
    transport.subscribe("t/#")
    transport.start()
    transport.publish("t/1", b"x", retain=True)
    broker.pump()
    events.clear()
    transport.subscribe("t/#")
    broker.pump()
    assert events == [Message("t/1", b"x", retained=True)]
    assert "t/#" in transport.filters
