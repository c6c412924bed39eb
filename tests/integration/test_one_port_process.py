"""A fleet through one port: mosquitto behind nginx with the files of `broker-config`, and real programs behind an HTTP proxy.

Devices join with nothing but a line. `.ci/brokers` installs nginx and tinyproxy, and runs this.
"""

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

import numpy as np
import pytest

from aggregator.storage.store import read_records
from shoal.owner.broker.config import NGINX_PORT
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.runs.plan import make_plan, write_run
from shoal.protocol.recipe import LocalTraining, Recipe
from shoal.transport.local_broker import (
    answers,
    find_mosquitto,
    free_port,
)
from tests.helpers.places import WAIT_S, Place
from tests.helpers.tasks import logistic_bundle, samples
from tests.helpers.waiting import until

MISSING = [name for name in ("mosquitto", "nginx", "tinyproxy") if not shutil.which(name, path="/usr/sbin:/usr/bin")]
pytestmark = [
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.long,
    pytest.mark.timeout(300),
    pytest.mark.skipif(bool(MISSING), reason=f"not installed, run .ci/brokers: {', '.join(MISSING)}"),
]
DEVICES = ("dev-1", "dev-2", "dev-3")
INPUTS, CLASSES, ROUNDS = 30_000, 3, 3
"""The model's upload takes three chunks, so that frames of websockets are large."""


@contextlib.contextmanager
def running(name, port, *command):
    """Run a server in the foreground until the block ends; it answers at ``port`` in the block."""
    with Path(f"{name}.log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        until(lambda: process.poll() is not None or answers(port), Path(f"{name}.log").read_text)
        assert process.poll() is None, Path(f"{name}.log").read_text()
        yield
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_S)


@contextlib.contextmanager
def servers(home, port, proxy):
    """Start mosquitto, nginx and the proxy with the files of `broker-config`; other ports than the fleet's are free ones."""
    behind, unused = free_port(), free_port()
    root = "user root\n" if os.geteuid() == 0 else ""
    mosquitto = (home / "broker" / "shoal.conf").read_text().replace(f"listener {NGINX_PORT} ", f"listener {behind} ")
    (home / "mosquitto.conf").write_text(mosquitto.replace("listener 1883 ", f"listener {unused} ") + root)
    server = (home / "broker" / "nginx.conf").read_text().replace(f":{NGINX_PORT}/", f":{behind}/")
    folders = "".join(
        f"{kind}_temp_path {home}/{kind};" for kind in ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")
    )
    (home / "nginx.conf").write_text(
        f"daemon off; pid {home}/nginx.pid; {root.strip() and 'user root;'} events {{}}\n"
        f"http {{ access_log {home}/access.log; {folders}\n{server}}}\n"
    )
    (home / "tinyproxy.conf").write_text(f"Port {proxy}\nListen 127.0.0.1\nConnectPort {port}\nLogLevel Connect\n")
    os.chdir(home)
    with (
        running("mosquitto", behind, find_mosquitto(), "-v", "-c", "mosquitto.conf"),
        running("nginx", port, shutil.which("nginx", path="/usr/sbin"), "-e", "stderr", "-c", str(home / "nginx.conf")),
        running("tinyproxy", proxy, shutil.which("tinyproxy", path="/usr/sbin:/usr/bin"), "-d", "-c", "tinyproxy.conf"),
    ):
        yield


@pytest.fixture
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    way = f"http://127.0.0.1:{free_port()}"
    made = Place(tmp_path, SHOAL_FLEET_PROXY=way, SHOAL_EDGE_PROXY=way, SHOAL_AGGREGATOR_PROXY=way)
    yield made
    made.finish()


def enrol_devices(place):
    """Let the devices join, each by a line alone."""
    told = place.call("invite", "shoal-fleet", "invite", "owner", "--count", str(len(DEVICES)))
    lines = [word for word in told.split() if word.startswith("shoal1-")]
    assert max(map(len, lines)) < 1_000
    asking = [
        place.start(f"enrol-{d}", "shoal-edge", "enrol", d, stdin=f"{line}\n")
        for d, line in zip(DEVICES, lines, strict=True)
    ]
    for device in DEVICES:
        place.until(lambda device=device: "fingerprint " in place.log(f"enrol-{device}"), f"enrol-{device}")
    prints = [place.log(f"enrol-{device}").split("fingerprint ")[1].split()[0] for device in DEVICES]
    place.call("approve", "shoal-fleet", "approve", "owner", *prints, "--wait", "60")
    assert [each.wait(WAIT_S) for each in asking] == [0] * len(DEVICES), place.log("enrol-dev-1")


def test_a_fleet_through_one_port(place):
    home, port = place.home, free_port()
    place.make_fleet(f"wss://localhost:{port}/mqtt", DEVICES, "--websockets")
    proxy = int(place.environment["SHOAL_FLEET_PROXY"].rpartition(":")[2])
    with servers(home, port, proxy):
        place.start("server", "shoal-aggregator", "serve", "server")
        enrol_devices(place)
        for seed, name in enumerate(DEVICES):
            x, y = samples(40, INPUTS, CLASSES, seed=seed)
            np.savez(home / f"{name}.npz", x=x, y=y)
            place.start(name, "shoal-edge", "run", name, "--data", f"{name}.npz", "--once")
        owner, bundle = FleetDirectory(home / "owner"), logistic_bundle(INPUTS, CLASSES)
        recipe = Recipe("fedavg", rounds=ROUNDS, local=LocalTraining(epochs=1, batch_size=0, lr=0.1), quorum=1.0)
        plan = make_plan(owner, bundle, recipe)
        write_run(owner, plan, bundle, np.zeros((1, bundle.length), np.float32))
        place.call("run", "shoal-fleet", "run", "start", "owner", "--run", plan.run)
        assert [place.running[name].wait(WAIT_S) for name in DEVICES] == [0] * 3, place.log("dev-1")
        status = place.call("status", "shoal-fleet", "status", "owner")
        checks = place.call("doctor", "shoal-aggregator", "doctor", "server", "--json")
    records = [record for record in read_records(home / "server" / "run-000001") if record.get("final")]
    assert [record["contributed"] for record in records] == [len(DEVICES)]
    assert f"wss://localhost:{port}/mqtt" in status
    assert "the broker's certificate is valid until" in checks
    # All came by the one port, through the proxy, and mosquitto knows them by their own names.
    assert (home / "tinyproxy.log").read_text().count(f"CONNECT localhost:{port} ") >= 2 * len(DEVICES) + 2
    assert '"GET /mqtt HTTP/1.1" 101' in (home / "access.log").read_text()
    users = (home / "mosquitto.log").read_text()
    for device in DEVICES:
        assert f"as shoal-reef-{device} (p5, c0, k60, u'{device}')" in users
