"""The transport's promises, held by both brokers: mosquitto (MQTT 5) and amqtt (3.1.1)."""

import hashlib
import os
import queue
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from wire import frame, limits
from wire.address import BrokerAddress
from wire.broker import BrokerProcess, choose_kind, find_mosquitto, free_port, start_broker
from wire.errors import BrokerUnreachableError, ConfigError, UsageError, WireError
from wire.mqtt import MqttTransport
from wire.reassembly import Reassembler
from wire.transport import Connected, Disconnected, Message, TakenOver, TransportEvent

pytestmark = pytest.mark.broker

BROKERS = [
    pytest.param("mosquitto", marks=pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")),
    "amqtt",
]
WAIT_S = 10.0


class Client:
    """A transport with its events in a queue."""

    def __init__(self, url: str | BrokerAddress, name: str, **options: object) -> None:
        self.events: queue.Queue[TransportEvent] = queue.Queue()
        self.transport = MqttTransport(
            url,
            name,
            self.events.put,
            reconnect_min_s=0.05,
            reconnect_max_s=0.3,
            **options,  # type: ignore[arg-type]
        )

    def until(self, kind: type[TransportEvent], wait_s: float = WAIT_S) -> TransportEvent:
        """Return the next event of ``kind``, passing over others."""
        end = time.monotonic() + wait_s
        while True:
            event = self.events.get(timeout=max(0.0, end - time.monotonic()))
            if isinstance(event, kind):
                return event

    def message(self) -> Message:
        event = self.until(Message)
        assert isinstance(event, Message)
        return event


def wait_for(condition: Callable[[], bool], wait_s: float = WAIT_S) -> None:
    end = time.monotonic() + wait_s
    while not condition():
        assert time.monotonic() < end, "the condition did not come true in time"
        time.sleep(0.005)


@pytest.fixture(scope="module", params=BROKERS)
def shared(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerProcess]:
    """One broker of each kind for the tests that leave it running."""
    with start_broker(request.param, tmp_path_factory.mktemp(request.param)) as broker:
        yield broker


@pytest.fixture(params=BROKERS)
def own(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[BrokerProcess]:
    """A broker that the test may stop."""
    with start_broker(request.param, tmp_path) as broker:
        yield broker


@pytest.fixture
def client() -> Iterator[Callable[..., Client]]:
    """A factory of started clients that are closed after the test."""
    made: list[Client] = []

    def make(url: str | BrokerAddress, name: str, *filters: str, start: bool = True, **options: object) -> Client:
        one = Client(url, name, **options)
        made.append(one)
        for topic_filter in filters:
            one.transport.subscribe(topic_filter)
        if start:
            one.transport.start(require=True)
            one.until(Connected)
        return one

    yield make
    for one in made:
        one.transport.close()


def settle(one: Client, topic: str) -> None:
    """Return when the broker has taken ``one``'s subscriptions: it must match ``topic``."""
    for _ in range(50):
        one.transport.publish(topic, b"settled?")
        try:
            while one.until(Message, 0.1) != Message(topic, b"settled?"):
                pass
        except queue.Empty:
            continue
        wait_for(lambda: one.transport.pending() == 0)
        while not one.events.empty():
            one.events.get()
        return
    pytest.fail("the subscription does not work")


def test_a_message_and_its_answer_arrive_promptly(shared: BrokerProcess, client: Callable[..., Client]) -> None:
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
    wait_for(lambda: near.transport.pending() == 0)


def test_mqtt_5_where_the_broker_speaks_it_and_3_1_1_where_not(
    shared: BrokerProcess, client: Callable[..., Client]
) -> None:
    """The fall-back is silent, needs no configuration, and costs less than two seconds."""
    began = time.monotonic()
    one = client(shared.url, "versions")
    assert one.transport.protocol_version == ("5" if shared.kind == "mosquitto" else "3.1.1")
    assert time.monotonic() - began < 2.0


def test_a_late_subscriber_gets_what_is_retained_and_not_what_was_cleared(
    shared: BrokerProcess, client: Callable[..., Client]
) -> None:
    """Retained messages arrive marked as such; an empty payload removes one."""
    writer = client(shared.url, "writer")
    writer.transport.publish("keep/a", b"kept", retain=True)
    writer.transport.publish("keep/b", b"gone", retain=True)
    writer.transport.publish("keep/b", b"", retain=True)
    wait_for(lambda: writer.transport.pending() == 0)
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
    wait_for(lambda: writer.transport.pending() == 0)


def test_an_oversized_publish_is_refused_and_harms_nothing(
    shared: BrokerProcess, client: Callable[..., Client]
) -> None:
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


def test_a_full_queue_refuses_instead_of_growing(shared: BrokerProcess) -> None:
    """Offline publishes are bounded by bytes."""
    one = Client(shared.url, "bounded", max_queued_bytes=1000)
    one.transport.publish("b", bytes(900))
    with pytest.raises(WireError, match="already wait"):
        one.transport.publish("b", bytes(101))
    assert one.transport.pending() == 1
    one.transport.close()
    with pytest.raises(WireError, match="closed"):
        one.transport.publish("b", b"")


def test_publishes_before_the_connection_arrive_after_it(shared: BrokerProcess, client: Callable[..., Client]) -> None:
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


def test_a_killed_process_leaves_its_will_retained(
    shared: BrokerProcess, client: Callable[..., Client], repository: Path
) -> None:
    """The will of a client that dies by SIGKILL is published and retained."""
    reader = client(shared.url, "will-reader", "will/+")
    program = """
        import sys, threading
        from wire.mqtt import MqttTransport
        one = MqttTransport(sys.argv[1], "mortal", lambda event: None, will=("will/mortal", b"offline"))
        one.start(require=True)
        one.publish("will/mortal", b"online", retain=True)
        threading.Event().wait()
    """
    child = subprocess.Popen([sys.executable, "-c", textwrap.dedent(program), shared.url], cwd=repository)
    try:
        assert reader.message() == Message("will/mortal", b"online")
    finally:
        child.kill()
        child.wait()
    assert reader.message() == Message("will/mortal", b"offline")
    late = client(shared.url, "will-late", "will/mortal")
    assert late.message() == Message("will/mortal", b"offline", retained=True)


def test_a_client_id_used_twice_ends_in_one_takeover(shared: BrokerProcess, client: Callable[..., Client]) -> None:
    """One of two clients with the same id stops and says so; the other one keeps working."""
    if shared.kind == "amqtt":
        pytest.skip("amqtt 0.12.1 leaves both connections open: there is nothing to detect")
    first = client(shared.url, "twin", "twin/a")
    second = client(shared.url, "twin", "twin/a", start=False)
    second.transport.start()
    stopped = None
    end = time.monotonic() + WAIT_S
    while stopped is None:
        assert time.monotonic() < end, "the two clients throw each other out for ever"
        for one in (first, second):
            while stopped is None and not one.events.empty():
                stopped = one if isinstance(one.events.get(), TakenOver) else None
        time.sleep(0.01)
    left = second if stopped is first else first
    settle(left, "twin/a")
    wait_for(lambda: is_closed(stopped.transport))


def is_closed(transport: MqttTransport) -> bool:
    try:
        transport.publish("twin/a", b"")
    except WireError:
        return True
    return False


def test_subscriptions_survive_a_broker_restart(own: BrokerProcess, client: Callable[..., Client]) -> None:
    """After a restart both sides reconnect on their own and the subscription works again."""
    reader, writer = client(own.url, "re-reader", "re"), client(own.url, "re-writer")
    settle(reader, "re")
    own.restart()
    for one in (reader, writer):
        one.until(Disconnected)
        one.until(Connected)
    settle(reader, "re")
    writer.transport.publish("re", b"after")
    assert reader.message() == Message("re", b"after")


def test_a_publish_while_the_broker_is_down_arrives_when_it_is_back(
    own: BrokerProcess, client: Callable[..., Client]
) -> None:
    """A broker killed and started again gets what was published meanwhile."""
    writer = client(own.url, "down-writer")
    own.kill()
    writer.until(Disconnected)
    writer.transport.publish("down", b"patient", retain=True)
    assert writer.transport.pending() == 1
    own.start()
    wait_for(lambda: writer.transport.pending() == 0)
    assert client(own.url, "down-reader", "down").message() == Message("down", b"patient", retained=True)


def test_a_broker_that_comes_later_is_found(tmp_path: Path, client: Callable[..., Client]) -> None:
    """Without ``require`` the transport keeps trying from the start."""
    port = free_port()
    early = client(f"mqtt://127.0.0.1:{port}", "early-bird", start=False)
    early.transport.start()
    time.sleep(0.1)
    with start_broker("auto", tmp_path, port):
        assert early.until(Connected) == Connected(session_present=False)


def test_mosquitto_keeps_retained_messages_over_a_restart(tmp_path: Path, client: Callable[..., Client]) -> None:
    """Persistence lies in the broker's directory."""
    if find_mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    with start_broker("mosquitto", tmp_path) as broker:
        writer = client(broker.url, "p-writer")
        writer.transport.publish("persist", b"kept", retain=True)
        wait_for(lambda: writer.transport.pending() == 0)
        writer.transport.close()
        broker.restart()
        assert client(broker.url, "p-reader", "persist").message() == Message("persist", b"kept", retained=True)


def test_no_broker_is_an_error_with_a_hint_and_without_the_password(client: Callable[..., Client]) -> None:
    """``require`` fails fast where nothing listens."""
    began = time.monotonic()
    with pytest.raises(BrokerUnreachableError) as failed:
        client(f"mqtt://me:secret-word@127.0.0.1:{free_port()}", "nobody")
    assert time.monotonic() - began < 3.0
    assert "secret-word" not in str(failed.value) + failed.value.hint
    assert "127.0.0.1" in str(failed.value)
    assert failed.value.hint


@pytest.mark.filterwarnings("ignore:.*ssl.SSLSocket:pytest.PytestUnraisableExceptionWarning")
def test_tls_with_client_certificates(tmp_path: Path, client: Callable[..., Client]) -> None:
    """A broker that demands certificates accepts ours; ours refuses a broker that another authority signed.

    The filter: paho 2.2 leaves the socket of a failed handshake to the garbage collector.
    """
    if find_mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    authority, stranger = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
    authority.issue("server", server=True)
    authority.issue("device")
    port = free_port()
    config = tmp_path / "tls.conf"
    config.write_text(
        f"listener {port} 127.0.0.1\ncafile {authority.file}\ncertfile {tmp_path}/server.pem\n"
        f"keyfile {tmp_path}/server.key\nrequire_certificate true\nuse_identity_as_username true\nuser root\n"
    )
    with (tmp_path / "tls.log").open("wb") as log:
        broker = subprocess.Popen([str(find_mosquitto()), "-c", str(config)], stderr=log, stdout=log)
    try:
        ours = {"cert_file": tmp_path / "device.pem", "key_file": tmp_path / "device.key"}
        url = f"mqtts://localhost:{port}"
        good = client(BrokerAddress.parse(url, ca_file=authority.file, **ours), "tls", "tls", start=False)
        good.transport.start()
        good.until(Connected)
        settle(good, "tls")
        good.transport.publish("tls", bytes(500_000))
        assert len(good.message().payload) == 500_000
        with pytest.raises(BrokerUnreachableError, match=r"(?i)certificate"):
            client(BrokerAddress.parse(url, ca_file=stranger.file, **ours), "tls-2")
    finally:
        broker.terminate()
        broker.wait()


def test_a_broker_dies_with_the_process_that_started_it(tmp_path: Path, repository: Path) -> None:
    """Neither broker outlives a parent that was killed by SIGKILL."""
    program = """
        import pathlib, sys, time
        from wire.broker import choose_kind, find_mosquitto, start_broker
        kinds = ["amqtt"] + ["mosquitto"] * (find_mosquitto() is not None)
        brokers = [start_broker(kind, pathlib.Path(sys.argv[1]) / kind) for kind in kinds]
        print(*(broker.pid for broker in brokers), flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        cwd=repository,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert pids
    assert all(is_running(pid) for pid in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    wait_for(lambda: not any(is_running(pid) for pid in pids))


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_taken_port_is_said_at_once(shared: BrokerProcess, tmp_path: Path) -> None:
    """Starting on a port where something listens fails with a hint."""
    with pytest.raises(BrokerUnreachableError, match="in use") as failed:
        start_broker(shared.kind, tmp_path, shared.port)
    assert failed.value.hint


def test_a_broker_that_can_not_start_shows_the_end_of_its_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error carries what the broker complained about."""
    monkeypatch.setattr(sys, "executable", "/bin/ls")
    with pytest.raises(BrokerUnreachableError, match=r"amqtt ended with status 2 .*ls") as failed:
        start_broker("amqtt", tmp_path)
    assert "amqtt.log" in failed.value.hint


def test_an_unknown_broker_is_a_configuration_error() -> None:
    """The hint names the choices."""
    with pytest.raises(ConfigError) as failed:
        choose_kind("hivemq")
    assert "mosquitto" in failed.value.hint


@pytest.fixture
def repository() -> Path:
    return Path(__file__).parents[2]


class Authority:
    """A certificate authority for one test."""

    def __init__(self, folder: Path, name: str) -> None:
        from cryptography.hazmat.primitives.asymmetric import ec

        self._folder = folder
        self._key = ec.generate_private_key(ec.SECP256R1())
        self._name = name
        self.file = folder / f"{name}-ca.pem"
        self._write(self.file, self._certificate(name, self._key.public_key(), ca=True))

    def issue(self, name: str, *, server: bool = False) -> None:
        """Write ``name``.pem and ``name``.key; a server's certificate is for localhost."""
        from cryptography.hazmat.primitives import serialization as form
        from cryptography.hazmat.primitives.asymmetric import ec

        key = ec.generate_private_key(ec.SECP256R1())
        certificate = self._certificate("localhost" if server else name, key.public_key(), ca=False, server=server)
        self._write(self._folder / f"{name}.pem", certificate)
        pem = key.private_bytes(form.Encoding.PEM, form.PrivateFormat.PKCS8, form.NoEncryption())
        (self._folder / f"{name}.key").write_bytes(pem)

    def _write(self, file: Path, certificate: object) -> None:
        from cryptography.hazmat.primitives import serialization as form

        file.write_bytes(certificate.public_bytes(form.Encoding.PEM))  # type: ignore[attr-defined]

    def _certificate(self, name: str, public: object, *, ca: bool, server: bool = False) -> object:
        import datetime

        from cryptography import x509
        from cryptography.hazmat.primitives import hashes
        from cryptography.x509.oid import NameOID

        now = datetime.datetime.now(datetime.UTC)
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, self._name)]))
            .public_key(public)  # type: ignore[arg-type]
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - datetime.timedelta(minutes=5))
            .not_valid_after(now + datetime.timedelta(days=1))
            .add_extension(x509.BasicConstraints(ca=ca, path_length=None), critical=True)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(self._key.public_key()), critical=False)
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(public), critical=False)  # type: ignore[arg-type]
        )
        if ca:
            usage = x509.KeyUsage(True, False, False, False, False, True, True, False, False)
            builder = builder.add_extension(usage, critical=True)
        if server:
            builder = builder.add_extension(x509.SubjectAlternativeName([x509.DNSName("localhost")]), critical=False)
        return builder.sign(self._key, hashes.SHA256())
