"""The transport's promises, held by both brokers: mosquitto (MQTT 5) and amqtt (3.1.1)."""

import hashlib
import os
import queue
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable

import pytest

from aggregator.shards.membership import witness
from crypto.seal.identity import Identity
from shoal import limits
from shoal.errors import UsageError, WireError
from shoal.protocol import chunking as frame
from shoal.protocol.reassembly import Reassembler
from shoal.transport.base import Message, TakenOver
from shoal.transport.local_broker import BrokerProcess
from tests.helpers.mqtt_clients import WAIT_S, Client, settle
from tests.helpers.trees import ROOT
from tests.helpers.waiting import until

pytestmark = pytest.mark.broker


def test_message_and_answer_are_prompt(shared: BrokerProcess, client: Callable[..., Client]) -> None:
    """A round trip works both ways, is counted, and pays for no Nagle delay (92 ms when TCP_NODELAY is missing)."""
    near, far = client(shared.url, "near", "rt/near"), client(shared.url, "far", "rt/far")
    settle(near, "rt/near")
    settle(far, "rt/far")
    sent, received = near.transport.bytes_sent, near.transport.bytes_received
    times = []
    for _ in range(20):
        began = time.perf_counter()
        near.transport.publish("rt/far", b"x" * 200)
        far.transport.publish("rt/near", far.message().payload)
        assert near.message() == Message("rt/near", b"x" * 200)
        times.append(time.perf_counter() - began)
    assert sorted(times)[10] < 0.04
    assert near.transport.bytes_sent - sent == near.transport.bytes_received - received == 20 * 200
    until(lambda: near.transport.pending() == 0)


def test_newest_common_version_is_spoken(shared: BrokerProcess, client: Callable[..., Client]) -> None:
    """The fall-back is silent, needs no configuration, and costs less than two seconds."""
    began = time.monotonic()
    one = client(shared.url, "versions")
    assert one.transport.protocol_version == ("5" if shared.kind == "mosquitto" else "3.1.1")
    assert time.monotonic() - began < 2.0


def test_late_subscriber_gets_retained(shared: BrokerProcess, client: Callable[..., Client]) -> None:
    """Retained messages arrive marked as such; an empty payload removes one."""
    writer = client(shared.url, "writer")
    writer.transport.publish("keep/a", b"kept", retain=True)
    writer.transport.publish("keep/b", b"gone", retain=True)
    writer.transport.publish("keep/b", b"", retain=True)
    until(lambda: writer.transport.pending() == 0)
    reader = client(shared.url, "reader", "keep/+")
    assert reader.message() == Message("keep/a", b"kept", retained=True)
    with pytest.raises(queue.Empty):
        reader.until(Message, 0.2)
    writer.transport.publish("keep/a", b"", retain=True)
    assert reader.message() == Message("keep/a", b"", retained=False)


def test_unsubscribed_topics_stay_silent(shared: BrokerProcess, client: Callable[..., Client]) -> None:
    """After unsubscribe only the other filter delivers."""
    one = client(shared.url, "picky", "un/a", "un/b")
    settle(one, "un/a")
    settle(one, "un/b")
    one.transport.unsubscribe("un/a")
    time.sleep(0.1)
    one.transport.publish("un/a", b"unwanted")
    one.transport.publish("un/b", b"wanted")
    assert one.message() == Message("un/b", b"wanted")


def test_five_megabytes_pass_in_chunks(shared: BrokerProcess, client: Callable[..., Client]) -> None:
    """A 5 MB transfer arrives whole through the window of a few publishes."""
    blob = os.urandom(5_000_000)
    reader, writer = client(shared.url, "big-reader", "big/up"), client(shared.url, "big-writer")
    settle(reader, "big/up")
    for chunk in frame.split(blob, kind=frame.ChunkKind.UPLOAD, round=3):
        writer.transport.publish("big/up", chunk)
    reassembler = Reassembler()
    transfer = None
    while transfer is None:
        transfer = reassembler.add("big-writer", reader.message().payload, 0.0)
    assert transfer.payload == blob
    assert (transfer.kind, transfer.round, transfer.transfer_id) == (frame.ChunkKind.UPLOAD, 3, frame.transfer_id(blob))
    assert transfer.signed == hashlib.sha256(blob[: -frame.TRAILER_BYTES]).digest()
    until(lambda: writer.transport.pending() == 0)


def test_what_is_sent_once_arrives_too(shared: BrokerProcess, client: Callable[..., Client]) -> None:
    """At QoS 0, before the one message that is acknowledged for all of them."""
    reader, writer = client(shared.url, "once-reader", "once"), client(shared.url, "once-writer")
    settle(reader, "once")
    for number in range(50):
        writer.transport.publish("once", b"%d" % number * 1000, qos=0 if number < 49 else 1)
    heard = [reader.message().payload for _ in range(50)]
    assert sorted(heard) == sorted(b"%d" % number * 1000 for number in range(50))
    until(lambda: writer.transport.pending() == 0)


def test_oversized_publish_is_refused(shared: BrokerProcess, client: Callable[..., Client]) -> None:
    """The refusal happens before the network, and the next publish works; the largest allowed packet passes."""
    one = client(shared.url, "sizes", "size")
    settle(one, "size")
    with pytest.raises(WireError, match="above the limit") as refused:
        one.transport.publish("size", bytes(limits.MAX_PACKET_BYTES))
    assert "poison" in refused.value.hint
    largest = bytes(limits.MAX_PACKET_BYTES - len("size") - 16)
    one.transport.publish("size", largest)
    assert one.message().payload == largest
    with pytest.raises(WireError, match="not a topic"):
        one.transport.publish("size/#", b"")


def test_full_queue_refuses(shared: BrokerProcess) -> None:
    """Offline publishes are bounded by bytes."""
    one = Client(shared.url, "bounded", max_queued_bytes=1000)
    one.transport.publish("b", bytes(900))
    with pytest.raises(WireError, match="already wait"):
        one.transport.publish("b", bytes(101))
    assert one.transport.pending() == 1
    one.transport.close()
    with pytest.raises(WireError, match="closed"):
        one.transport.publish("b", b"")


def test_early_publishes_arrive(shared: BrokerProcess, client: Callable[..., Client]) -> None:
    """A publish works offline and is delivered in order."""
    reader = client(shared.url, "early-reader", "early")
    settle(reader, "early")
    writer = client(shared.url, "early-writer", start=False)
    for number in range(100):
        writer.transport.publish("early", b"%d" % number)
    assert writer.transport.pending() == 100
    writer.transport.start()
    assert [int(reader.message().payload) for _ in range(100)] == list(range(100))
    with pytest.raises(UsageError):
        writer.transport.start()


def test_close_flushes_what_is_queued(shared: BrokerProcess, client: Callable[..., Client]) -> None:
    """Connect, publish and close at once: the message still arrives, and no will does."""
    reader = client(shared.url, "flush-reader", "flush/+")
    settle(reader, "flush/x")
    writer = client(shared.url, "flush-writer", start=False, will=("flush/will", b"died"))
    writer.transport.start()
    writer.transport.publish("flush/x", b"last words")
    writer.transport.close()
    assert reader.message() == Message("flush/x", b"last words")
    with pytest.raises(queue.Empty):
        reader.until(Message, 0.2)
    assert writer.transport.pending() == 0


def test_killed_process_leaves_its_will(shared: BrokerProcess, client: Callable[..., Client]) -> None:
    """The will of a client that dies by SIGKILL is published and retained."""
    reader = client(shared.url, "will-reader", "will/+")
    program = """
        import sys, threading
        from shoal.transport.mqtt import MqttTransport
        one = MqttTransport(sys.argv[1], "mortal", lambda event: None, will=("will/mortal", b"offline"))
        one.start(require=True)
        one.publish("will/mortal", b"online", retain=True)
        threading.Event().wait()
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program), shared.url], cwd=ROOT)
    try:
        assert reader.message() == Message("will/mortal", b"online")
    finally:
        child.kill()
        child.wait()
    assert reader.message() == Message("will/mortal", b"offline")
    late = client(shared.url, "will-late", "will/mortal")
    assert late.message() == Message("will/mortal", b"offline", retained=True)


@pytest.mark.parametrize("births", [(5, 9), pytest.param((9, 5), marks=pytest.mark.long)])
def test_later_start_of_one_id_ends(
    shared: BrokerProcess, client: Callable[..., Client], births: tuple[int, int]
) -> None:
    """It is their presences that tell, on a second connection; which of the two was here first does not matter."""
    if shared.kind == "amqtt":
        pytest.skip("amqtt 0.12.1 leaves both connections open: there is nothing to detect")
    topic, identity = f"twin/{births[0]}", Identity.generate("twin")
    twins = {
        birth: client(
            shared.url, f"twin-{births[0]}", topic, start=False, witness=witness(identity, "reef", topic, birth)
        )
        for birth in births
    }
    for birth in births:
        twins[birth].transport.start(require=True)
    later, earlier = twins[max(births)], twins[min(births)]
    later.until(TakenOver, 2 * WAIT_S)
    until(lambda: not later.transport._thread.is_alive())
    settle(earlier, topic)
