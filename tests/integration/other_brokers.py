"""Brokers of other makers, started on this machine for one test with a state of their own; `.ci/brokers` installs them."""

import contextlib
import os
import shutil
import signal
import subprocess
from pathlib import Path

from shoal.transport.local_broker import SMALL_FLEET, answers, find_mosquitto, free_port, start_broker
from tests.helpers.trees import ROOT
from tests.helpers.waiting import until

AEDES = Path(os.environ.get("SHOAL_AEDES") or ROOT / "build" / "aedes")
"""Folder into which npm has installed aedes."""
RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")
EJABBERD = next(Path("/usr/lib").glob("*/ejabberd-*"), None)
START_S = 60.0

RABBITMQ_CONFIG = """\
listeners.tcp = none
mqtt.listeners.tcp.default = 127.0.0.1:{port}
"""
EJABBERD_CONFIG = """\
hosts: [localhost]
loglevel: warning
certfiles: []
auth_method: internal
listen:
  - {{port: {port}, ip: "127.0.0.1", module: mod_mqtt, backlog: 100}}
modules:
  mod_mqtt: {{}}
"""

EJABBERD_USER = 'ejabberd_auth:try_register(<<"shoal">>, <<"localhost">>, <<"secret">>).'


def missing(kind):
    """Return why a broker can't be started here; empty if it can."""
    absent = {
        "mosquitto": find_mosquitto() is None,
        "bridged": find_mosquitto() is None,
        "amqtt": False,
        "aedes": shutil.which("node") is None or not (AEDES / "node_modules" / "aedes").is_dir(),
        "rabbitmq": not RABBITMQ.exists(),
        "ejabberd": EJABBERD is None,
    }[kind]
    return f"{kind} is not installed: run .ci/brokers" if absent else ""


@contextlib.contextmanager
def running(kind, folder):
    """Start a broker; yield the address for devices and that for the aggregator."""
    folder.mkdir(parents=True)
    if kind == "bridged":
        with start_broker("mosquitto", folder / "cloud") as cloud, _site(folder / "site", cloud.port) as port:
            yield f"mqtt://127.0.0.1:{port}", cloud.url
    elif kind in ("mosquitto", "amqtt"):
        with start_broker(kind, folder) as broker:
            yield broker.url, broker.url
    else:
        with {"aedes": _aedes, "rabbitmq": _rabbitmq, "ejabberd": _ejabberd}[kind](folder) as (port, user):
            url = f"mqtt://{user}127.0.0.1:{port}"
            yield url, url


@contextlib.contextmanager
def _site(folder, cloud_port):
    """A site's own mosquitto, which passes everything on to the broker in the cloud and back."""
    folder.mkdir()
    port = free_port()
    lines = [
        f"listener {port} 127.0.0.1",
        "allow_anonymous true",
        *SMALL_FLEET.lines(),
        "connection cloud",
        f"address 127.0.0.1:{cloud_port}",
        "topic # both 1",
        "bridge_protocol_version mqttv311",
        "cleansession false",
        *(["user root"] if os.geteuid() == 0 else []),
    ]
    config = folder / "mosquitto.conf"
    config.write_text("\n".join(lines) + "\n")
    with _program(folder, port, [find_mosquitto(), "-c", str(config)]):
        yield port


@contextlib.contextmanager
def _aedes(folder):
    port = free_port()
    script = Path(__file__).with_name("aedes_broker.mjs")
    with _program(folder, port, ["node", str(script), str(AEDES), str(port)]):
        yield port, ""


@contextlib.contextmanager
def _rabbitmq(folder):
    port, distribution = free_port(), free_port()
    (folder / "rabbitmq.conf").write_text(RABBITMQ_CONFIG.format(port=port))
    (folder / "plugins").write_text("[rabbitmq_mqtt].\n")
    environment = {
        "HOME": str(folder),
        "RABBITMQ_NODENAME": f"shoal-{port}@localhost",
        "RABBITMQ_DIST_PORT": str(distribution),
        "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
        "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
        "RABBITMQ_MNESIA_BASE": str(folder / "mnesia"),
        "RABBITMQ_LOG_BASE": str(folder / "log"),
    }
    with _program(folder, port, [str(RABBITMQ)], **environment):
        yield port, "guest:guest@"


@contextlib.contextmanager
def _ejabberd(folder):
    port = free_port()
    config = folder / "ejabberd.yml"
    config.write_text(EJABBERD_CONFIG.format(port=port))
    environment = {
        "HOME": str(folder),
        "ERL_LIBS": str(EJABBERD.parent),
        "EJABBERD_CONFIG_PATH": str(config),
        "EJABBERD_LOG_PATH": str(folder / "ejabberd.log"),
    }
    command = ["erl", "-noinput", "-mnesia", "dir", f'"{folder}/mnesia"', "-s", "ejabberd", "-eval", EJABBERD_USER]
    with _program(folder, port, command, **environment):
        # ejabberd's users have a host, and the address writes their @ as %40.
        yield port, "shoal%40localhost:secret@"


@contextlib.contextmanager
def _program(folder, port, command, **environment):
    """Run a broker in a session of its own until the block ends; return once its port answers."""
    log = folder / "broker.log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            cwd=folder,
            env={**os.environ, **environment},
            start_new_session=True,
        )
    try:
        said = lambda: f"{command[0]} does not answer: {log.read_text(errors='replace')[-2000:]}"  # noqa: E731
        until(lambda: process.poll() is not None or answers(port), said, START_S)
        assert process.poll() is None, said()
        yield
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
