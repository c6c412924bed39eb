"""`OwnerConnection` on a real broker: waiting for retained messages, takeovers, and publication of the newest state only."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time

import pytest

from crypto.seal.identity import Identity, fingerprint
from shoal import limits
from shoal.errors import BrokerUnreachableError
from shoal.membership.enrol_requests import make_request, token_id
from shoal.membership.grants import open_grant
from shoal.owner.cli import enrolment as admission_cli
from shoal.owner.enrolment.connection import OwnerConnection
from shoal.owner.enrolment.tokens import TokenStore
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol.chunking import ChunkKind, split
from shoal.protocol.documents import DeviceGrant
from shoal.protocol.reassembly import Reassembler
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport.base import Message
from shoal.transport.mqtt import MqttTransport
from shoal.util.files import exclusive
from tests.helpers.chunks import forge
from tests.helpers.receiving import RECEIVING, device_card, founded
from tests.helpers.trees import ONE_THREAD, ROOT
from tests.helpers.waiting import until

pytestmark = pytest.mark.broker
TOPICS = Topics("reef")
SPAWN = multiprocessing.get_context("spawn")
WAIT_S = 30.0


@pytest.fixture
def fleet(tmp_path, broker):
    return founded(tmp_path / "owner", broker.url)


def leave(broker, messages):
    """Leave retained messages on the broker."""
    transport = MqttTransport(broker.url, "somebody", lambda _: None)
    transport.start(require=True)
    for topic, payload in messages.items():
        transport.publish(topic, payload, retain=True)
    until(lambda: not transport.pending())
    transport.close()


def request(identity, token):
    """A device's request by its topic, for a fleet's topics."""
    (chunk,) = split(make_request(identity, token, int(time.time()), RECEIVING.public), kind=ChunkKind.ENROL, round=0)
    return {Topics(token.fleet).enrol(token_id(token.secret)): chunk}


def lying(broker, base):
    """Return the retained transfer below ``base``."""
    found, chunks = [], Reassembler(limits.MAX_GRANT_BYTES)

    def take(event):
        if isinstance(event, Message) and event.payload:
            found.append(chunks.add("grant", event.payload, 0.0))

    transport = MqttTransport(broker.url, "probe", take)
    transport.subscribe(f"{base}/#")
    transport.start(require=True)
    until(lambda: any(found))
    transport.close()
    return bytes(found[-1].payload)


def test_drawing_approval_publishes_all_keys(fleet, broker, capsys):
    """The lines of two approvals in one command, which share a draw; no secret is among them."""
    stays = Identity.generate("dev-1")
    fleet.add_device(device_card(stays))
    fleet.take_run()
    newcomers = [Identity.generate(name) for name in ("dev-2", "dev-3")]
    for newcomer in newcomers:
        leave(broker, request(newcomer, TokenStore(fleet).issue(1, 600, int(time.time()))[0]))
    prints = [fingerprint(newcomer.member) for newcomer in newcomers]
    admission_cli.approve(fleet.path, prints)
    out, err = capsys.readouterr()
    after = FleetDirectory(fleet.path)
    drawn = after.roster.keys_since
    assert drawn == after.roster.sequence == fleet.roster.sequence + 1
    assert out == f"dev-2 {prints[0]}\ndev-3 {prints[1]}\n"
    assert err == f"new keys since roster {drawn} for 1 other device and the aggregator: published at the broker\n"
    data = lying(broker, TOPICS.keys("dev-1"))
    grant = open_grant(stays, data, DeviceGrant, fleet.fingerprint, RECEIVING)
    assert (grant.keys_since, grant.version_secret) == (drawn, after.secrets.version_secret)
    admission_cli.approve(fleet.path, prints)
    assert capsys.readouterr().err == "", "nothing is drawn for devices that are listed"
    assert FleetDirectory(fleet.path).roster == after.roster


def test_later_kind_is_no_complaint(fleet, broker):
    """Junk is one, on the same topic."""
    for payload, complaints in ((forge(kind=200), 0), (forge(kind=99), 1)):
        leave(broker, {TOPICS.at(TopicKind.OWNER_ROSTER): payload})
        found = []
        with OwnerConnection(fleet, found.append) as connection:
            connection.listen(1.0, lambda: True)
        assert len([text for text in found if "kind" in text]) == complaints, found


def revoke_and_publish(path, name):
    fleet = FleetDirectory(path)
    fleet.revoke(name)
    with OwnerConnection(fleet, print) as connection:
        connection.publish()


def test_newest_keys_remain_on_the_broker(fleet, broker, monkeypatch):
    """One program publishes slowly; another's newer keys wait for it and replace its keys."""
    devices = {name: Identity.generate(name) for name in ("dev-1", "dev-2", "dev-3")}
    for identity in devices.values():
        fleet.add_device(device_card(identity))
    fleet.revoke("dev-1")
    feed, began, other = MqttTransport._feed, [], []

    def slowly(transport, link):
        if transport.pending() and not other:
            other.append(SPAWN.Process(target=revoke_and_publish, args=(fleet.path, "dev-2")))
            other[0].start()
            began.append(time.monotonic())
        if not began or time.monotonic() - began[0] > 4.0:
            feed(transport, link)

    with OwnerConnection(fleet, pytest.fail) as connection:
        connection.listen(0.5)
        monkeypatch.setattr(MqttTransport, "_feed", slowly)
        connection.publish()
    other[0].join(WAIT_S)
    assert other[0].exitcode == 0
    newest = FleetDirectory(fleet.path)
    assert newest.roster.revoked == ("dev-1", "dev-2")
    data = lying(broker, TOPICS.keys("dev-3"))
    grant = open_grant(devices["dev-3"], data, DeviceGrant, fleet.fingerprint, RECEIVING)
    assert grant.broadcast_key == newest.secrets.broadcast_key


def test_untaken_message_is_not_sent_later(fleet, broker, monkeypatch):
    """The fleet is free again then, and something newer may be on its way."""
    monkeypatch.setattr("shoal.owner.enrolment.connection.FLUSH_S", 0.3)
    with OwnerConnection(fleet, pytest.fail) as connection:
        os.kill(broker.pid, signal.SIGSTOP)
        try:
            with pytest.raises(BrokerUnreachableError, match="did not take everything"):
                connection.publish()
            with exclusive(fleet.path, wait_s=0, hint="-"):
                pass
            assert not connection.transport._thread.is_alive()
        finally:
            os.kill(broker.pid, signal.SIGCONT)


def test_commands_of_owner_work_side_by_side(fleet):
    """`devices --watch` in one window, `approve` in another, and a third that waits."""
    with (
        OwnerConnection(fleet, pytest.fail) as one,
        OwnerConnection(fleet, pytest.fail) as other,
        OwnerConnection(fleet, pytest.fail) as at_work,
    ):
        for connection in (one, other, at_work):
            connection.listen(0.5)
        at_work.publish()
        one.publish()


def test_watching_prints_a_request_once(tmp_path, fleet, broker):
    """Those that wait already, and those that come; a second device with the same line is another request."""
    first, second = (TokenStore(fleet).issue(1, 600, int(time.time()))[0] for _ in range(2))
    dev_1, dev_2, dev_3 = (Identity.generate(f"dev-{n}") for n in (1, 2, 3))
    leave(broker, request(dev_1, first))
    log = tmp_path / "watch.log"
    command = "from shoal.owner.cli.main import main; main()"
    with log.open("wb") as out:
        watching = subprocess.Popen(
            [sys.executable, "-c", command, "devices", str(fleet.path), "--watch"],
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT), "SHOAL_FLEET_SILENCE": "0.5"},
            stdout=out,
        )
    try:
        until(lambda: "dev-1" in log.read_text())
        leave(broker, request(dev_2, second))
        until(lambda: "dev-2" in log.read_text())
        leave(broker, request(dev_3, second))
        until(lambda: "dev-3" in log.read_text())
        time.sleep(1.5)
    finally:
        watching.terminate()
        watching.wait(WAIT_S)
    assert [line.split()[1] for line in log.read_text().splitlines()] == ["dev-1", "dev-2", "dev-3"]
