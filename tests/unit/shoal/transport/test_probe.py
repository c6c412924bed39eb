"""A broker that is only tried. Real brokers: tests/cli/test_doctor.py and tests/integration/test_transport_tls.py."""

import ssl
import time

import pytest

from shoal.address import BrokerAddress
from shoal.errors import BrokerUnreachableError, ConfigError
from shoal.transport.probe import certificate_expiry, log_in, own_expiries
from tests.helpers.certificates import Authority


def test_nobody_answers():
    with pytest.raises(BrokerUnreachableError, match=r"no MQTT broker can be used at mqtt://127.0.0.1:1"):
        log_in(BrokerAddress.parse("mqtt://127.0.0.1:1"), "doctor")
    with pytest.raises(
        BrokerUnreachableError, match=r"no TLS connection to mqtts://127.0.0.1:1: nothing listens at port 1"
    ):
        certificate_expiry(BrokerAddress.parse("mqtts://127.0.0.1:1"))


@pytest.mark.parametrize("content", [None, b"no certificate"])
def test_a_file_that_is_no_certificate(tmp_path, content):
    file = tmp_path / "c.pem"
    if content is not None:
        file.write_bytes(content)
    with pytest.raises(ConfigError, match="is not a readable certificate"):
        own_expiries(BrokerAddress.parse("mqtts://h", cert_file=file, key_file=file))


def test_the_days_of_own_certificates(tmp_path):
    """A line's CA or that of a file, unless it is a bundle; and the client's."""
    authority = Authority(tmp_path, "ours")
    authority.issue("device", since_days=30)
    ca = ssl.PEM_cert_to_DER_cert(authority.file.read_text())
    soon, later = (pytest.approx(time.time() + days * 86400, abs=300) for days in (1, 31))
    both = {"cert_file": tmp_path / "device.pem", "key_file": tmp_path / "device.key"}
    assert own_expiries(BrokerAddress.parse("mqtts://h", ca=ca, **both)) == {"ca": soon, "client": later}
    assert own_expiries(BrokerAddress.parse("mqtts://h", ca_file=authority.file, ca=b"unused")) == {"ca": soon}
    authority.file.write_bytes(2 * authority.file.read_bytes())
    assert own_expiries(BrokerAddress.parse("mqtts://h", ca_file=authority.file)) == {}
