"""The fleet page of a real aggregator on a real broker: ready, metrics, Home Assistant, the broker away, and a clean end."""

from __future__ import annotations

import json
import urllib.error
import urllib.request

import pytest
from prometheus_client.parser import text_string_to_metric_families

from shoal.errors import ConfigError
from shoal.transport.local_broker import find_mosquitto, free_port, start_broker
from tests.helpers.forked_stages import ForkedStage
from tests.helpers.waiting import until

pytestmark = [
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]
WAIT_S = 30.0
TOKEN = "a-secret-of-this-test"
SENSORS = {"SHOAL_AGGREGATOR_HOME_ASSISTANT": "homeassistant"}


def ask(port, path):
    """Return status and content; status 0 while the port is closed."""
    try:
        request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Authorization": f"Bearer {TOKEN}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return answer.status, answer.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError:
        return 0, ""


def test_ready_aggregator_ends_cleanly(tmp_path, client):
    """An aggregator is ready has metrics and sensors and ends cleanly."""
    port, token = free_port(), tmp_path / "page.token"
    token.touch(0o600)
    token.write_text(TOKEN)
    options = ("--http", f"127.0.0.1:{port}", "--http-token", str(token))
    with (
        start_broker("mosquitto", tmp_path / "b") as broker,
        ForkedStage(tmp_path / "s", broker.url, ("dev-0",), environment=SENSORS) as stage,
    ):
        home = client(broker.url, "home", "homeassistant/#")
        program = stage.start_aggregator(*options)
        until(lambda: ask(port, "/readyz") == (200, "ready\n"))
        families = until(lambda: {f.name: f for f in text_string_to_metric_families(ask(port, "/metrics")[1])})
        assert until(lambda: "shoal_devices 1.0" in ask(port, "/metrics")[1])
        assert all(name.startswith("shoal_") for name in families)
        assert '"title":"demo"' in ask(port, "/")[1]

        topics = {}
        while "homeassistant/shoal_demo/state" not in topics:
            message = home.message()
            topics[message.topic] = json.loads(message.payload)
        assert topics["homeassistant/sensor/shoal_demo/devices/config"]["unique_id"] == "shoal_demo_devices"
        assert topics["homeassistant/shoal_demo/state"]["devices"] == 1

        broker.stop()
        until(lambda: ask(port, "/readyz") == (503, "not connected to the broker\n"))
        assert ask(port, "/healthz") == (200, "ok\n")
        assert stage.stop("aggregator") == 0
        assert ask(port, "/healthz")[0] == 0
        assert TOKEN not in program.log.read_text()


def test_open_address_needs_a_token(tmp_path):
    """An address open to others without a token is refused at the start."""
    with ForkedStage(tmp_path, "mqtt://127.0.0.1:1", ("dev-0",)) as stage:
        program = stage.start_aggregator("--http", "0.0.0.0:0")
        assert program.process.wait(WAIT_S) == ConfigError.exit_code
        assert "needs a token" in program.log.read_text()
        assert "--http-token" in program.log.read_text()
