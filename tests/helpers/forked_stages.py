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

import numpy as np

from shoal.simulation.process_fleet import ONE_THREAD, PROGRAMS, Stage
from shoal.transport.local_broker import start_broker
from tests.helpers.calls import FORKED, run_module
from tests.helpers.tasks import INPUTS, logistic_bundle, samples

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


def write_samples(folder, names, inputs=INPUTS):
    """Write samples for each device to ``folder/NAME.npz``."""
    for seed, name in enumerate(names):
        x, y = samples(60, inputs, seed=seed)
        np.savez(folder / f"{name}.npz", x=x, y=y)


@contextlib.contextmanager
def stage_of(root, names, kind=ForkedStage, **options):
    """Yield (stage, broker) of a fleet with samples for each device in ``root/NAME.npz``; nothing runs but the broker."""
    write_samples(root, names)
    with start_broker("mosquitto", root / "broker") as broker, kind(root / "s", broker.url, names, **options) as stage:
        yield stage, broker


def begin(stage, recipe, bundle=None, schedule=None):
    """Let the owner sign a run of a logistic task from zeros, and carry it to the aggregator; return its plan."""
    bundle = bundle or logistic_bundle()
    return stage.add_run(bundle, np.zeros((1, bundle.length), np.float32), recipe, schedule)


def _run(*arguments):
    """Run a program that ends with the process which it is forked from, as that one ends with the test process."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
    run_module(*arguments)
