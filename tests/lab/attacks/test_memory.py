"""Neither other processes of the user nor core files can read the memory of a program that holds secrets.

The same for the serving programs: tests/integration/test_secrets_process.py.
"""

import pytest

from aggregator import membership as aggregators
from edge_client import membership as enrolment
from shoal.owner.keys.directory import FleetDirectory
from tests.helpers.trees import PROGRAMS, python

SCRIPT = """
import atexit, ctypes, resource, sys
module, sys.argv = sys.argv[1], sys.argv[1:]
PR_GET_DUMPABLE = 3
atexit.register(lambda: print("ended:", *resource.getrlimit(resource.RLIMIT_CORE),
                              ctypes.CDLL(None).prctl(PR_GET_DUMPABLE, 0, 0, 0, 0)))
from importlib import import_module
import_module(module).main()
"""


def end_of(program, *command):
    """Return core limits and dumpable flag with which ``program`` ends."""
    done = python(SCRIPT, PROGRAMS[program], *command)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()[-1]


def joined(folder):
    owner = FleetDirectory.create(folder / "owner", "reef", "mqtt://127.0.0.1:1883")
    owner.add_aggregator(aggregators.init(folder / "server").read_bytes())
    grant = owner.add_device(enrolment.init(folder / "dev", "dev-1").read_bytes())
    enrolment.join(folder / "dev", grant.read_bytes(), owner.fingerprint)
    return folder


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("shoal-fleet", ["show", "{}/owner"]),
        ("shoal-fleet", ["invite", "{}/owner"]),
        ("shoal-edge", ["init", "{}/new", "--name", "dev-2"]),
        ("shoal-edge", ["status", "{}/dev"]),
    ],
)
def test_owner_and_devices_leave_no_core(tmp_path, program, command):
    """The core limit is 0, for good, and PR_SET_DUMPABLE is off when a command that handles keys ends."""
    joined(tmp_path)
    assert end_of(program, *(c.format(tmp_path) for c in command)) == "ended: 0 0 0"


@pytest.mark.parametrize(
    ("program", "command"),
    [
        ("shoal-aggregator", ["config", "somewhere"]),
        ("shoal-aggregator", ["init", "{}/a"]),
        ("shoal", ["data", "list"]),
    ],
)
def test_no_other_program_leaves_a_core(tmp_path, program, command):
    """They hold no secret of a fleet's devices, and may be looked into."""
    assert end_of(program, *(c.format(tmp_path) for c in command)) == "ended: 0 0 1"


def test_the_check_can_fail():
    """A program that has forbidden nothing can be inspected."""
    done = python("import ctypes; print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))")
    assert done.stdout.strip() == "1"
