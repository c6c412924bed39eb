"""Messages to systemd and credentials from it, with a socket that stands for the manager's."""

import logging
import os
import socket

import pytest

from shoal.errors import ConfigError
from shoal.util.service_manager import (
    MOST_CREDENTIAL_BYTES,
    STATUS_EVERY_S,
    ServiceManager,
    credential,
    read_credential,
)


@pytest.fixture(params=["path", "abstract"])
def told(request, tmp_path):
    """Return the manager's end, with its address as NOTIFY_SOCKET has it."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as end:
        name = str(tmp_path / "notify") if request.param == "path" else f"@shoal-test-{os.getpid()}-{id(tmp_path)}"
        end.bind(name if request.param == "path" else f"\0{name[1:]}")
        end.settimeout(2)
        yield end, name


def heard(end):
    """Return the datagrams that have come."""
    end.setblocking(False)
    found = []
    while True:
        try:
            found.append(end.recv(4096).decode())
        except BlockingIOError:
            return found


def test_a_service_is_ready_alive_and_stops(told):
    end, address = told
    manager = ServiceManager.from_environment({"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "40000000"})
    manager.ready("serving\nreef")
    for now_s in (0.0, 9.0, 10.0, 10.5, 25.0):
        manager.alive(now_s)
    manager.stopping()
    assert heard(end) == ["READY=1\nSTATUS=serving reef", *["WATCHDOG=1"] * 3, "STOPPING=1"]


def test_status_line_is_sent_when_it_changes(told):
    end, address = told
    manager = ServiceManager(address)
    manager.ready("round 1")
    assert manager.wants_status(0.0)
    for now_s, text in ((0.0, "round 1"), (5.0, "round 2"), (9.0, "round 2")):
        manager.status(text, now_s)
    assert not manager.wants_status(9.0 + STATUS_EVERY_S / 2)
    assert manager.wants_status(9.0 + STATUS_EVERY_S)
    assert heard(end) == ["READY=1\nSTATUS=round 1", "STATUS=round 2"]


def test_without_a_watchdog_nothing_is_said(told):
    """Without a watchdog or for another process nothing is said."""
    end, address = told
    for extra in ({}, {"WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(os.getpid() + 1)}):
        manager = ServiceManager.from_environment({"NOTIFY_SOCKET": address, **extra})
        manager.alive(100.0)
    own = ServiceManager.from_environment(
        {"NOTIFY_SOCKET": address, "WATCHDOG_USEC": "1000000", "WATCHDOG_PID": str(os.getpid())}
    )
    own.alive(100.0)
    assert heard(end) == ["WATCHDOG=1"]


def test_absent_manager_is_told_of_once(tmp_path, caplog):
    """A manager that is away stops nothing; without one nothing is sent."""
    manager = ServiceManager(str(tmp_path / "nobody"))
    with caplog.at_level(logging.WARNING, "shoal"):
        manager.ready("serving")
        manager.stopping()
        none = ServiceManager.from_environment({})
        none.ready("serving")
        none.alive(1.0)
        none.stopping()
    assert not none.wants_status(100.0)
    assert [record.getMessage() for record in caplog.records] == ["the service manager can't be reached"]
    with pytest.raises(ConfigError, match="WATCHDOG_USEC is 'soon', not a number of microseconds"):
        ServiceManager.from_environment({"WATCHDOG_USEC": "soon"})


def test_credentials_are_in_the_folder(tmp_path):
    """Credentials are files in the folder that the manager names."""
    (tmp_path / "broker").write_text("mqtt://a:b@host\n")
    environment = {"CREDENTIALS_DIRECTORY": str(tmp_path)}
    path = credential("broker", environment)
    assert read_credential(path) == "mqtt://a:b@host"
    assert credential("other", environment) is None
    assert credential("broker", {}) is None


@pytest.mark.parametrize(
    ("data", "message"), [(b"\xff\xfe", "is no text"), (b"x" * (MOST_CREDENTIAL_BYTES + 1), "more than 4096 bytes")]
)
def test_credential_of_another_form(tmp_path, data, message):
    """A credential of another form is refused."""
    (tmp_path / "broker").write_bytes(data)
    with pytest.raises(ConfigError, match=message):
        read_credential(tmp_path / "broker")
