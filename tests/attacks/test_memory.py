"""What another process of the user, or a core file, gets of a program that holds secrets: nothing."""

import pytest

from fleet.directory import FleetDirectory
from tests.helpers.trees import python

SCRIPT = """
import atexit, ctypes, resource, sys
package, sys.argv = sys.argv[1], sys.argv[1:]
PR_GET_DUMPABLE = 3
atexit.register(lambda: print("ended:", resource.getrlimit(resource.RLIMIT_CORE)[0],
                              ctypes.CDLL(None).prctl(PR_GET_DUMPABLE, 0, 0, 0, 0)))
from importlib import import_module
import_module(package + ".cli").main()
"""


@pytest.mark.parametrize("package", ["fleet", "edge_client"])
def test_the_owner_and_devices_leave_no_core_and_can_not_be_inspected(tmp_path, package):
    """The core limit is 0 and PR_SET_DUMPABLE is off when a command that handles keys ends."""
    if package == "fleet":
        FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://127.0.0.1:1883")
        command = ["show", tmp_path / "owner"]
    else:
        command = ["init", tmp_path / "dev", "--name", "dev-1"]
    done = python(SCRIPT, package, *command)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "ended: 0 0"


def test_the_check_can_fail(tmp_path):
    """A program that has forbidden nothing can be inspected."""
    done = python("import ctypes; print(ctypes.CDLL(None).prctl(3, 0, 0, 0, 0))")
    assert done.stdout.strip() == "1"
