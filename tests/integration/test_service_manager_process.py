"""The programs as services of systemd, with a socket that stands for it: ready, alive, what they do, and that they stop."""

from __future__ import annotations

import signal
import socket
import threading
from contextlib import suppress

import pytest

from shoal.protocol.recipe import LocalTraining, Recipe
from shoal.transport.local_broker import find_mosquitto
from tests.helpers.forked_stages import (
    begin,
    stage_of,
)

pytestmark = [
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.timeout(120),
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]
OPTIONS = Recipe(
    "fedavg",
    rounds=100_000,
    local=LocalTraining(epochs=1, batch_size=16, lr=0.2),
    min_contributors=1,
    quorum=1.0,
    seed=1,
)


class Manager:
    """The manager's end of a notification socket.

    A thread reads it all the time, as systemd does: the kernel keeps ten datagrams at most, and programs drop what doesn't fit.
    """

    def __init__(self, path):
        self.path = path
        self.heard = []
        self._heard_more = threading.Condition()
        self._ended = False
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        self._socket.settimeout(0.2)
        self._reader = threading.Thread(target=self._read)

    def __enter__(self):
        self._reader.start()
        return self

    def __exit__(self, *_):
        self._ended = True
        self._reader.join()
        self._socket.close()

    def _read(self):
        while not self._ended:
            with suppress(TimeoutError):
                text = self._socket.recv(4096).decode()
                with self._heard_more:
                    self.heard.append(text)
                    self._heard_more.notify_all()

    def until(self, wanted, within_s=60.0):
        """Wait for a message that is as wanted."""
        with self._heard_more:
            assert self._heard_more.wait_for(lambda: any(map(wanted, self.heard)), within_s), self.heard

    def forget(self):
        """Forget what was heard so far."""
        with self._heard_more:
            self.heard.clear()


def test_both_programs_tell_service_manager(tmp_path, monkeypatch):
    """Both programs tell the service manager what they do."""
    monkeypatch.setenv("WATCHDOG_USEC", "1000000")
    with (
        stage_of(tmp_path, ("dev-0",)) as (stage, broker),
        Manager(tmp_path / "server") as server,
        Manager(tmp_path / "device") as device,
    ):
        monkeypatch.setenv("NOTIFY_SOCKET", str(server.path))
        stage.start_aggregator()
        server.until(lambda text: text == f"READY=1\nSTATUS=connected to {broker.url}")
        server.until(lambda text: text == "STATUS=idle: waiting for a run")
        monkeypatch.setenv("NOTIFY_SOCKET", str(device.path))
        stage.start_device("dev-0", tmp_path / "dev-0.npz")
        device.until(lambda text: text == f"READY=1\nSTATUS=connected to {broker.url}")
        begin(stage, OPTIONS)
        server.until(lambda text: text.startswith("STATUS=run 1, round "))
        device.until(lambda text: text.startswith("STATUS=fleet demo, run 1, round "))
        for manager in (server, device):
            manager.forget()
            manager.until(lambda text: text == "WATCHDOG=1")
        broker.stop()
        server.until(lambda text: text == f"STATUS=not connected to {broker.url}")
        device.until(lambda text: text == f"STATUS=not connected to {broker.url}")
        for name, manager in (("dev-0", device), ("aggregator", server)):
            assert stage.stop(name, signal.SIGTERM) == 0
            manager.until(lambda text: text == "STOPPING=1")
