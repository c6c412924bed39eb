"""A broker that is only tried. Real brokers: tests/cli/test_doctor.py and tests/integration/test_transport_tls.py."""

import pytest

from shoal.address import BrokerAddress
from shoal.errors import BrokerUnreachableError, ConfigError
from shoal.transport.probe import certificate_expiry, client_certificate_expiry, log_in


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
        client_certificate_expiry(file)
