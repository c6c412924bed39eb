"""Brokers of both kinds that are stopped, restarted, started late or not at all, as child processes."""

import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from shoal.errors import BrokerUnreachableError, ConfigError
from shoal.transport.base import Connected, Disconnected, Message
from shoal.transport.local_broker import BrokerProcess, choose_kind, find_mosquitto, free_port, start_broker
from tests.helpers.mqtt_clients import Client, settle
from tests.helpers.trees import ROOT
from tests.helpers.waiting import until

pytestmark = pytest.mark.broker


def test_subscriptions_survive_a_restart(own: BrokerProcess, client: Callable[..., Client]) -> None:
    """After a restart both sides reconnect on their own and the subscription works again."""
    reader, writer = client(own.url, "re-reader", "re"), client(own.url, "re-writer")
    settle(reader, "re")
    own.stop()
    own.start()
    for one in (reader, writer):
        one.until(Disconnected)
        one.until(Connected)
    settle(reader, "re")
    writer.transport.publish("re", b"after")
    assert reader.message() == Message("re", b"after")


def test_publish_arrives_once_broker_is_back(own: BrokerProcess, client: Callable[..., Client]) -> None:
    """A broker that was killed and restarted receives the messages published meanwhile."""
    writer = client(own.url, "down-writer")
    own.kill()
    writer.until(Disconnected)
    writer.transport.publish("down", b"patient", retain=True)
    assert writer.transport.pending() == 1
    own.start()
    until(lambda: writer.transport.pending() == 0)
    assert client(own.url, "down-reader", "down").message() == Message("down", b"patient", retained=True)


def test_a_broker_that_comes_later_is_found(tmp_path: Path, client: Callable[..., Client]) -> None:
    """Without ``require`` the transport retries from the start."""
    port = free_port()
    early = client(f"mqtt://127.0.0.1:{port}", "early-bird", start=False)
    early.transport.start()
    time.sleep(0.1)
    with start_broker("auto", tmp_path, port):
        assert early.until(Connected) == Connected(session_present=False)


def test_mosquitto_keeps_retained_messages(tmp_path: Path, client: Callable[..., Client]) -> None:
    """They are stored in the broker's directory."""
    if find_mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    with start_broker("mosquitto", tmp_path) as broker:
        writer = client(broker.url, "p-writer")
        writer.transport.publish("persist", b"kept", retain=True)
        until(lambda: writer.transport.pending() == 0)
        writer.transport.close()
        broker.stop()
        broker.start()
        assert client(broker.url, "p-reader", "persist").message() == Message("persist", b"kept", retained=True)


def test_no_broker_shows_no_password(client: Callable[..., Client]) -> None:
    """``require`` fails fast where nothing listens."""
    began = time.monotonic()
    with pytest.raises(BrokerUnreachableError) as failed:
        client(f"mqtt://me:secret-word@127.0.0.1:{free_port()}", "nobody")
    assert time.monotonic() - began < 3.0
    assert "secret-word" not in str(failed.value) + failed.value.hint
    assert "127.0.0.1" in str(failed.value)
    assert failed.value.hint


def test_broker_dies_with_its_starter(tmp_path: Path) -> None:
    """Neither broker outlives a parent that was killed by SIGKILL."""
    program = """
        import pathlib, sys, time
        from shoal.transport.local_broker import choose_kind, find_mosquitto, start_broker
        kinds = ["amqtt"] + ["mosquitto"] * (find_mosquitto() is not None)
        brokers = [start_broker(kind, pathlib.Path(sys.argv[1]) / kind) for kind in kinds]
        print(*(broker.pid for broker in brokers), flush=True)
        time.sleep(60)
    """
    parent = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(program), str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert pids
    assert all(is_running(pid) for pid in pids)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    until(lambda: not any(is_running(pid) for pid in pids))


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_a_taken_port_is_said_at_once(shared: BrokerProcess, tmp_path: Path) -> None:
    """Starting on a port where something listens fails with a hint."""
    with pytest.raises(BrokerUnreachableError, match="in use") as failed:
        start_broker(shared.kind, tmp_path, shared.port)
    assert failed.value.hint


def test_failed_start_shows_the_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error includes the broker's log output."""
    monkeypatch.setattr(sys, "executable", "/bin/ls")
    with pytest.raises(BrokerUnreachableError, match=r"amqtt ended with status 2 .*ls") as failed:
        start_broker("amqtt", tmp_path)
    assert "amqtt.log" in failed.value.hint


def test_unknown_broker_is_config_error() -> None:
    """The hint names the choices."""
    with pytest.raises(ConfigError) as failed:
        choose_kind("hivemq")
    assert "mosquitto" in failed.value.hint
