"""The Debian packages, in a root directory of their own: installed, used by a fleet, upgraded, removed and purged.

`SHOAL_PACKAGES=dist` takes packages that `make packages` has built; without it they are built. The root has no network but
its own loopback interface, so that nothing is fetched while packages are installed.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from pathlib import Path

import pytest

from tests.long.conftest import BUILD_S
from tests.long.test_load import keep

FLEET = Path(__file__).with_name("installed_fleet.sh")
TOOLS = ("mmdebstrap", "dpkg-deb", "unshare", "chroot")
IN_THE_ROOT = "python3,mosquitto,adduser,libstdc++6"
LIMITS_MB = {"shoal-edge": 170, "shoal-edge-lite": 105}
"""Most space of a device's package on a disk."""
BASE_S, FLEET_S, STEP_S = 600, 300, 300
LOOPBACK = """
import fcntl, socket, struct
with socket.socket() as any_socket:
    SIOCSIFFLAGS, IFF_UP, IFF_RUNNING = 0x8914, 0x1, 0x40
    fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH14s", b"lo", IFF_UP | IFF_RUNNING, b""))
"""

pytestmark = [pytest.mark.long, pytest.mark.timeout(BASE_S + BUILD_S + 2 * FLEET_S + 4 * STEP_S)]


@pytest.fixture(scope="module")
def root():
    """Return a root directory with Debian 12, Python, and mosquitto, and nothing of ours."""
    missing = [tool for tool in TOOLS if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}")
    if os.geteuid() != 0:
        pytest.skip("only root can change the root directory and install packages in it")
    # On a disk, where tmp_path may not be: with torch twice it takes 2.5 GB.
    folder = Path(tempfile.mkdtemp(prefix="shoal-debian-", dir="/var/tmp"))
    command = ["mmdebstrap", "--variant=minbase", f"--include={IN_THE_ROOT}", "bookworm", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=BASE_S, check=False)
    if done.returncode:
        pytest.skip(f"mmdebstrap made no root: {done.stderr.strip().splitlines()[-1]}")
    (folder / "tmp/loopback.py").write_text(LOOPBACK)
    shutil.copy(FLEET, folder / "tmp/fleet.sh")
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


class Inside:
    """Runs shell commands in the root, each in namespaces of its own that end with it."""

    def __init__(self, root):
        self.root = root

    def __call__(self, command, *, status=0, within_s=STEP_S):
        namespaces = [
            "unshare",
            "--mount",
            "--pid",
            "--net",
            "--fork",
            "--kill-child",
            f"--mount-proc={self.root}/proc",
        ]
        shell = ["chroot", str(self.root), "sh", "-c", f"python3 /tmp/loopback.py && {command}"]
        environment = {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LANG": "C.UTF-8"}
        done = subprocess.run(
            [*namespaces, *shell], env=environment, capture_output=True, text=True, timeout=within_s, check=False
        )
        assert done.returncode == status, f"{command}\n{done.stdout}\n{done.stderr}"
        return done.stdout + done.stderr

    def exists(self, path):
        return os.path.lexists(self.root / path.lstrip("/"))

    def mode(self, path):
        return f"{(self.root / path.lstrip('/')).stat().st_mode & 0o7777:04o}"

    def used_mb(self, path):
        """Return the space of a directory on the disk, in MB (10^6 bytes), counted as du does."""
        return int(self(f"du -s --block-size=1 {path}").split()[0]) / 1e6


@pytest.fixture(scope="module")
def inside(root):
    return Inside(root)


@pytest.fixture(scope="module")
def figures():
    """The measured figures, which the last test keeps."""
    return {"packages": {}}


def install(inside, packages, *names):
    """Install packages as a user does, without the network."""
    for name in names:
        shutil.copy(packages[name], inside.root / "tmp" / f"{name}.deb")
    return inside(f"dpkg --install {' '.join(f'/tmp/{name}.deb' for name in names)}")


def test_they_are_installed(inside, packages, figures):
    began_s = time.monotonic()
    install(inside, packages, "shoal-edge", "shoal-aggregator", "shoal-fleet")
    figures["seconds_to_install"] = round(time.monotonic() - began_s, 1)
    for name in ("shoal-edge", "shoal-aggregator", "shoal-fleet"):
        size_mb = inside.used_mb(f"/opt/{name}")
        figures["packages"][name] = {"installed_mb": round(size_mb, 1), "file_mb": packages[name].stat().st_size / 1e6}
        assert size_mb <= LIMITS_MB.get(name, size_mb)
        assert inside(f"{name} --version").startswith(f"{name} 0.")
    for user in ("shoal-edge", "shoal-aggregator"):
        assert "/usr/sbin/nologin" in inside(f"getent passwd {user}")
        assert inside(f"stat --format '%U %G %a' /var/lib/{user}").strip() == f"{user} {user} 700"
        assert inside.mode(f"/etc/shoal/{user.removeprefix('shoal-')}.env") == "0600"
        assert inside.mode(f"/lib/systemd/system/{user}.service") == "0644"
    assert inside("dpkg --verify shoal-edge shoal-aggregator shoal-fleet") == ""


def test_aggregators_package_has_no_masks(inside):
    """The aggregators package has no code of masks."""
    assert inside.exists("/opt/shoal-fleet/lib/python3.11/site-packages/crypto/mask")
    for part in ("crypto/mask", "edge_client", "shoal/owner", "shoal/task"):
        assert not inside.exists(f"/opt/shoal-aggregator/lib/python3.11/site-packages/{part}")
    for part in ("aggregator", "shoal/owner", "torch"):
        assert not inside.exists(f"/opt/shoal-edge/lib/python3.11/site-packages/{part}")


def test_a_fleet_of_them_trains(inside, figures):
    """Broker, aggregator and three devices, one of which enrols; then the doctors and the health checks."""
    began_s = time.monotonic()
    told = inside("sh /tmp/fleet.sh", within_s=FLEET_S)
    figures["seconds_of_the_fleet"] = round(time.monotonic() - began_s, 1)
    assert "the fleet has trained\n" in told, told  # the programs' notes, on stderr, come after it
    assert "failure " not in told
    assert "executor: ONNX Runtime" in told
    assert "running, connected to mqtt://127.0.0.1:1883" in told


def test_an_upgrade_keeps_settings_and_state(inside, packages):
    inside("echo SHOAL_EDGE_DATA=/srv/dev-3.npz >> /etc/shoal/edge.env")
    install(inside, packages, "shoal-edge")
    assert "SHOAL_EDGE_DATA=/srv/dev-3.npz" in inside("tail -n 1 /etc/shoal/edge.env")
    assert "finished: True" in inside("runuser -u shoal-edge -- shoal-edge status /var/lib/shoal-edge")


def test_device_changes_to_lite_package(inside, packages, figures):
    """Keys, models and settings stay, also when the first package is purged; numpy computes the same task."""
    inside("dpkg --remove shoal-edge")
    assert not inside.exists("/opt/shoal-edge")
    assert not inside.exists("/usr/bin/shoal-edge")
    assert inside.exists("/etc/shoal/edge.env")
    install(inside, packages, "shoal-edge")
    # Both have the same files: dpkg removes the one to install the other.
    assert "removing shoal-edge in favour of shoal-edge-lite" in install(inside, packages, "shoal-edge-lite")
    size_mb = inside.used_mb("/opt/shoal-edge")
    figures["packages"]["shoal-edge-lite"] = {
        "installed_mb": round(size_mb, 1),
        "file_mb": packages["shoal-edge-lite"].stat().st_size / 1e6,
    }
    assert size_mb <= LIMITS_MB["shoal-edge-lite"]
    told = inside("runuser -u shoal-edge -- shoal-edge evaluate /var/lib/shoal-edge /srv/dev-3.npz")
    assert "accuracy" in told
    inside("dpkg --purge shoal-edge")
    assert "SHOAL_EDGE_DATA=/srv/dev-3.npz" in inside("tail -n 1 /etc/shoal/edge.env")
    doctor = "runuser -u shoal-edge -- shoal-edge doctor /var/lib/shoal-edge --data /srv/dev-3.npz"
    assert "ok       executor: numpy" in inside(doctor, status=10)  # without a broker


def test_purged_they_leave_nothing(inside, figures):
    inside("dpkg --purge shoal-edge-lite shoal-aggregator shoal-fleet")
    left = inside("ls -d /opt/shoal* /etc/shoal /var/lib/shoal* /usr/bin/shoal* /lib/systemd/system/shoal* || true")
    assert [line for line in left.splitlines() if line.startswith("/")] == []
    assert inside("getent passwd | grep -c shoal", status=1).strip() == "0"
    keep("debian-packages", figures)
