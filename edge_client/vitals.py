"""The condition of the machine that a device runs on: disk, memory, load, temperature, battery.

The figures are read from /proc and /sys. One that a machine does not have, or does not show to this user, is None. They are
measured only if the device's operator asks for them (`shoal-edge run --vitals`).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from shoal.protocol.messages import FULL_PERCENT, Vitals
from shoal.util.files import free_bytes_of

EVERY_S: Final = 600.0
"""Interval at which a device reports its vitals. Each report is one message of some 400 bytes."""
COLDEST_C: Final = -60.0
HOTTEST_C: Final = 200.0
"""Sensors that read less or more are broken."""
_MEMORY: Final = re.compile(r"^(MemTotal|MemAvailable):\s+(\d+) kB$", re.M)
CHARGING: Final = {"Charging": True, "Full": True, "Discharging": False, "Not charging": False}


def measure(directory: Path, root: Path = Path("/")) -> Vitals:
    """Return the machine's vitals.

    Args:
        directory: the device's, for the free disk space.
        root: the root of /proc and /sys.
    """
    memory = {name: 1024 * int(kib) for name, kib in _MEMORY.findall(_text(root / "proc/meminfo"))}
    percent, charging = _battery(root / "sys/class/power_supply")
    return Vitals(
        uptime_s=_uptime_s(root / "proc/uptime"),
        disk_free_bytes=free_bytes_of(directory),
        memory_bytes=memory.get("MemTotal"),
        memory_free_bytes=memory.get("MemAvailable"),
        load=_load(root / "proc/loadavg"),
        cores=os.cpu_count(),
        temperature_c=max(_temperatures(root / "sys/class/thermal"), default=None),
        battery_percent=percent,
        charging=charging,
    )


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="ascii", errors="replace").strip()
    except OSError:
        return ""  # this machine does not have it


def _uptime_s(path: Path) -> int | None:
    found = re.match(r"\d+", _text(path))
    return int(found[0]) if found else None


def _load(path: Path) -> float | None:
    found = re.match(r"\d+(\.\d+)?", _text(path))
    return float(found[0]) if found else None


def _temperatures(folder: Path) -> Iterator[float]:
    """Yield the temperatures of all sensors in degrees Celsius."""
    for path in sorted(folder.glob("thermal_zone*/temp")):
        text = _text(path)
        if re.fullmatch(r"-?\d{1,7}", text) and COLDEST_C <= int(text) / 1000 <= HOTTEST_C:
            yield int(text) / 1000


def _battery(folder: Path) -> tuple[int | None, bool | None]:
    """Return the charge of the first battery in percent, and whether it is being charged or full."""
    for path in sorted(folder.glob("*/capacity")):
        text = _text(path)
        if _text(path.with_name("type")) == "Battery" and re.fullmatch(r"\d{1,3}", text) and int(text) <= FULL_PERCENT:
            return int(text), CHARGING.get(_text(path.with_name("status")))
    return None, None
