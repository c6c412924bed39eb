"""The condition of a machine, read from a tree like /proc and /sys."""

import pytest

from edge_client.vitals import measure
from shoal.util import files


@pytest.fixture
def machine(tmp_path):
    """Write files of a machine's /proc and /sys below a root, and return the root and a device's directory."""
    root, device = tmp_path / "root", tmp_path / "device"
    device.mkdir()

    def write(files):
        for name, text in files.items():
            path = root / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return measure(device, root)

    return write


FILES = {
    "proc/uptime": "93784.21 1234.5\n",
    "proc/loadavg": "0.52 0.40 0.31 1/123 4567\n",
    "proc/meminfo": "MemTotal:        1000000 kB\nMemFree:          1 kB\nMemAvailable:     250000 kB\n",
    "sys/class/thermal/thermal_zone0/temp": "48312\n",
    "sys/class/thermal/thermal_zone1/temp": "51000\n",
    "sys/class/power_supply/AC/type": "Mains\n",
    "sys/class/power_supply/BAT0/type": "Battery\n",
    "sys/class/power_supply/BAT0/capacity": "80\n",
    "sys/class/power_supply/BAT0/status": "Discharging\n",
}


def test_all_figures_of_a_machine(machine):
    """A machine without any of it has no figures."""
    bare = machine({})
    figures = (bare.uptime_s, bare.load, bare.temperature_c, bare.memory_bytes, bare.battery_percent)
    assert set(figures) == {None}
    found = machine(FILES)
    assert (found.uptime_s, found.load, found.temperature_c) == (93784, 0.52, 51.0)
    assert (found.memory_bytes, found.memory_free_bytes) == (1_024_000_000, 256_000_000)
    assert (found.battery_percent, found.charging) == (80, False)
    assert found.disk_free_bytes > 0
    assert found.cores >= 1


@pytest.mark.parametrize(
    ("name", "text", "figure"),
    [
        ("sys/class/thermal/thermal_zone0/temp", "-273000", "temperature_c"),
        ("sys/class/thermal/thermal_zone0/temp", "hot", "temperature_c"),
        ("sys/class/power_supply/BAT0/capacity", "255", "battery_percent"),
        ("sys/class/power_supply/BAT0/type", "UPS", "battery_percent"),
        ("proc/uptime", "long", "uptime_s"),
        ("proc/meminfo", "MemTotal: many", "memory_bytes"),
    ],
)
def test_broken_sensor_gives_no_figure(machine, name, text, figure):
    """A broken sensor or file gives no figure."""
    files = {k: v for k, v in FILES.items() if "zone1" not in k}
    assert getattr(machine(files | {name: text}), figure) is None


def test_a_disk_that_fails_gives_no_figure(machine, monkeypatch):
    def fail(_directory):
        raise OSError("gone")

    monkeypatch.setattr(files, "free_bytes", fail)
    assert machine(FILES).disk_free_bytes is None
