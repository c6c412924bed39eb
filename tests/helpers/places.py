"""A directory in which real programs are started, their logs, and a mosquitto with a fleet's own files."""

from __future__ import annotations

import os
import shutil
import socket
import subprocess
import sys
from contextlib import contextmanager, suppress

from shoal.owner.runs.plan import make_plan, write_run
from shoal.transport.local_broker import find_mosquitto
from tests.helpers import calls, waiting
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
        waiting.until(reached, lambda: self.log(name), WAIT_S, 0.1)

    def make_fleet(self, url, devices, *options, of_owner=()):
        """Make the owner's directory, the aggregator's and the broker's files with the programs, as a person would."""
        told = self.call("init", "shoal-fleet", "init", "owner", "--name", "reef", "--broker", url, *of_owner)
        self.call("server-init", "shoal-aggregator", "init", "server")
        self.call("add", "shoal-fleet", "add-aggregator", "owner", "server/aggregator.card")
        asked = [word for device in devices for word in ("--device", device)]
        self.call("config", "shoal-fleet", "broker-config", "owner", "broker", *options, *asked)
        self.call("add", "shoal-fleet", "add-aggregator", "owner", "server/aggregator.card")  # with password and CA
        grant, owner = "owner/grants/aggregator.grant", told.split("owner ")[1].split()[0]
        self.call("server-join", "shoal-aggregator", "join", "server", grant, "--owner", owner)

    def enrol(self, name):
        """Let a device join by the broker; return its line, which no log has."""
        told = self.call(f"token-{name}", "shoal-fleet", "invite", "owner")
        line = next(x for x in told.splitlines() if x.startswith("shoal1-"))
        (self.home / f"token-{name}.log").write_text(told.replace(line, "-"))  # that is where the line belongs
        asking = self.start(f"enrol-{name}", "shoal-edge", "enrol", name, stdin=line + "\n")
        self.until(lambda: "fingerprint " in self.log(f"enrol-{name}"), f"enrol-{name}")
        print_ = self.log(f"enrol-{name}").split("fingerprint ")[1].split()[0]
        self.call(f"approve-{name}", "shoal-fleet", "approve", "owner", print_, "--wait", "60")
        assert asking.wait(WAIT_S) == 0, self.log(f"enrol-{name}")
        return line

    def sign(self, owner, bundle, recipe, origins):
        """Let the owner sign a run and carry its file to the aggregator, where it appears whole; return the plan."""
        plan = make_plan(owner, bundle, recipe)
        path = write_run(owner, plan, bundle, origins)
        shutil.copy(path, self.home / "server" / "runs" / "new")
        (self.home / "server" / "runs" / "new").rename(self.home / "server" / "runs" / path.name)
        return plan

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
    return start_mosquitto(root, port, (folder / "shoal.conf").read_text() + extra)


def start_mosquitto(folder, port, config):
    """Start mosquitto with a configuration; return the process once it answers at the port. Its log is in ``folder``."""
    (folder / "test.conf").write_text(config)
    log = folder / "mosquitto.log"
    with log.open("wb") as out:
        process = subprocess.Popen([find_mosquitto(), "-c", str(folder / "test.conf")], stdout=out, stderr=out)

    def answers():
        assert process.poll() is None, log.read_text()
        with suppress(OSError), socket.create_connection(("127.0.0.1", port), timeout=1):
            return True
        return False

    waiting.until(answers, lambda: log.read_text(), WAIT_S)
    return process


@contextmanager
def mosquitto(folder, port, *lines):
    """Run mosquitto with these lines of configuration until the block ends, by root as root."""
    process = start_mosquitto(folder, port, "\n".join((*lines, *(["user root"] if os.geteuid() == 0 else []), "")))
    try:
        yield process
    finally:
        process.terminate()
        process.wait(10)
