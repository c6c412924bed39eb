"""`shoal-fleet broker-config` on a real mosquitto: each user reaches only its own topics, and unknown users are refused."""

from __future__ import annotations

import json
import os
import pwd
import queue
import shutil
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import pytest

from aggregator import membership as aggregators
from edge_client import membership as enrolment
from edge_client.enrolment import enrol, prepare
from shoal.address import BrokerAddress
from shoal.errors import BrokerUnreachableError, ConfigError
from shoal.owner.broker.config import debian_plugin, write_broker_config
from shoal.owner.broker.dynamic import CONTROL, shut_out
from shoal.owner.enrolment.admission import Registrar
from shoal.owner.enrolment.connection import OwnerConnection
from shoal.owner.enrolment.tokens import TokenStore
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol.channels import Party
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport.base import Disconnected, Message
from shoal.transport.local_broker import find_mosquitto, free_port
from shoal.transport.mqtt import MqttTransport
from tests.helpers.places import start_generated
from tests.integration import access

pytestmark = pytest.mark.broker
TOPICS = Topics("reef")
WAIT_S = 10.0


class Reef:
    """A fleet of two devices whose broker runs with the generated files."""

    def __init__(self, root, *, dynamic=False):
        self.root, self.port = root, free_port()
        self.owner = FleetDirectory.create(root / "owner", "reef", f"mqtts://localhost:{self.port}")
        grant = self.owner.add_aggregator(aggregators.init(root / "server").read_bytes())
        aggregators.join(root / "server", grant.read_bytes(), self.owner.fingerprint)
        for name in ("dev-1", "dev-2"):
            self.owner.add_device(enrolment.init(root / name, name).read_bytes())
        self.made = write_broker_config(self.owner, root / "broker", expected=("dev-3",), dynamic=dynamic)

    def start(self):
        self.process = start_generated(self.root / "broker", self.root, self.port)

    def client(self, user, url="", client_id=""):
        return Client(url or self.owner.broker_for(user), self.root / "broker" / "ca.crt", client_id or f"test-{user}")


class Client:
    """A connected transport and the messages that it receives."""

    def __init__(self, url, ca, client_id):
        self.events = queue.SimpleQueue()
        self.transport = MqttTransport(BrokerAddress.parse(url, ca_file=ca), client_id, self.events.put)

    def start(self, *filters):
        for topic_filter in filters:
            self.transport.subscribe(topic_filter)
        self.transport.start(require=True)
        return self

    def until(self, last):
        """Return topics of all messages up to and with the payload ``last``."""
        found = []
        while True:
            event = self.events.get(timeout=WAIT_S)
            if isinstance(event, Message):
                found.append(event.topic)
                if event.payload == last:
                    return found


@contextmanager
def running(root, *, dynamic):
    if find_mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    if dynamic and not debian_plugin().exists():
        pytest.skip(f"this mosquitto has no {debian_plugin()}")
    made = Reef(root, dynamic=dynamic)
    made.start()
    try:
        yield made
    finally:
        made.process.terminate()
        made.process.wait(10)


@pytest.fixture
def reef(tmp_path):
    with running(tmp_path, dynamic=False) as made:
        yield made


@pytest.fixture
def dynamic_reef(tmp_path):
    with running(tmp_path, dynamic=True) as made:
        yield made


@pytest.fixture(params=["static", "dynamic"])
def any_reef(tmp_path, request):
    with running(tmp_path, dynamic=request.param == "dynamic") as made:
        yield made


OTHERS = [TOPICS.up("dev-2"), TOPICS.ctl("dev-2"), TOPICS.state("dev-2"), TOPICS.keys("dev-2"), TOPICS.grant("f" * 16)]
COMMON = [
    TOPICS.round,
    TOPICS.plan,
    TOPICS.roster,
    TOPICS.at(TopicKind.OWNER_ROSTER),
    TOPICS.keys("dev-1"),
    TOPICS.ctl("dev-1"),
]


def test_device_reaches_nothing_of_others(any_reef):
    """It receives only messages to all and to itself, and its publishes to other topics reach no client."""
    reef = any_reef
    owner, aggregator = reef.client("owner"), reef.client("aggregator")
    first, second = reef.client("dev-1"), reef.client("dev-2")
    clients = (owner, aggregator, first, second)
    try:
        aggregator.start("shoal/v1/reef/#")
        owner.start("shoal/v1/reef/#")
        second.start("shoal/v1/reef/#", "#", TOPICS.ctl("dev-1"), f"{TOPICS.keys('dev-1')}/#", TOPICS.up("dev-1"))
        first.start("shoal/v1/reef/#")
        time.sleep(0.5)
        for topic in (*OTHERS, *COMMON):
            first.transport.publish(topic, b"forged", retain=True)
        first.transport.publish(TOPICS.up("dev-1"), b"update")
        first.transport.publish(TOPICS.state("dev-1"), b"here", retain=True)
        assert aggregator.until(b"here") == [TOPICS.up("dev-1"), TOPICS.state("dev-1")]

        owner.transport.publish(TOPICS.keys("dev-1"), b"keys", retain=True)
        owner.transport.publish(TOPICS.at(TopicKind.OWNER_ROSTER), b"roster", retain=True)
        assert aggregator.until(b"roster") == [TOPICS.at(TopicKind.OWNER_ROSTER)]
        for topic in (TOPICS.ctl("dev-1"), TOPICS.model("4f"), TOPICS.ctl("dev-2"), TOPICS.round):
            aggregator.transport.publish(topic, topic.encode(), retain=topic == TOPICS.round)
        heard = first.until(TOPICS.round.encode())
        expected = [TOPICS.keys("dev-1"), TOPICS.ctl("dev-1"), TOPICS.model("4f"), TOPICS.round, TOPICS.state("dev-1")]
        assert sorted(heard) == sorted(expected)
        # Its subscriptions overlap, so it receives messages more than once.
        assert set(second.until(TOPICS.round.encode())) == {TOPICS.model("4f"), TOPICS.ctl("dev-2"), TOPICS.round}
        late = reef.client("dev-2", client_id="late").start("#")
        assert late.until(TOPICS.round.encode()) == [TOPICS.round]
        late.transport.close()
    finally:
        for client in clients:
            client.transport.close()


def test_parties_have_the_listed_channels(any_reef):
    """Each party sends and hears exactly what the table of channels lists."""
    reef = any_reef
    clients = {name: reef.client(name) for name in ("owner", "aggregator", "dev-1", "dev-2")}
    clients["new"] = reef.client("enrol", client_id=access.TOKEN)
    try:
        for client in clients.values():
            client.start()
        roles = {
            "owner": [(Party.OWNER, "owner")],
            "aggregator": [(Party.AGGREGATOR, "aggregator")],
            "dev-1": [(Party.DEVICE, "dev-1")],
            "dev-2": [(Party.DEVICE, "dev-2")],
            "new": [(Party.NEWCOMER, access.TOKEN)],
        }
        if reef.owner.users.dynamic:
            # Patterns hold for all users that they do not exclude, so these are devices and helpers too, of their own names.
            for name in ("owner", "aggregator"):
                roles[name].append((Party.DEVICE, name))
            for name in ("owner", "aggregator", "dev-1", "dev-2"):
                roles[name].append((Party.WORKER, name))
        access.check(clients, roles)
    finally:
        for client in clients.values():
            client.transport.close()


def test_nobody_unknown_gets_in(any_reef):
    """Neither without a password nor with another's; a user for a device to come is there already."""
    reef = any_reef
    url = f"localhost:{reef.port}"
    password = reef.owner.users.password("dev-1")
    for name, address in enumerate((f"mqtts://{url}", f"mqtts://dev-1:wrong@{url}", f"mqtts://dev-2:{password}@{url}")):
        stranger = reef.client("", address, f"stranger-{name}")
        with pytest.raises(BrokerUnreachableError) as refused:
            stranger.transport.start(require=True)
        assert password not in str(refused.value)
        assert "credentials" in refused.value.hint
        assert "may have been revoked" in refused.value.hint
        stranger.transport.close()
    reef.client("dev-3").start().transport.close()


def test_device_enrols_through_the_guard(any_reef):
    """Line and grant carry the users: `enrol` to ask with, its own afterwards; who asks sees no other's grant."""
    reef = any_reef
    owner = reef.client("owner")
    registrar = Registrar(reef.owner, owner.transport)
    registrar.start(int(time.time()))
    owner.start()
    token = TokenStore(reef.owner).issue(1, 600, int(time.time()))[0]
    spy = reef.client("enrol", client_id="spy").start("shoal/v1/reef/#", "#")
    try:
        prepare(reef.root / "dev-3", "dev-3")
        with ThreadPoolExecutor(1) as pool:
            asking = pool.submit(
                enrol, reef.root / "dev-3", token,
                ca=None, cert=None, key=None, complain=print,
            )  # fmt: skip
            while not registrar.pending:
                registrar.on_event(owner.events.get(timeout=WAIT_S), int(time.time()))
            registrar.approve_all([next(iter(registrar.pending))], int(time.time()))
            member = asking.result(timeout=30)
        assert member.broker == reef.owner.broker_for("dev-3")
        reef.client("", member.broker, "shoal-reef-dev-3").start().transport.close()
        assert not any(isinstance(e, Message) for e in drained(spy.events))
    finally:
        spy.transport.close()
        owner.transport.close()


def test_owner_connects_as_its_own_user(reef):
    """`devices`, `approve`, `revoke` and `publish` reach the aggregator and a device."""
    aggregator, device = reef.client("aggregator"), reef.client("dev-1")
    try:
        aggregator.start(f"{TOPICS.at(TopicKind.OWNER_ROSTER)}/#", f"{TOPICS.keys('aggregator')}/#")
        device.start(f"{TOPICS.keys('dev-1')}/#")
        with OwnerConnection(reef.owner, pytest.fail) as connection:
            connection.listen(0.3)
            connection.registrar.publish_roster()
            connection.registrar.publish_keys()
            connection.flush()
        heard = [next(e.topic for e in iter(aggregator.events.get, None) if isinstance(e, Message)) for _ in range(2)]
        assert heard == [TOPICS.at(TopicKind.OWNER_ROSTER), TOPICS.keys("aggregator")]
        assert next(e.topic for e in iter(device.events.get, None) if isinstance(e, Message)) == TOPICS.keys("dev-1")
    finally:
        aggregator.transport.close()
        device.transport.close()


def drained(events):
    found = []
    while not events.empty():
        found.append(events.get())
    return found


def test_broker_gets_no_password_or_key(reef):
    """Hashes only; the CA's key stays with the owner; every file is private; a second time changes no password of a member."""
    folder = reef.root / "broker"
    files = {p.name: p.read_bytes() for p in folder.iterdir() if p.is_file() and "mosquitto.db" not in p.name}
    assert set(files) == {"shoal.conf", "shoal.acl", "passwords", "ca.crt", "server.crt", "server.key"}
    secrets = reef.owner.secrets
    hidden = [secrets.version_secret, secrets.broadcast_key]
    hidden += [reef.owner.users.password(u).encode() for u in reef.made.users]
    hidden += [(reef.owner.path / "broker-ca.key").read_bytes()]
    assert not [h for h in hidden for data in files.values() if h in data]
    assert [p for p in (reef.root / "broker").rglob("*") if p.stat().st_mode & 0o077] == []
    before = (folder / "clients" / "dev-1.url").read_bytes()
    reef.owner.revoke("dev-2")
    made = write_broker_config(reef.owner, folder)
    assert (folder / "clients" / "dev-1.url").read_bytes() == before
    assert "dev-2" not in made.users
    assert not [name for name in ("shoal.acl", "passwords") if b"dev-2" in (folder / name).read_bytes()]


@pytest.mark.parametrize("name", ["owner", "enrol", "aggregator", "no/name"])
def test_no_newcomer_takes_anothers_user(reef, name):
    """No device to come takes somebody elses user."""
    with pytest.raises(ConfigError):
        write_broker_config(reef.owner, reef.root / "broker", expected=(name,))


def retained_after_a_restart(reef, start, kill):
    """Return the retained message that a broker still has which was ended by ``kill`` and started again."""
    owner = reef.client("owner").start()
    owner.transport.publish(TOPICS.at(TopicKind.OWNER_ROSTER), b"roster", retain=True)
    aggregator = reef.client("aggregator").start(f"{TOPICS.at(TopicKind.OWNER_ROSTER)}/#")
    assert aggregator.until(b"roster") == [TOPICS.at(TopicKind.OWNER_ROSTER)]
    for client in (owner, aggregator):
        client.transport.close()
    kill()
    reef.process = start()
    again = reef.client("aggregator", client_id="again").start(f"{TOPICS.at(TopicKind.OWNER_ROSTER)}/#")
    try:
        return again.until(b"roster")
    finally:
        again.transport.close()


@pytest.mark.parametrize("power_cut", [False, True], ids=["stopped", "killed"])
def test_retained_messages_are_found_again(reef, power_cut):
    """It saves beside its configuration, every 5 s and when it is stopped, in whichever directory it was started."""

    def end():
        saved = reef.root / "broker" / "mosquitto.db"
        if power_cut:
            give_up_s = time.monotonic() + 3 * WAIT_S
            while not saved.exists():
                assert time.monotonic() < give_up_s, (reef.root / "mosquitto.log").read_text()
                time.sleep(0.1)
            reef.process.kill()
        else:
            reef.process.terminate()
        reef.process.wait(10)
        assert saved.stat().st_mode & 0o077 == 0

    start = lambda: start_generated(reef.root / "broker", reef.root, reef.port)  # noqa: E731
    assert retained_after_a_restart(reef, start, end) == [TOPICS.at(TopicKind.OWNER_ROSTER)]
    write_broker_config(reef.owner, reef.root / "broker")  # the saved state beside it is no reason to refuse


@pytest.mark.skipif(os.geteuid() != 0, reason="only root becomes the user mosquitto")
def test_root_starts_it_as_mosquitto(tmp_path):
    """As docs/operator/broker.md has it: a copy of the files that belongs to mosquitto."""
    try:
        user = pwd.getpwnam("mosquitto")
    except KeyError:
        pytest.skip("there is no user mosquitto")
    with tempfile.TemporaryDirectory() as reachable:
        Path(reachable).chmod(0o711)
        place = Path(reachable, "shoal")
        reef = Reef(tmp_path)
        write_broker_config(reef.owner, tmp_path / "broker", installed=place)
        shutil.copytree(tmp_path / "broker", place, ignore=shutil.ignore_patterns("clients"))
        for path in (place, *place.iterdir()):
            os.chown(path, user.pw_uid, user.pw_gid)
        start = lambda: start_generated(place, tmp_path, reef.port, user="")  # noqa: E731
        reef.process = start()

        def stop():
            reef.process.terminate()
            reef.process.wait(10)

        try:
            assert retained_after_a_restart(reef, start, stop) == [TOPICS.at(TopicKind.OWNER_ROSTER)]
        finally:
            stop()
        assert (place / "mosquitto.db").stat().st_uid == user.pw_uid


def test_users_change_while_it_runs(dynamic_reef):
    """A new device's user works at once, a revoked one's client is disconnected, and a restart forgets neither."""
    reef = dynamic_reef
    assert (reef.root / "broker" / "dynamic-security.json").exists()
    assert not (reef.root / "broker" / "passwords").exists()
    reef.owner.add_device(enrolment.init(reef.root / "dev-4", "dev-4").read_bytes())
    with pytest.raises(BrokerUnreachableError):
        reef.client("dev-4").start()
    with OwnerConnection(reef.owner, pytest.fail) as connection:
        connection.publish()
        connection.publish()  # users that exist stay
    reef.client("dev-4").start().transport.close()
    second = reef.client("dev-2").start()
    reef.owner.revoke("dev-2")
    with OwnerConnection(reef.owner, pytest.fail) as connection:
        connection.publish()
    while not isinstance(second.events.get(timeout=WAIT_S), Disconnected):
        pass
    second.transport.close()
    reef.process.terminate()
    reef.process.wait(10)
    reef.start()
    reef.client("dev-4").start().transport.close()
    with pytest.raises(BrokerUnreachableError):
        reef.client("dev-2").start()


def test_no_device_administers_the_broker(dynamic_reef):
    """A device's command has no effect: its publish to the plugin's topic is refused."""
    device, owner = dynamic_reef.client("dev-1").start(), dynamic_reef.client("owner").start()
    command = json.dumps({"commands": shut_out(["owner", "aggregator"])})
    device.transport.publish(CONTROL, command.encode())
    device.transport.publish(TOPICS.state("dev-1"), b"after", retain=True)
    aggregator = dynamic_reef.client("aggregator").start("shoal/v1/reef/#")
    assert TOPICS.state("dev-1") in aggregator.until(b"after")
    for client in (device, owner, aggregator):
        client.transport.close()
    dynamic_reef.client("owner", client_id="again").start().transport.close()


@pytest.mark.parametrize("dynamic", [False, True], ids=["static", "dynamic"])
def test_home_assistant_reads_sensors_only(tmp_path, dynamic):
    """Home assistant reads its sensors and nothing of the fleet."""
    if find_mosquitto() is None or (dynamic and not debian_plugin().exists()):
        pytest.skip("mosquitto or its plugin is not installed")
    made = Reef(tmp_path, dynamic=dynamic)
    write_broker_config(made.owner, tmp_path / "broker", expected=("dev-3",), home_assistant="homeassistant")
    made.start()
    home, aggregator, device = made.client("home-assistant"), made.client("aggregator"), made.client("dev-1")
    sensor, state = "homeassistant/sensor/shoal_reef/devices/config", "homeassistant/shoal_reef/state"
    try:
        home.start("homeassistant/#", "#", "shoal/v1/reef/#", TOPICS.round)
        aggregator.start(TOPICS.state("dev-1"))
        device.start("homeassistant/#", TOPICS.round)
        time.sleep(0.5)
        home.transport.publish(TOPICS.state("dev-1"), b"forged")
        home.transport.publish(TOPICS.up("home-assistant"), b"forged")
        for topic in (TOPICS.round, sensor, "homeassistant/sensor/other/config"):
            aggregator.transport.publish(topic, b"x")
        aggregator.transport.publish(state, b"last")
        assert set(home.until(b"last")) == {sensor, state}
        device.transport.publish(TOPICS.state("dev-1"), b"here")
        assert aggregator.until(b"here") == [TOPICS.state("dev-1")]
        aggregator.transport.publish(TOPICS.round, b"round")
        assert set(device.until(b"round")) == {TOPICS.round}
    finally:
        for client in (home, aggregator, device):
            client.transport.close()
        made.process.terminate()
        made.process.wait(10)
