"""A device that was revoked while it was off, as real programs: it learns so at its next start, and ends with status 6."""

from __future__ import annotations

import paho.mqtt.client
import paho.mqtt.enums
import pytest

from shoal.errors import UntrustedError
from shoal.owner.enrolment.connection import OwnerConnection
from shoal.transport.local_broker import find_mosquitto
from tests.helpers.forked_stages import (
    begin,
    stage_of,
)
from tests.helpers.run_places import LONG_RUN, SLOWLY
from tests.helpers.waiting import until

pytestmark = [
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]
NAMES = ("dev-0", "dev-1", "dev-2", "dev-gone")
WAIT_S = 60.0


def forget_session(port, client_id):
    """Discard the messages that the broker has queued for a device, as it does when the session expires, after 10 minutes."""
    client = paho.mqtt.client.Client(paho.mqtt.enums.CallbackAPIVersion.VERSION2, client_id, clean_session=True)
    client.connect("127.0.0.1", port)
    client.loop_start()
    until(client.is_connected, "the connection")
    client.disconnect()
    client.loop_stop()


def test_it_ends_with_status_6(tmp_path):
    with stage_of(tmp_path, NAMES, environment=SLOWLY) as (stage, broker):
        run = begin(stage, LONG_RUN).run
        server = stage.start_aggregator()
        programs = {name: stage.start_device(name, tmp_path / f"{name}.npz") for name in NAMES}

        said = lambda: server.log.read_text()[-3000:]  # noqa: E731
        until(lambda: any("dev-gone" in r["norms"] for r in stage.records(run)), said)
        assert programs["dev-gone"].stop() == 0
        stage.fleet.revoke("dev-gone")
        with OwnerConnection(stage.fleet, pytest.fail) as connection:
            connection.publish()
        closed = len(stage.records(run))
        until(lambda: any("dev-gone" not in r["norms"] for r in stage.records(run)[closed:]), said)
        forget_session(broker.port, "shoal-demo-dev-gone")
        again = stage.start_device("dev-gone", tmp_path / "dev-gone.npz")
        assert again.process.wait(WAIT_S) == UntrustedError.exit_code == 6, again.log.read_text()[-3000:]
        assert "the owner has revoked this device" in again.log.read_text()
        assert 'reason=""' not in again.log.read_text()
        assert 'refused: "' not in again.log.read_text()
