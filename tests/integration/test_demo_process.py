"""Ctrl-C ends the demo and everything that it has started."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time

import psutil
import pytest

from tests.helpers.processes import core_limits, give_up_capabilities, inspectable
from tests.helpers.trees import ONE_THREAD, ROOT

pytest.importorskip("torch")

pytestmark = [pytest.mark.broker, pytest.mark.process, pytest.mark.torch]
START = "from shoal.cli import main; main()"
DEVICES = 8
START_S, STOP_S, POLL_S = 90.0, 20.0, 0.1


def living(processes):
    """Return process -> name of those that live; each knows its start, since a pid may be given away again."""
    found = {}
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                found[process] = process.name()
    return found


def family(root):
    """Return the living processes below a program."""
    return living(psutil.Process(root).children(recursive=True))


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
        while list(family(demo.pid).values()).count("shoal-edge") < DEVICES:
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
        assert living(started) == {}
        assert "Traceback" not in log.read_text()
        assert list(folder.glob("shoal-demo-*")) == []
    finally:
        if demo.poll() is None:
            started |= family(demo.pid)
            demo.kill()
            demo.wait()
        for process in living(started):
            process.kill()
