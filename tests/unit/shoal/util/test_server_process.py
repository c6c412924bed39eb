"""The cores that a process may use, by affinity and by quotas of control groups.

The limit on open files, raised in a process of its own.
"""

import os
import subprocess
import sys

import pytest

from shoal.util.server_process import usable_cores

CORES = len(os.sched_getaffinity(0))


@pytest.fixture
def hierarchy(tmp_path):
    """Return a function that writes the quotas of a hierarchy and returns the usable cores in its innermost group."""

    def usable(*quotas, name="/system.slice/shoal.service"):
        group = tmp_path / "cgroup"
        for part, quota in zip(("", *name.strip("/").split("/")), quotas, strict=True):
            group = group / part
            group.mkdir(exist_ok=True)
            if quota is not None:
                (group / "cpu.max").write_text(quota)
        own = tmp_path / "own"
        own.write_text(f"12:cpu,cpuacct:/old\n0::{name}\n")
        return usable_cores(tmp_path / "cgroup", own)

    return usable


@pytest.mark.parametrize(
    ("quotas", "expected"),
    [
        ((None, "max 100000\n", "max 100000\n"), CORES),
        ((None, "max 100000\n", "50000 100000\n"), 1),
        ((None, "100000 100000\n", "max 100000\n"), 1),
        ((None, "max 100000\n", "120000 100000\n"), min(CORES, 2)),
        ((None, "max 100000\n", "900000000 100000\n"), CORES),
        ((None, None, "what is this\n"), CORES),
    ],
)
def test_least_quota_of_the_groups_counts(hierarchy, quotas, expected):
    assert hierarchy(*quotas) == expected


def test_affinity_counts_without_groups(tmp_path):
    """Without control groups the affinity counts."""
    assert usable_cores(tmp_path / "none", tmp_path / "none") == CORES
    (tmp_path / "own").write_text("3:cpu:/a\n")
    assert usable_cores(tmp_path, tmp_path / "own") == CORES


def test_process_on_one_core_has_one():
    """A process that is bound to one core has one."""
    program = "import os; os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})\n"
    program += "from shoal.util.server_process import usable_cores; print(usable_cores())"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "1\n"


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
