"""Calls of the programs, each in a process of its own, forked from one that has done the slow imports.

A test starts a fresh interpreter instead where a program's imports, its arguments as other processes see them, or a library
that is loaded before all others matter.
"""

from __future__ import annotations

import importlib
import multiprocessing
import os
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from shoal.transport import probe
from tests.helpers.trees import PROGRAMS

LIMIT_S = 90.0
ANSWER_S = 0.5
"""How long `doctor` waits for each thing that a broker may send: here it comes at once or never."""
FORKED = multiprocessing.get_context("forkserver")
FORKED.set_forkserver_preload(
    [
        *PROGRAMS.values(),
        "numpy",
        "onnxruntime",
        "torch",
        "shoal.owner.keys.directory",
        "shoal_lab.experiments.wild.runs",
        "shoal.membership.directory",
        "shoal.page",
        "shoal.transport.mqtt",
        "edge_client.runtime",
        "aggregator.daemon",
        "aggregator.run_service",
        # Typer and cryptography import these when they are first used.
        "typer._adapters",
        "cryptography.hazmat.backends.openssl.backend",
        __name__,
    ]
)


@dataclass(frozen=True)
class Done:
    """Exit status and output of a call that has ended."""

    status: int
    out: str
    err: str


def call(program, arguments, cwd, environment, stdin=""):
    """Run a program, or the ``main`` of a module with this name, and return its `Done`.

    Raises:
        TimeoutError: it took more than LIMIT_S, and was killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        given, out, err = (Path(folder, name) for name in ("in", "out", "err"))
        given.write_text(stdin)
        module = PROGRAMS.get(program, program)
        process = FORKED.Process(target=run_module, args=(module, arguments, cwd, environment, (given, out, err)))
        process.start()
        process.join(LIMIT_S)
        if process.is_alive():
            process.kill()
            process.join()
            raise TimeoutError(f"{program} {arguments}: more than {LIMIT_S:g} s")
        return Done(process.exitcode, out.read_text(), err.read_text())


def run_module(module, arguments, cwd, environment, files):
    """Run the ``main`` of a module in this process, which was forked; ``files`` are its three standard streams."""
    for number, path in enumerate(files):
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(handle, number)
        os.close(handle)
    probe.ANSWER_S = ANSWER_S
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    sys.argv[1:] = arguments
    importlib.import_module(module).main()
