"""Run the programs as a user does: each in a process of its own, with its output captured."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass

import numpy as np
import pytest

from aggregator import membership as aggregator_membership
from edge_client import membership as enrolment
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.keys.vault import ROSTER_FILE
from shoal.owner.task_compiler.signed import Source, write_signed
from shoal.util.files import write_private
from tests.helpers import calls
from tests.helpers.tasks import logistic_bundle
from tests.helpers.trees import ONE_THREAD

BROKER = "mqtt://127.0.0.1:1"
"""Nobody listens on port 1."""


@dataclass(frozen=True)
class Transcript:
    """Output and exit status of a call."""

    status: int
    out: str
    err: str

    @property
    def last(self):
        """The last line of data."""
        return self.out.splitlines()[-1]

    @property
    def data(self):
        """The one JSON object of a --json call."""
        (line,) = self.out.splitlines()
        document = json.loads(line)
        assert (document["schema"], document["ok"]) == (1, True)
        return document["data"]

    @property
    def error(self):
        """The one JSON object of a --json call that failed."""
        (line,) = self.out.splitlines()
        document = json.loads(line)
        assert (document["schema"], document["ok"]) == (1, False)
        return document["error"]


IMPATIENT = {"SHOAL_FLEET_WAIT": "3", "SHOAL_FLEET_SILENCE": "0.5"}
"""The owner's commands wait less for answers, which come at once here or never."""


class Person:
    """Calls the programs in one directory and remembers every line that was printed or passed."""

    def __init__(self, home):
        self.home = home
        self.seen = []

    def __call__(self, program, *arguments, status=0, **environment):
        arguments = [str(a) for a in arguments]
        done = calls.call(program, arguments, self.home, {**os.environ, **ONE_THREAD, **IMPATIENT, **environment})
        self.seen += [*arguments, done.out, done.err]
        assert done.status == status, done.err
        assert "Traceback" not in done.err
        return Transcript(done.status, done.out, done.err)


@pytest.fixture
def call(tmp_path):
    """Call a program: ``call("shoal-edge", "init", ..., status=0)``."""
    return Person(tmp_path)


def founded(home, broker, *names):
    """Make a fleet as the programs make it, with an aggregator and devices that have joined; return the owner's directory."""
    owner = FleetDirectory.create(home / "owner", "reef", broker)
    grant = owner.add_aggregator(aggregator_membership.init(home / "server").read_bytes())
    aggregator_membership.join(home / "server", grant.read_bytes(), owner.fingerprint)
    for name in names:
        grant = owner.add_device(enrolment.init(home / name, name).read_bytes())
        enrolment.join(home / name, grant.read_bytes(), owner.fingerprint)
    write_private(home / "server" / ROSTER_FILE, owner.roster_bytes)
    return owner


@pytest.fixture
def fleet(call):
    """A fleet with an aggregator and one device that has joined; returns the fingerprint."""
    return founded(call.home, BROKER, "dev-1").fingerprint


@pytest.fixture
def task(call, fleet):
    """A signed task, made without torch; returns its directory's name."""
    source = Source("logistic", {"inputs": 4, "classes": 3})
    write_signed(logistic_bundle(), source, FleetDirectory(call.home / "owner").owner, call.home / "task")
    return "task"


@pytest.fixture
def data(call):
    """Samples that fit the task, in ``d.npz``."""
    np.savez(call.home / "d.npz", x=np.zeros((9, 4), np.float32), y=np.zeros(9, np.int64))
