"""Listener addresses in mosquitto's configuration."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
from cryptography import x509

from aggregator.page.home_assistant import HomeAssistant, sensor_topics
from crypto.seal.identity import Identity, sign_document
from shoal import limits
from shoal.address import BrokerAddress
from shoal.errors import ConfigError, IntegrityError
from shoal.owner.broker.config import CA_FILE, CA_KEY_FILE, config, write_broker_config
from shoal.owner.enrolment.tokens import TokenStore
from shoal.owner.keys.broker_users import USERS_FILE
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol.codec import encode
from shoal.protocol.documents import RunPackage, SegmentSpec
from shoal.protocol.topics import matches
from shoal.transport import local_broker as broker
from shoal.util.files import write_private
from tests.helpers.parties import Line
from tests.helpers.plans import run_plan
from tests.helpers.processes import run_at_once
from tests.helpers.receiving import device_card, founded, opened
from tests.helpers.refusals import refused, unchanged


@pytest.mark.parametrize(
    ("url", "listener"),
    [
        ("mqtt://127.0.0.1:1884", "listener 1884 127.0.0.1"),
        ("mqtt://localhost", "listener 1883 localhost"),
        ("mqtt://[::1]:1884", "listener 1884 ::1"),
        ("mqtts://127.0.0.1", "listener 8883 127.0.0.1"),
        ("mqtt://192.168.1.7", "listener 1883"),
        ("mqtts://broker.example", "listener 8883"),
    ],
)
def test_broker_of_one_machine_is_closed(url, listener):
    """A broker for one machine is not open to others."""
    lines = config(BrokerAddress.parse(url), Path("/etc/mosquitto")).splitlines()
    assert [line for line in lines if line.startswith("listener")] == [listener]


def settings(text):
    return dict(line.split(" ", 1) for line in text.splitlines() if line and not line.startswith("#"))


ADDRESS = BrokerAddress.parse("mqtts://broker.example")


def test_limits_follow_from_fleet_and_model():
    """Above them mosquitto drops messages without a word, as it did with 2000 devices of 636 KB. A comment explains them."""
    text = config(ADDRESS, Path("/etc/mosquitto/shoal"), devices=2000, upload_bytes=636_040)
    made = settings(text)
    chunks = -(-636_040 // limits.CHUNK_BYTES)
    assert int(made["max_queued_bytes"]) > 2000 * 636_040
    assert int(made["max_queued_messages"]) > 2000 * (chunks + limits.REMINDERS_SOON)
    more = settings(config(ADDRESS, Path("/etc/mosquitto/shoal"), devices=4000, upload_bytes=636_040))
    assert int(more["max_queued_bytes"]) == 2 * int(made["max_queued_bytes"])
    assert broker.queue_limits(3, 100) == (100_000, limits.MAX_TRANSFER_BYTES, 100), "room for the largest message"
    assert (made["persistence"], made["persistence_location"]) == ("true", "/etc/mosquitto/shoal/")
    comment = " ".join(line[2:] for line in text.splitlines() if line.startswith("#"))
    parts = ("drops messages without a word", "2000 devices", "6 chunks", "636040 bytes")
    assert [part for part in parts if part not in comment] == []


@pytest.fixture
def owner(tmp_path):
    return founded(tmp_path / "owner", "mqtts://localhost", *(Identity.generate(f"dev-{i}") for i in range(120)))


@pytest.mark.slow
def test_upload_size_comes_from_the_runs(owner, tmp_path):
    """The upload size comes from the signed runs or the option."""

    def queued_bytes(**options):
        write_broker_config(owner, tmp_path / "broker", **options)
        return int(settings((tmp_path / "broker" / "shoal.conf").read_text())["max_queued_bytes"])

    unknown = queued_bytes()
    assert unknown == broker.queue_limits(120, 4 << 20).payload_bytes
    assert queued_bytes(upload_bytes=50_000_000) == broker.queue_limits(120, 50_000_000).payload_bytes
    plan = run_plan(fleet="reef", segments=(SegmentSpec("cluster", 10_000_000),))
    package = RunPackage(sign_document(owner.owner, plan), b"task", b"origins")
    write_private(owner.path / "runs" / "000001.run", encode(package))
    assert queued_bytes() == broker.queue_limits(120, 40_000_000).payload_bytes


def lines_of(text, user):
    """Return the access of one user in an access list."""
    sections = [part.splitlines() for part in text.split(f"\nuser {user}\n")[1:]]
    return [line for section in sections for line in section[: section.index("") if "" in section else None]]


@pytest.mark.parametrize("dynamic", [False, True])
def test_home_assistant_gets_a_user_if_asked(tmp_path, dynamic):
    """Home assistant gets a user and the aggregator its sensors if asked."""
    owner = founded(tmp_path / "owner", "mqtt://localhost")
    made = write_broker_config(owner, tmp_path / "broker", dynamic=dynamic)
    assert "home" not in (tmp_path / "broker/shoal.acl").read_text()
    assert "home-assistant" not in made.users
    made = write_broker_config(owner, tmp_path / "broker", home_assistant="homeassistant")
    text = (tmp_path / "broker/shoal.acl").read_text()
    sensors = ["topic write homeassistant/sensor/shoal_reef/#", "topic write homeassistant/shoal_reef/state"]
    assert lines_of(text, "aggregator")[-2:] == sensors
    own = ["topic read homeassistant/#", "topic write homeassistant/status"]
    denied = ["topic deny shoal/v1/reef/#"] if dynamic else []
    assert lines_of(text, "home-assistant") == [*own, *denied]
    assert "home-assistant" in made.users
    assert (tmp_path / "broker/clients/home-assistant.url").read_text().startswith("mqtt://home-assistant:")
    again = FleetDirectory(tmp_path / "owner")
    write_broker_config(again, tmp_path / "broker")
    assert (tmp_path / "broker/shoal.acl").read_text() == text, "as before, also in another process"
    write_broker_config(again, tmp_path / "broker", home_assistant="")
    assert "home" not in (tmp_path / "broker/shoal.acl").read_text()


def test_sensor_topics_are_those_published():
    """The sensors topics are those that the aggregator publishes."""
    sensors = HomeAssistant(Line(), "reef", "home/assistant")
    topics = [topic for topic, _ in sensors.configurations()] + [sensors._state_topic]
    filters = sensor_topics("reef", "home/assistant")
    assert [topic for topic in topics if not any(matches(each, topic) for each in filters)] == []


@pytest.mark.parametrize("prefix", ["home/#", "+", "a b", "/x", "home\n"])
def test_unfit_prefix_is_refused(tmp_path, prefix):
    """A prefix that is no plain topic is refused."""
    owner = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://localhost")
    with pytest.raises(ConfigError, match="is no topic prefix"):
        write_broker_config(owner, tmp_path / "broker", home_assistant=prefix)
    assert owner.users.home_assistant == ""


PROGRAMS = 3


def test_open_program_uses_new_users(fleet, devices, tmp_path):
    """A program opened before broker config puts users into grants and lines."""
    waiting = FleetDirectory(fleet.path)
    write_broker_config(FleetDirectory(fleet.path), tmp_path / "out")
    users = FleetDirectory(fleet.path).users
    waiting.add_device(device_card(devices["dev-1"]))
    assert users.password("dev-1") in opened(fleet, devices["dev-1"]).broker
    assert users.password("enrol") in TokenStore(waiting).issue(1, 60, int(time.time()))[0].broker


def test_second_config_keeps_passwords(fleet, tmp_path):
    """Also if it had opened the directory before the first wrote them; new ones would lock out every party that has joined."""
    first, second = FleetDirectory(fleet.path), FleetDirectory(fleet.path)
    write_broker_config(first, tmp_path / "a")
    write_broker_config(second, tmp_path / "b")
    for name in ("clients/aggregator.url", "ca.crt"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    write_private(fleet.path / USERS_FILE, b"")
    with pytest.raises(IntegrityError, match=f"{USERS_FILE} is damaged"):
        write_broker_config(fleet, tmp_path / "a")


def configure(path, out, start):
    fleet = FleetDirectory(path)
    start.wait(60)
    write_broker_config(fleet, out)


@pytest.mark.slow
def test_broker_configs_at_once_make_one_ca(fleet, tmp_path):
    outs = [tmp_path / f"out-{n}" for n in range(PROGRAMS)]
    run_at_once(configure, *((fleet.path, out) for out in outs))
    for out in outs:
        certificates = [x509.load_pem_x509_certificate((out / n).read_bytes()) for n in ("server.crt", "ca.crt")]
        certificates[0].verify_directly_issued_by(certificates[1])
    assert len({(out / "clients" / "dev-1.url").read_bytes() for out in outs}) == 1


@pytest.mark.parametrize("file", [CA_FILE, CA_KEY_FILE])
@pytest.mark.parametrize("damage", ["another", "junk"])
def test_unfit_ca_is_refused(fleet, tmp_path, file, damage):
    """Otherwise it would make a server certificate that no device accepts."""
    write_broker_config(fleet, tmp_path / "out")
    other = founded(tmp_path / "other")
    write_broker_config(other, tmp_path / "other-out")
    write_private(fleet.path / file, (other.path / file).read_bytes() if damage == "another" else b"junk")
    with unchanged(fleet.path), unchanged(tmp_path / "out"), refused(ConfigError, "broker-ca", hint="remove both"):
        write_broker_config(fleet, tmp_path / "out", dynamic=True, home_assistant="homeassistant")


def test_nginx_has_port_and_tls(fleet, tmp_path):
    """Mosquitto then listens behind it, also when the files are made again, until nginx's is removed."""
    owner = founded(tmp_path / "wss", "wss://broker.example:8443/site")
    for _ in range(2):
        write_broker_config(owner, tmp_path / "broker", websockets=True)
        nginx = (tmp_path / "broker" / "nginx.conf").read_text()
        assert "listen 8443 ssl;\n    server_name broker.example;" in nginx
        assert f"ssl_certificate {tmp_path}/broker/server.crt;" in nginx
        assert "location = /site {\n        proxy_pass http://127.0.0.1:9001/;" in nginx
        text = (tmp_path / "broker" / "shoal.conf").read_text()
        assert "listener 9001 127.0.0.1\nprotocol websockets\n# mosq" in text
        assert "8443" not in text
        assert "server.key" not in text
    (tmp_path / "broker" / "nginx.conf").unlink()
    write_broker_config(owner, tmp_path / "broker")
    text = (tmp_path / "broker" / "shoal.conf").read_text()
    assert f"listener 8443\nprotocol websockets\ncertfile {tmp_path}/broker/server.crt" in text
    assert "listener 1883 127.0.0.1\n" in text
    with pytest.raises(ConfigError, match="the fleet's address is no websocket"):
        write_broker_config(fleet, tmp_path / "other", websockets=True)
