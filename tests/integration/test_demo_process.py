"""Ctrl-C ends the demo and everything that it has started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.helpers.processes import core_limits, give_up_capabilities, inspectable
from tests.helpers.trees import ONE_THREAD, ROOT

pytest.importorskip("torch")

pytestmark = [pytest.mark.broker, pytest.mark.process, pytest.mark.torch]
START = "from shoal.cli import main; main()"
DEVICES = 8
START_S, STOP_S, POLL_S = 90.0, 20.0, 0.1


def processes():
    """Return (pid, start time) -> (parent's pid, name) of every process: a pid alone may be given away again."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            text = path.read_text()
        except (FileNotFoundError, ProcessLookupError):
            continue
        pid, _, rest = text.partition(" (")
        name, _, fields = rest.rpartition(") ")
        values = fields.split()
        if values[0] != "Z":
            found[int(pid), int(values[19])] = int(values[1]), name
    return found


def family(root):
    """Return the processes below ``root``, as `processes` gives them."""
    every, found, known = processes(), {}, {root}
    while True:
        more = {key: value for key, value in every.items() if value[0] in known and key not in found}
        if not more:
            return found
        found |= more
        known |= {pid for pid, _ in more}


def test_interrupted_demo_leaves_nothing(tmp_path):
    """Status 130, no traceback, no process and no directory of ours, while eight devices are at work."""
    log, folder = tmp_path / "log", tmp_path / "tmp"
    folder.mkdir()
    with log.open("wb") as handle:
        demo = subprocess.Popen(
            [sys.executable, "-c", START, "demo", "--devices", str(DEVICES)],
            cwd=ROOT,
            env={**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT), "TMPDIR": str(folder)},
            stdin=subprocess.DEVNULL,
            stdout=handle,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=give_up_capabilities,
        )
    started = {}
    try:
        end = time.monotonic() + START_S
        while sum(name == "shoal-edge" for _, name in family(demo.pid).values()) < DEVICES:
            assert demo.poll() is None, log.read_text()
            assert time.monotonic() < end, log.read_text()
            time.sleep(POLL_S)
        started = family(demo.pid)
        assert len(started) >= DEVICES + 2, started  # the aggregator and the broker
        assert list(folder.glob("shoal-demo-*"))
        assert not inspectable(demo.pid), "the owner's keys of the demo's fleet are in it"
        assert core_limits(demo.pid) == ("0", "0")
        demo.send_signal(signal.SIGINT)  # to it alone: the others must be ended by it
        assert demo.wait(STOP_S) == 130
        left = {key: value for key, value in processes().items() if key in started}
        assert left == {}
        assert "Traceback" not in log.read_text()
        assert list(folder.glob("shoal-demo-*")) == []
    finally:
        started |= family(demo.pid)
        if demo.poll() is None:
            demo.kill()
            demo.wait()
        for pid, _ in {key for key in processes() if key in started}:
            os.kill(pid, signal.SIGKILL)
