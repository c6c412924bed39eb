"""`broker-config` beside other owner programs and with damaged files: one CA, and the same passwords each time."""

from __future__ import annotations

import multiprocessing
import time

import pytest
from cryptography import x509

from crypto.seal.identity import Identity
from shoal.errors import ConfigError, IntegrityError
from shoal.membership.grants import AGGREGATOR_ROLE, make_card, open_grant
from shoal.owner.broker.config import CA_FILE, CA_KEY_FILE, write_broker_config
from shoal.owner.enrolment.tokens import TokenStore
from shoal.owner.keys.broker_users import USERS_FILE
from shoal.owner.keys.directory import GRANTS, FleetDirectory
from shoal.protocol.documents import DeviceGrant
from shoal.util.files import write_private
from tests.helpers.receiving import RECEIVING, device_card

SPAWN = multiprocessing.get_context("spawn")
PROGRAMS = 3


@pytest.fixture
def devices():
    return {name: Identity.generate(name) for name in ("dev-1", "dev-2")}


@pytest.fixture
def fleet(tmp_path, devices):
    made = FleetDirectory.create(tmp_path / "owner", "reef", "mqtts://broker.example")
    made.add_aggregator(make_card(Identity.generate("aggregator"), AGGREGATOR_ROLE))
    for identity in devices.values():
        made.add_device(device_card(identity))
    return made


def opened(fleet, identity):
    """Open the grant file of a device in the owner's directory."""
    data = (fleet.path / GRANTS / f"{identity.name}.grant").read_bytes()
    return open_grant(identity, data, DeviceGrant, fleet.fingerprint, RECEIVING)


def test_open_program_uses_new_users(fleet, devices, tmp_path):
    """A program opened before broker config puts users into grants and lines."""
    waiting = FleetDirectory(fleet.path)
    write_broker_config(FleetDirectory(fleet.path), tmp_path / "out")
    users = FleetDirectory(fleet.path).users
    waiting.add_device(device_card(devices["dev-1"]))
    assert users.password("dev-1") in opened(fleet, devices["dev-1"]).broker
    assert users.password("enrol") in TokenStore(waiting).issue(1, 60, int(time.time()))[0].broker


def test_second_config_keeps_passwords(fleet, tmp_path):
    """Also if it had opened the directory before the first wrote them."""
    first, second = FleetDirectory(fleet.path), FleetDirectory(fleet.path)
    write_broker_config(first, tmp_path / "a")
    write_broker_config(second, tmp_path / "b")
    for name in ("clients/aggregator.url", "ca.crt"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def configure(path, out, start):
    fleet = FleetDirectory(path)
    start.wait(60)
    write_broker_config(fleet, out)


@pytest.mark.slow
def test_broker_configs_at_once_make_one_ca(fleet, tmp_path):
    start = SPAWN.Barrier(PROGRAMS)
    outs = [tmp_path / f"out-{n}" for n in range(PROGRAMS)]
    programs = [SPAWN.Process(target=configure, args=(fleet.path, out, start)) for out in outs]
    for program in programs:
        program.start()
    for program in programs:
        program.join(60)
        assert program.exitcode == 0
    for out in outs:
        certificates = [x509.load_pem_x509_certificate((out / n).read_bytes()) for n in ("server.crt", "ca.crt")]
        certificates[0].verify_directly_issued_by(certificates[1])
    assert len({(out / "clients" / "dev-1.url").read_bytes() for out in outs}) == 1


@pytest.mark.parametrize("file", [CA_FILE, CA_KEY_FILE])
@pytest.mark.parametrize("damage", ["another", "junk"])
def test_unfit_ca_is_refused(fleet, tmp_path, file, damage):
    """Otherwise it would make a server certificate that no device accepts."""
    write_broker_config(fleet, tmp_path / "out")
    other = FleetDirectory.create(tmp_path / "other", "reef", "mqtts://broker.example")
    other.add_aggregator(make_card(Identity.generate("aggregator"), AGGREGATOR_ROLE))
    write_broker_config(other, tmp_path / "other-out")
    write_private(fleet.path / file, (other.path / file).read_bytes() if damage == "another" else b"junk")
    before = (tmp_path / "out" / "server.crt").read_bytes()
    with pytest.raises(ConfigError, match="broker-ca") as caught:
        write_broker_config(fleet, tmp_path / "out")
    assert "remove both" in caught.value.hint
    assert (tmp_path / "out" / "server.crt").read_bytes() == before


def test_damaged_secret_is_an_error(fleet, tmp_path):
    """New passwords would lock out every party that has joined."""
    write_broker_config(fleet, tmp_path / "out")
    write_private(fleet.path / USERS_FILE, b"")
    with pytest.raises(IntegrityError, match=f"{USERS_FILE} is damaged"):
        write_broker_config(fleet, tmp_path / "out")
