"""The owner's settings, and the CA's certificate in lines and grants."""

from pathlib import Path

import pytest
from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from crypto.seal.identity import Identity
from shoal.errors import ConfigError
from shoal.membership.grants import AGGREGATOR_ROLE, make_card, open_grant
from shoal.owner.broker.address import owner_address
from shoal.owner.broker.config import write_broker_config
from shoal.owner.enrolment.tokens import TokenStore
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.keys.settings import CA_FILE, SETTINGS_FILE, OwnerConfig, settings_of
from shoal.protocol.documents import AggregatorGrant, Card
from shoal.util.files import write_private


def test_the_owners_settings(tmp_path, monkeypatch):
    """From the file in the owner's directory, and above it from the environment."""
    fleet = FleetDirectory.create(tmp_path / "owner", "reef", "mqtts://broker.example")
    file = fleet.path / SETTINGS_FILE
    file.write_text('[fleet]\nca = "mine.crt"\nchunk_bytes = 60000\nwait = 2\n')
    address = owner_address(fleet)
    assert (address.ca_file, address.chunk_bytes) == (Path("mine.crt"), 60000)
    monkeypatch.setenv("SHOAL_FLEET_CA", "other.crt")
    assert owner_address(fleet).ca_file == Path("other.crt")
    assert settings_of(fleet.path) == OwnerConfig(Path("other.crt"), chunk_bytes=60000, wait=2.0)


@pytest.mark.parametrize(
    ("line", "error"),
    [
        ("wait = 0", "wait is above 0"),
        ("silence = 4000", "silence is above 0"),
        ("chunk_bytes = 1", "chunk"),
        ("broker = 'x'", "unknown key 'broker'"),
    ],
)
def test_wrong_settings_are_refused(tmp_path, line, error):
    (tmp_path / SETTINGS_FILE).write_text(f"[fleet]\n{line}\n")
    with pytest.raises(ConfigError, match=error):
        settings_of(tmp_path)


def test_lines_and_grants_have_the_ca(tmp_path):
    """Those that are made before it, those of a CA too large for a line, and those without TLS have none."""
    fleet, identity = (
        FleetDirectory.create(tmp_path / "owner", "reef", "mqtts://broker.example"),
        Identity.generate("aggregator"),
    )
    fleet.add_aggregator(make_card(identity, AGGREGATOR_ROLE))
    assert fleet.broker_ca == b""
    write_broker_config(fleet, tmp_path / "out")
    made = x509.load_pem_x509_certificate((tmp_path / "out" / "ca.crt").read_bytes()).public_bytes(Encoding.DER)
    assert len(made) < 600
    token = TokenStore(fleet).issue(1, 600, 1_700_000_000)[0]
    assert fleet.broker_ca == token.broker_ca == made
    sealed = fleet.grant_for(Card(AGGREGATOR_ROLE, identity.member))
    assert open_grant(identity, sealed, AggregatorGrant, fleet.fingerprint).broker_ca == made
    large = (tmp_path / "out" / "ca.crt").read_bytes() * 6
    (tmp_path / "large.crt").write_bytes(large)
    (fleet.path / SETTINGS_FILE).write_text(f'[fleet]\nca = "{tmp_path / "large.crt"}"\n')
    assert fleet.broker_ca == b""
    (tmp_path / "large.crt").write_text("no certificate")
    with pytest.raises(ConfigError, match=r"large\.crt holds no certificate"):
        TokenStore(fleet).issue(1, 600, 1_700_000_000)
    plain = FleetDirectory.create(tmp_path / "plain", "reef", "mqtt://broker.example")
    write_private(plain.path / CA_FILE, (fleet.path / CA_FILE).read_bytes())
    assert plain.broker_ca == b""
