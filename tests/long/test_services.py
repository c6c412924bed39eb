"""The services of the Debian packages under systemd: ready, watched, restarted or left alone, and stopped.

A Debian 12 with systemd is booted by systemd-nspawn, with a network of its own. `SHOAL_PACKAGES=dist` takes packages that
`make packages` has built.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from tests.long.conftest import BUILD_S
from tests.long.test_load import keep

FLEET = Path(__file__).with_name("serviced_fleet.sh")
TOOLS = ("mmdebstrap", "systemd-nspawn", "nsenter")
IN_THE_ROOT = "python3,mosquitto,adduser,libstdc++6,systemd,systemd-sysv,dbus"
BASE_S, BOOT_S, INSTALL_S, STEP_S = 600, 60, 300, 120
BROKER = "broker.example"
"""Another name of the machine itself."""
WATCHDOG_S = 5
POLL_S = 0.2
SERVICES = ("shoal-aggregator", "shoal-edge")

pytestmark = [pytest.mark.long, pytest.mark.timeout(BUILD_S + BASE_S + INSTALL_S + 8 * STEP_S)]


class Machine:
    """A booted root directory; calling it runs a shell command there as root."""

    def __init__(self, root, program):
        self.root, self.program = root, program
        self.leader = 0

    def booted(self):
        """Whether systemd runs in it; remembers its process."""
        children = Path(f"/proc/{self.program.pid}/task/{self.program.pid}/children").read_text().split()
        for child in children:
            if Path(f"/proc/{child}/comm").read_text().strip() == "systemd":
                self.leader = int(child)
                return "running" in self("systemctl is-system-running || true")
        return False

    def __call__(self, command, *, within_s=STEP_S):
        """Return stdout and stderr of a command that succeeds."""
        inside = ["nsenter", f"--target={self.leader}", "--mount", "--uts", "--ipc", "--pid", "--net"]
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
        done = subprocess.run(
            [*inside, "sh", "-c", command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )
        assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def show(self, unit, name):
        """Return a property of a unit."""
        return self(f"systemctl show --value --property={name} {unit}").strip()

    def set(self, unit, *lines):
        """Add settings to a service, and restart it."""
        folder = self.root / f"etc/systemd/system/{unit}.service.d"
        folder.mkdir(parents=True, exist_ok=True)
        name = f"{len(list(folder.iterdir()))}.conf"
        (folder / name).write_text("[Service]\n" + "".join(f"{line}\n" for line in lines))
        self(f"systemctl daemon-reload && systemctl restart {unit}")


def until(condition, within_s=STEP_S):
    """Wait until ``condition`` returns something true, and return that."""
    end_s = time.monotonic() + within_s
    while not (found := condition()):
        assert time.monotonic() < end_s, "too late"
        time.sleep(POLL_S)
    return found


@pytest.fixture(scope="module")
def machine(packages):
    """Return a booted Debian 12 with the packages installed, and a fleet that trains."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("only root can boot a root directory")
    folder = Path(tempfile.mkdtemp(prefix="shoal-services-", dir="/var/tmp"))
    command = ["mmdebstrap", "--variant=minbase", f"--include={IN_THE_ROOT}", "bookworm", str(folder)]
    made = subprocess.run(command, capture_output=True, text=True, timeout=BASE_S, check=False)
    if made.returncode:
        pytest.skip(f"mmdebstrap made no root: {made.stderr.strip().splitlines()[-1]}")
    (folder / "etc/hosts").write_text(f"127.0.0.1 localhost {BROKER}\n")
    (folder / "pk").mkdir()
    for name in (*SERVICES, "shoal-fleet"):
        shutil.copy(packages[name], folder / "pk")
    shutil.copy(FLEET, folder / "pk")
    options = ["--register=no", "--keep-unit", "--private-network", f"--machine=shoal-{os.getpid()}", "--boot"]
    with (folder.parent / f"{folder.name}.log").open("wb") as log:
        program = subprocess.Popen(
            ["systemd-nspawn", *options, "-D", str(folder)], stdin=subprocess.DEVNULL, stdout=log, stderr=log
        )
    machine = Machine(folder, program)
    try:
        wait_for_boot(machine, Path(log.name))
        machine("dpkg --install /pk/*.deb", within_s=INSTALL_S)
        machine("sh /pk/serviced_fleet.sh", within_s=INSTALL_S)
        yield machine
    finally:
        program.terminate()
        try:
            program.wait(BOOT_S)
        except subprocess.TimeoutExpired:
            program.kill()
            program.wait()
        Path(log.name).unlink()
        shutil.rmtree(folder, ignore_errors=True)


def wait_for_boot(machine, log):
    """Skip where systemd-nspawn can't boot, as in most containers."""
    end_s = time.monotonic() + BOOT_S
    while not (machine.program.poll() is None and machine.booted()):
        if machine.program.poll() is not None or time.monotonic() > end_s:
            said = log.read_text(errors="replace").strip().splitlines()
            pytest.skip(f"systemd-nspawn boots no root here: {said[-1] if said else 'it says nothing'}")
        time.sleep(POLL_S)


def test_service_says_what_it_does(machine):
    """A service is started once it is connected and says what it does."""
    for unit in SERVICES:
        assert (machine.show(unit, "Type"), machine.show(unit, "ActiveState")) == ("notify", "active")
        assert machine.show(unit, "WatchdogUSec") == "10min"
    until(lambda: "run 1, round" in machine.show("shoal-edge", "StatusText"))
    until(lambda: "round" in machine.show("shoal-aggregator", "StatusText"))
    for unit, directory in zip(SERVICES, ("/var/lib/shoal-aggregator", "/var/lib/shoal-edge"), strict=True):
        machine(f"runuser -u {unit} -- {unit} status {directory} --check")
    verified = machine("systemd-analyze verify /lib/systemd/system/shoal-*.service 2>&1")
    assert [line for line in verified.splitlines() if "shoal" in line] == []


def test_credential_replaces_the_address(machine):
    """A credential takes the place of the address in the grant."""
    for unit in SERVICES:
        file = machine.root / f"etc/shoal/{unit}.broker"
        file.write_text(f"mqtt://{BROKER}:1883\n")
        file.chmod(0o600)
        machine.set(unit, f"LoadCredential=broker:/etc/shoal/{unit}.broker")
    for unit, directory in zip(SERVICES, ("/var/lib/shoal-aggregator", "/var/lib/shoal-edge"), strict=True):
        shown = f"runuser -u {unit} -- {unit} status {directory}"
        until(lambda shown=shown: f"{BROKER}:1883" in machine(shown))


def test_loop_that_stands_still_is_restarted(machine):
    began_s = {}
    for unit in SERVICES:
        machine.set(unit, f"WatchdogSec={WATCHDOG_S}", "RestartSec=1")
        before, main = int(machine.show(unit, "NRestarts")), machine.show(unit, "MainPID")
        time.sleep(3 * WATCHDOG_S)  # fed, it goes on
        assert (machine.show(unit, "MainPID"), int(machine.show(unit, "NRestarts"))) == (main, before)
        began_s[unit] = time.monotonic()
        machine(f"kill -{int(signal.SIGSTOP)} {main}")
        until(lambda unit=unit, before=before: int(machine.show(unit, "NRestarts")) > before)
        began_s[unit] = round(time.monotonic() - began_s[unit], 1)
        assert "Watchdog timeout" in machine(f"journalctl --unit {unit} --no-pager")
        until(lambda unit=unit: machine.show(unit, "ActiveState") == "active")
    until(lambda: "run 1, round" in machine.show("shoal-edge", "StatusText"))
    version = machine("systemctl --version").split()[1]
    keep("services", {"systemd": version, "watchdog_s": WATCHDOG_S, "seconds_to_restart": began_s})


def test_service_ends_at_a_lasting_error(machine):
    """A service ends at an error that no restart mends."""
    before = machine.show("shoal-edge", "NRestarts")
    machine("cd /root/o && shoal-fleet revoke owner dev-1")
    until(lambda: machine.show("shoal-edge", "ActiveState") == "failed")
    time.sleep(WATCHDOG_S)  # longer than RestartSec
    assert machine.show("shoal-edge", "ActiveState") == "failed"
    assert (machine.show("shoal-edge", "ExecMainStatus"), machine.show("shoal-edge", "NRestarts")) == ("6", before)


def test_a_service_stops_without_a_failure(machine):
    machine("systemctl stop shoal-aggregator")
    assert machine.show("shoal-aggregator", "ActiveState") == "inactive"
    assert machine.show("shoal-aggregator", "Result") == "success"
