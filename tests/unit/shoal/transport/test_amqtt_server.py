"""The script that serves amqtt: on loopback only, ended with its parent, and without any module of Shoal."""

import ast
import asyncio
import ctypes
import os
import signal
import sys
import types

import pytest

from shoal.transport import amqtt_server

PR_SET_PDEATHSIG = 1


class StartedError(Exception):
    """Ends the server as soon as its broker has started."""


@pytest.fixture
def calls(monkeypatch):
    """Record the calls of prctl and the brokers that start, and call neither."""
    made = {"prctl": [], "broker": []}

    class Broker:
        def __init__(self, config):
            self.config = config

        async def start(self):
            made["broker"].append(self.config)
            raise StartedError

    libc = types.SimpleNamespace(prctl=lambda *arguments: made["prctl"].append(arguments))
    monkeypatch.setattr(ctypes, "CDLL", lambda _name: libc)
    monkeypatch.setitem(sys.modules, "amqtt", types.ModuleType("amqtt"))
    monkeypatch.setitem(sys.modules, "amqtt.broker", types.SimpleNamespace(Broker=Broker))
    return made


def test_serves_locally_while_parent_lives(calls, monkeypatch):
    """A broker without passwords must not be reachable from other machines, nor outlive the program that needs it."""
    monkeypatch.setattr(sys, "argv", ["amqtt_server.py", "1884", str(os.getppid())])
    with pytest.raises(StartedError):
        amqtt_server.main()
    assert calls["prctl"] == [(PR_SET_PDEATHSIG, signal.SIGKILL)]
    (config,) = calls["broker"]
    assert config["listeners"] == {"default": {"type": "tcp", "bind": "127.0.0.1:1884"}}


def test_does_not_start_without_parent(calls, monkeypatch):
    """The kernel sends no signal for a parent that ended before prctl."""
    monkeypatch.setattr(sys, "argv", ["amqtt_server.py", "1884", str(os.getppid() + 1)])
    with pytest.raises(SystemExit) as caught:
        amqtt_server.main()
    assert caught.value.code == "the parent is gone already"
    assert calls["broker"] == []
    assert calls["prctl"] == [(PR_SET_PDEATHSIG, signal.SIGKILL)], "asked for before the parent is looked at"


def test_it_serves_until_it_is_killed(calls, monkeypatch):
    async def start(_broker):
        pass

    monkeypatch.setattr(sys.modules["amqtt.broker"].Broker, "start", start)

    async def serve_for_a_moment():
        await asyncio.wait_for(amqtt_server._serve(1884), 0.01)

    with pytest.raises(TimeoutError):
        asyncio.run(serve_for_a_moment())


def test_imports_the_standard_library_only():
    """It is started by path, so Shoal's packages may not be importable."""
    with open(amqtt_server.__file__, encoding="utf-8") as file:  # noqa: PTH123
        tree = ast.parse(file.read())
    names = {a.name for n in ast.walk(tree) if isinstance(n, ast.Import) for a in n.names}
    names |= {n.module for n in ast.walk(tree) if isinstance(n, ast.ImportFrom)}
    assert {n.partition(".")[0] for n in names} <= {*sys.stdlib_module_names, "amqtt"}
