"""The limit on open files, raised in a process of its own."""

import subprocess
import sys

import pytest

SHOW = """
import resource
from shoal.util.server_process import raise_open_files_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (100, {hard}))
print(raise_open_files_limit({needed}))
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


@pytest.mark.parametrize(
    ("hard", "needed", "warning"),
    [(500, 64, ""), (500, 500, ""), (120, 121, "at most 120 files may be open, and 121 are needed")],
)
def test_the_soft_limit_becomes_the_hard_one(hard, needed, warning):
    done = subprocess.run(
        [sys.executable, "-c", SHOW.format(hard=hard, needed=needed)], capture_output=True, text=True, check=True
    )
    assert done.stdout.splitlines() == [warning, str(hard)]
