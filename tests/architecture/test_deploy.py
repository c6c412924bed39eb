"""The files in deploy/ work: the broker's configuration with TLS and ACL, and the systemd units."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import time
from pathlib import Path

import pytest

from aggregator import membership as aggregators
from aggregator.shards import membership as workers
from shoal import limits
from shoal.address import BrokerAddress
from shoal.errors import BrokerUnreachableError, StorageError
from shoal.owner.broker import config as broker_config
from shoal.owner.broker.config import acl
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol.channels import Party
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport import local_broker as brokers
from shoal.transport.local_broker import find_mosquitto, free_port
from tests.helpers.certificates import Authority
from tests.helpers.mqtt_clients import Client
from tests.helpers.places import start_mosquitto
from tests.helpers.trees import ROOT
from tests.integration import access

TOPICS = Topics("reef")
WAIT_S = 10.0


@pytest.fixture
def broker(tmp_path):
    """Mosquitto with our configuration, its paths and port replaced; yields (port, folder of certificates)."""
    if find_mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    authority = Authority(tmp_path, "fleet")
    authority.issue("server", server=True)
    for name in ("owner", "aggregator", "enrol", "dev-1", "dev-2", "worker-0"):
        authority.issue(name)
    port = free_port()
    text = (ROOT / "deploy/mosquitto/shoal.conf").read_text()
    for old, new in (
        ("/etc/mosquitto/certs/ca.crt", str(authority.file)),
        ("/etc/mosquitto/certs", str(tmp_path)),
        ("server.crt", "server.pem"),
        ("/etc/mosquitto/shoal.acl", str(ROOT / "deploy/mosquitto/shoal.acl")),
        ("listener 8883", f"listener {port} 127.0.0.1"),
    ):
        assert old in text
        text = text.replace(old, new)
    text += f"persistence_location {tmp_path}/\n" + ("user root\n" if os.geteuid() == 0 else "")
    process = start_mosquitto(tmp_path, port, text)
    try:
        yield port, tmp_path
    finally:
        process.terminate()
        process.wait(10)


def client_of(broker, name, client_id=""):
    """Return a client with the certificate of this name, or without one; it is not connected."""
    port, folder = broker
    files = {"cert_file": folder / f"{name}.pem", "key_file": folder / f"{name}.key"} if name else {}
    address = BrokerAddress.parse(f"mqtts://localhost:{port}", ca_file=folder / "fleet-ca.pem", **files)
    return Client(address, client_id or f"test-{name}")


def heard(client, count):
    """Return the next messages as (topic, payload)."""
    return [(message.topic, message.payload) for message in (client.message() for _ in range(count))]


@pytest.mark.broker
def test_broker_confines_every_device(broker):
    """A device reaches the aggregator only under its own name, and receives no message to another device."""
    aggregator, first, second = (client_of(broker, n) for n in ("aggregator", "dev-1", "dev-2"))
    try:
        aggregator.transport.subscribe(TOPICS.filter(TopicKind.UP))
        aggregator.transport.subscribe(TOPICS.filter(TopicKind.STATE))
        second.transport.subscribe(TOPICS.ctl("dev-1"))
        second.transport.subscribe(TOPICS.ctl("dev-2"))
        second.transport.subscribe(f"{TOPICS.round}/#")
        for client in (aggregator, first, second):
            client.transport.start(require=True)
        time.sleep(0.3)
        first.transport.publish(TOPICS.up("dev-2"), b"in another's name")
        first.transport.publish(TOPICS.state("dev-2"), b"in another's name")
        first.transport.publish(TOPICS.round, b"in the aggregator's name")
        first.transport.publish(TOPICS.state("dev-1"), b"here", retain=True)
        first.transport.publish(TOPICS.up("dev-1"), b"update")
        assert heard(aggregator, 2) == [(TOPICS.state("dev-1"), b"here"), (TOPICS.up("dev-1"), b"update")]
        aggregator.transport.publish(TOPICS.ctl("dev-1"), b"for the first")
        aggregator.transport.publish(TOPICS.round, b"for all", retain=True)
        aggregator.transport.publish(TOPICS.ctl("dev-2"), b"for the second")
        assert heard(second, 2) == [(TOPICS.round, b"for all"), (TOPICS.ctl("dev-2"), b"for the second")]
    finally:
        for client in (aggregator, first, second):
            client.transport.close()


@pytest.mark.broker
def test_parties_have_the_listed_channels(broker):
    """Patterns hold for every certificate, so that each name also counts as a device's."""
    clients = {name: client_of(broker, name) for name in ("owner", "aggregator", "dev-1", "dev-2", "worker-0")}
    clients["new"] = client_of(broker, "enrol", access.TOKEN)
    try:
        for client in clients.values():
            client.transport.start(require=True)
        access.check(
            clients,
            {
                "owner": [(Party.OWNER, "owner"), (Party.DEVICE, "owner")],
                "aggregator": [(Party.AGGREGATOR, "aggregator"), (Party.DEVICE, "aggregator")],
                "worker-0": [(Party.WORKER, "worker-0"), (Party.DEVICE, "worker-0")],
                "dev-1": [(Party.DEVICE, "dev-1")],
                "dev-2": [(Party.DEVICE, "dev-2")],
                "new": [(Party.NEWCOMER, access.TOKEN), (Party.DEVICE, "enrol")],
            },
        )
    finally:
        for client in clients.values():
            client.transport.close()


@pytest.mark.broker
def test_client_needs_a_certificate(broker):
    """TLS alone is not enough."""
    known, stranger = client_of(broker, "dev-1"), client_of(broker, "")
    known.transport.start(require=True)
    known.transport.close()
    with pytest.raises(BrokerUnreachableError):
        stranger.transport.start(require=True)
    stranger.transport.close()


def settings(path):
    """Return a file's lines ``name value`` or ``name=value`` as a mapping; comments and sections are left out."""
    lines = (ROOT / path).read_text().splitlines()
    return dict(re.split("[ =]", line, maxsplit=1) for line in lines if line and line[0] not in "#[")


def test_access_list_is_as_generated():
    """`python -m shoal.owner.broker.config > deploy/mosquitto/shoal.acl` makes it again."""
    assert (ROOT / "deploy/mosquitto/shoal.acl").read_text() == broker_config.template_acl("reef")


def test_both_access_lists_agree(tmp_path):
    """The one for passwords names each device, the one for certificates has patterns."""
    owner = FleetDirectory.create(tmp_path / "owner", "reef", "mqtts://localhost")
    owner.add_aggregator(aggregators.init(tmp_path / "server").read_bytes())
    for name in broker_config.TEMPLATE_WORKERS:
        owner.add_helper("worker", workers.init(tmp_path / name, name).read_bytes())
    named = acl(owner, ("dev-1",)).replace("user dev-1", "").replace("dev-1", "%u").splitlines()
    template = (ROOT / "deploy/mosquitto/shoal.acl").read_text().replace("pattern", "topic").splitlines()
    rules = ("topic", "user", "pattern")
    assert [line.replace("pattern", "topic") for line in named if line.startswith(rules)] == [
        line for line in template if line.startswith(rules)
    ]


def test_queues_have_room_for_1000_devices():
    """The queues have room for a thousand devices."""
    shipped = settings("deploy/mosquitto/shoal.conf")
    for line in brokers.queue_limits(1000, broker_config.DEFAULT_UPLOAD_BYTES).lines():
        name, value = line.split()
        assert shipped[name] == value


@pytest.mark.parametrize(
    ("file", "least"),
    [
        ("mosquitto.service.d/shoal.conf", limits.MAX_DEVICES + 32),
        ("shoal-aggregator.service", 4096),
        ("shoal-edge.service", 512),
    ],
)
def test_units_give_the_number_of_files(file, least):
    """A broker takes one for each connection; systemd's default is 1024."""
    assert int(settings(f"deploy/systemd/{file}")["LimitNOFILE"]) >= least


@pytest.mark.parametrize("unit", ["shoal-aggregator", "shoal-edge"])
def test_the_units_are_valid(tmp_path, unit):
    """systemd-analyze finds nothing to say about them, once the program they start exists."""
    if shutil.which("systemd-analyze") is None:
        pytest.skip("systemd-analyze is not installed")
    text = (ROOT / f"deploy/systemd/{unit}.service").read_text()
    program = f"/opt/shoal/.venv/bin/{unit}"
    assert program in text
    file = tmp_path / f"{unit}.service"
    file.write_text(text.replace(program, shutil.which("true")))
    done = subprocess.run(["systemd-analyze", "verify", str(file)], capture_output=True, text=True, check=False)
    complaints = [line for line in done.stderr.splitlines() if Path(file).name in line]
    assert (done.returncode, complaints) == (0, [])


@pytest.mark.parametrize("unit", ["shoal-aggregator", "shoal-edge"])
def test_full_disk_restarts_a_service(unit):
    """A service that a full disk has ended is started again."""
    text = (ROOT / f"deploy/systemd/{unit}.service").read_text()
    (never,) = [line for line in text.splitlines() if line.startswith("RestartPreventExitStatus=")]
    assert str(StorageError.exit_code) not in never.split("=")[1].split()
    assert "Restart=on-failure" in text
