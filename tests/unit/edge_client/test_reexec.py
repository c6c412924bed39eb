"""Re-execution of a device's program: the configuration is passed completely, and no password is exposed."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from edge_client.config import EdgeConfig
from edge_client.reexec import become, inherited_config
from shoal.errors import UsageError

PASSWORD = "correct-horse"
CONFIGS = [
    EdgeConfig(Path("dev-1"), Path("d.npz")),
    EdgeConfig(
        dir=Path("/var/lib/shoal/dev 1"),
        data=Path("data/\u00e4"),
        broker=f"mqtts://dev-1:{PASSWORD}@broker:8883",
        ca=Path("ca.pem"),
        cert=Path("c.pem"),
        key=Path("k.pem"),
        threads=3,
        once=True,
        log="debug",
    ),
]


class ExecutedError(Exception):
    """Raised in place of exec, which does not return."""


@pytest.fixture
def execve(monkeypatch):
    """Capture what `become` would execute: a list of (program, arguments, environment)."""
    calls = []

    def capture(program, arguments, environment):
        calls.append((program, arguments, environment))
        raise ExecutedError

    monkeypatch.setattr(os, "execve", capture)
    return calls


@pytest.fixture
def own_name():
    """The name of this process, restored after `inherited_config` has changed it."""
    path = Path("/proc/self/comm")
    before = path.read_text()
    yield path
    path.write_text(before)


def executed(execve, config):
    with pytest.raises(ExecutedError):
        become(config)
    (call,) = execve
    return call


def as_started(arguments):
    """Return sys.argv of ``python -m module a b`` (Python puts the module's file first)."""
    assert arguments[1] == "-m"
    return ["serving.py", *arguments[3:]]


@pytest.mark.parametrize("config", CONFIGS, ids=["defaults", "everything"])
def test_the_configuration_arrives_as_it_was(execve, own_name, config):
    _, arguments, _ = executed(execve, config)
    arrived = inherited_config(as_started(arguments))
    assert arrived == config
    assert [type(v) for v in (arrived.dir, arrived.data)] == [type(config.dir)] * 2
    assert type(arrived.ca) is type(config.ca)
    assert own_name.read_text() == "shoal-edge\n"


def test_it_becomes_the_serving_program_of_the_same_interpreter(execve, own_name):
    program, arguments, environment = executed(execve, CONFIGS[1])
    assert (program, arguments[:4]) == (
        sys.executable,
        [sys.executable, "-m", "edge_client.serving", "/var/lib/shoal/dev 1"],
    )
    handle = int(arguments[4])
    assert os.get_inheritable(handle)
    assert len(arguments) == 5
    assert {k: environment[k] for k in ("MALLOC_ARENA_MAX", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")} == {
        "MALLOC_ARENA_MAX": "1",
        "OMP_NUM_THREADS": "3",
        "OPENBLAS_NUM_THREADS": "3",
    }
    assert {k: v for k, v in os.environ.items() if environment.get(k) != v} == {
        k: v
        for k, v in os.environ.items()
        if k in ("MALLOC_ARENA_MAX", "OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS") and environment[k] != v
    }
    inherited_config(as_started(arguments))


def test_the_password_stands_where_only_the_two_processes_read(execve, own_name):
    """Neither in the arguments, which every user of the machine may read, nor in the environment; nor on any disk."""
    _, arguments, environment = executed(execve, CONFIGS[1])
    assert not [a for a in (*arguments, *environment.values()) if PASSWORD in a]
    handle = int(arguments[4])
    assert Path(f"/proc/self/fd/{handle}").readlink().name.startswith("memfd:")
    assert PASSWORD in inherited_config(as_started(arguments)).broker
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(handle)


def by_handle(data):
    """Return an open descriptor, as text, whose file holds ``data``."""
    handle = os.memfd_create("test")
    os.write(handle, data)
    os.lseek(handle, 0, os.SEEK_SET)
    return str(handle)


@pytest.mark.parametrize(
    "arguments",
    [
        lambda: ["serving.py"],
        lambda: ["serving.py", "dev-1"],
        lambda: ["serving.py", "dev-1", "--data"],
        lambda: ["serving.py", "dev-1", "987654"],
        lambda: ["serving.py", "dev-1", by_handle(b"")],
        lambda: ["serving.py", "dev-1", by_handle(b"{}")],
        lambda: ["serving.py", "dev-1", by_handle(b'{"dir": "d", "data": "x", "mask": 1}')],
    ],
    ids=["nothing", "no handle", "an option", "a closed handle", "an empty file", "no fields", "an unknown field"],
)
def test_started_by_hand_it_says_how_to(own_name, arguments):
    before = own_name.read_text()
    with pytest.raises(UsageError, match="not started by hand") as caught:
        inherited_config(arguments())
    assert caught.value.hint == "shoal-edge run DIRECTORY --data SOURCE"
    assert own_name.read_text() == before
