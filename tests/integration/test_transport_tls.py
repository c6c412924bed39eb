"""TLS with client certificates, against a real broker."""

import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.address import BrokerAddress
from shoal.errors import BrokerUnreachableError
from shoal.transport.base import Connected
from shoal.transport.local_broker import find_mosquitto, free_port
from shoal.transport.probe import certificate_expiry, log_in, own_expiries
from tests.helpers.certificates import Authority
from tests.helpers.mqtt_clients import Client, settle
from tests.helpers.places import mosquitto

pytestmark = pytest.mark.broker


def test_tls_with_client_certificates(tmp_path: Path, client: Callable[..., Client]) -> None:
    """A broker that demands certificates accepts ours; ours refuses a broker that another authority signed."""
    if find_mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    authority, stranger = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
    authority.issue("server", server=True)
    authority.issue("device")
    port = free_port()
    lines = (
        *(f"listener {port} 127.0.0.1", f"cafile {authority.file}", f"certfile {tmp_path}/server.pem"),
        *(f"keyfile {tmp_path}/server.key", "require_certificate true", "use_identity_as_username true"),
    )
    with mosquitto(tmp_path, port, *lines):
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
        ours_at, strangers_at = (BrokerAddress.parse(url, ca_file=a.file, **ours) for a in (authority, stranger))
        in_a_day = pytest.approx(time.time() + 86400, abs=300)
        assert certificate_expiry(ours_at) == in_a_day
        assert own_expiries(ours_at) == {"ca": in_a_day, "client": in_a_day}
        with pytest.raises(BrokerUnreachableError, match=r"(?i)certificate"):
            certificate_expiry(strangers_at)
        assert log_in(ours_at, "tls") == "5"
        good.transport.publish("tls", b"still here")
        assert good.message().payload == b"still here", "a probe takes over no session"
