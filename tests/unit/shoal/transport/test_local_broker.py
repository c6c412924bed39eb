"""What the embedded broker is configured with and how it is chosen."""

from pathlib import Path

import pytest

from shoal import limits
from shoal.errors import BrokerUnreachableError
from shoal.transport.local_broker import QueueLimits, choose_kind, mosquitto_config, queue_limits
from tests.helpers.refusals import refused


def test_mosquitto_is_local_and_keeps_state(tmp_path: Path) -> None:
    """Mosquitto listens on loopback only and keeps its state; it gets the limits of its queues."""
    lines = mosquitto_config(1884, tmp_path).splitlines()
    assert [line for line in lines if line.startswith(("listener", "bind", "port"))] == ["listener 1884 127.0.0.1"]
    assert set(lines) >= {
        *("set_tcp_nodelay true", "max_queued_messages 100000", "persistence true", "autosave_interval 5"),
        *(f"persistence_location {tmp_path}/", f"max_packet_size {limits.MAX_PACKET_BYTES}"),
    }
    given = mosquitto_config(1884, tmp_path, QueueLimits(7, 8, 9)).splitlines()
    assert set(given) >= {"max_queued_messages 7", "max_queued_bytes 8", "max_inflight_messages 9"}


def test_missing_broker_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Auto prefers mosquitto and falls back to amqtt; a missing broker is named with the way to get it."""
    monkeypatch.setattr("shoal.transport.local_broker.find_mosquitto", lambda: "/usr/sbin/mosquitto")
    assert choose_kind("auto") == "mosquitto"
    monkeypatch.setattr("shoal.transport.local_broker.find_mosquitto", lambda: None)
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: object())
    assert choose_kind("auto") == "amqtt"
    monkeypatch.setattr("importlib.util.find_spec", lambda _name: None)
    for kind in ("auto", "mosquitto", "amqtt"):
        with refused(BrokerUnreachableError, hint="install"):
            choose_kind(kind)


def test_queue_holds_two_rounds() -> None:
    """The queue holds two rounds of the largest fleets."""
    least = queue_limits(20, 636_040)
    assert least == (100_000, limits.MAX_TRANSFER_BYTES, 100)
    many = queue_limits(2000, 636_040)
    assert many.payload_bytes > 2 * 2000 * 636_040 > least.payload_bytes
    assert queue_limits(20_000, 31_400).messages > 2 * 20_000 > least.messages / 3
