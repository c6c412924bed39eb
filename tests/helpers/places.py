"""A directory in which real programs are started, their logs, and a mosquitto with a fleet's own files."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time

from shoal.transport.local_broker import find_mosquitto
from tests.helpers import calls
from tests.helpers.processes import give_up_capabilities
from tests.helpers.trees import ONE_THREAD, PROGRAMS, ROOT

WAIT_S = 90.0


class Place:
    """A directory in which programs are started, and their logs; ``environment`` is added to ours."""

    def __init__(self, home, **environment):
        self.home = home
        self.environment = environment
        self.running = {}
        self.names = []

    def start(self, name, program, *arguments, stdin=None):
        self.names.append(name)
        with (self.home / f"{name}.log").open("wb") as log:
            process = subprocess.Popen(
                [sys.executable, "-c", f"from {PROGRAMS[program]} import main; main()", *map(str, arguments)],
                cwd=self.home,
                env=self._variables(),
                stdin=subprocess.PIPE if stdin else subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                preexec_fn=give_up_capabilities,
            )
        if stdin:
            process.stdin.write(stdin.encode())
            process.stdin.close()
        self.running[name] = process
        return process

    def call(self, name, program, *arguments, stdin=None, status=0):
        self.names.append(name)
        done = calls.call(program, list(map(str, arguments)), self.home, self._variables(), stdin or "")
        (self.home / f"{name}.log").write_text(done.out + done.err)
        assert done.status == status, self.log(name)
        return self.log(name)

    def _variables(self):
        return {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT), **self.environment}

    def log(self, name):
        return (self.home / f"{name}.log").read_text()

    def until(self, reached, name):
        end = time.monotonic() + WAIT_S
        while not reached():
            assert time.monotonic() < end, self.log(name)
            time.sleep(0.1)

    def finish(self):
        for process in self.running.values():
            if process.poll() is None:
                process.kill()
            process.wait()


def start_generated(folder, root, port, user="root"):
    """Start mosquitto with the files that `shoal-fleet broker-config` wrote to ``folder``; return the process.

    Its log is in ``root``, and its saved state in ``folder``. Started by root it runs as ``user``, by default as root.
    """
    extra = f"user {user}\n" if user and os.geteuid() == 0 else ""
    (root / "test.conf").write_text((folder / "shoal.conf").read_text() + extra)
    log = root / "mosquitto.log"
    with log.open("wb") as out:
        process = subprocess.Popen([find_mosquitto(), "-c", str(root / "test.conf")], stdout=out, stderr=out)
    end = time.monotonic() + WAIT_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1).close()
        except OSError:
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < end
            time.sleep(0.02)
        else:
            return process
