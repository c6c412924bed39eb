"""A fleet of real programs, each forked from a process that has done the slow imports, as those of `tests.helpers.calls` are.

A test starts fresh interpreters (`shoal.simulation.process_fleet.Stage`) where a program's memory, imports or arguments as other
processes see them matter.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import subprocess
from pathlib import Path

from shoal.simulation.process_fleet import ONE_THREAD, PROGRAMS, Stage
from tests.helpers.calls import FORKED, run_module

PR_SET_PDEATHSIG = 1


class ForkedStage(Stage):
    """A stage whose programs are forked; ``environment`` is added to ours."""

    def __init__(self, *arguments, environment=None, **options):
        self._environment = environment or {}
        super().__init__(*arguments, **options)

    def _launch(self, _name, package, arguments, log):
        environment = {**os.environ, **ONE_THREAD, "NO_COLOR": "1", **self._environment}
        return ForkedProgram(PROGRAMS[package], arguments, environment, log.name)


class ForkedProgram:
    """What stages and tests use of `subprocess.Popen`, for a program whose output goes to the end of the file ``log``.

    Its standard error goes to the file ``errors``, if there is one.
    """

    def __init__(self, module, arguments, environment, log, errors=None):
        self.args = [module, *arguments]
        streams = (os.devnull, log, errors or log)
        self._process = FORKED.Process(
            target=_run, args=(module, arguments, Path.cwd(), environment, streams), daemon=True
        )
        self._process.start()
        self.pid = self._process.pid

    def poll(self):
        """Return the exit status; None while the program runs."""
        return self._process.exitcode

    returncode = property(poll)

    def wait(self, timeout=None):
        """Wait for the end, and return the exit status.

        Raises:
            subprocess.TimeoutExpired: the program still runs after ``timeout`` seconds.
        """
        self._process.join(timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired(self.args, timeout)
        return status

    def send_signal(self, number):
        """Send a signal to a program that has not ended."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and its exit status is not here yet
                os.kill(self.pid, number)

    def kill(self):
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)


def _run(*arguments):
    """Run a program that ends with the process which it is forked from, as that one ends with the test process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    run_module(*arguments)
