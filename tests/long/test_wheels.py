"""All dependencies have wheels for every Python and processor that we name: asked of the registry, nothing is downloaded.

pip evaluates conditions on the processor for this machine, so that torch's NVIDIA packages, which only x86-64 has, are left out.
"""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.helpers.debian import load_builder
from tests.helpers.trees import ROOT
from tests.long.test_load import keep

BUILD = load_builder()
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
MACHINES = ("x86_64", "aarch64")
PARTIES = ("edge", "aggregator", "fleet")
"""edge-lite needs a part of what edge needs."""
PIP_S = 300

pytestmark = [pytest.mark.long, pytest.mark.timeout(2 * len(PYTHONS) * len(MACHINES) * PIP_S)]


def requirements(extra):
    """Return what a party needs: the dependencies of all parties and its extra's."""
    return [*BUILD.PROJECT["dependencies"], *BUILD.PROJECT["optional-dependencies"][extra]]


def resolve(extra, python, machine, folder):
    """Return the files of the wheels that pip would install; none if there is no set of wheels."""
    report = folder / "report.json"
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed"]
    command += ["--only-binary=:all:", f"--python-version={python}", f"--target={folder}", f"--report={report}"]
    command += [f"--platform={name}" for name in BUILD.platforms(machine)]
    direct = [need for need in requirements(extra) if not need.startswith("torch")]
    torch = [need for need in requirements(extra) if need.startswith("torch")]
    files = []
    for more, needs in ((), direct), (("--no-deps",), torch):
        if not needs:
            continue
        done = subprocess.run(
            [*command, *more, *needs], cwd=ROOT, timeout=PIP_S, capture_output=True, text=True, check=False
        )
        if done.returncode:
            assert "No matching distribution" in done.stderr or "conflict" in done.stderr.lower(), done.stderr
            return []
        found = json.loads(report.read_text())["install"]
        files += [item["download_info"]["url"].rsplit("/", 1)[-1] for item in found]
    return sorted(files)


@pytest.fixture(scope="module")
def registry(tmp_path_factory):
    """Skip where no registry answers."""
    folder = tmp_path_factory.mktemp("probe")
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "-d", str(folder), "six"]
    if subprocess.run(command, capture_output=True, timeout=PIP_S, check=False).returncode:
        pytest.skip("no registry answers")


@pytest.mark.parametrize("extra", PARTIES)
def test_every_dependency_has_wheels(registry, tmp_path, extra):
    found = {
        f"Python {python}, {machine}": resolve(extra, python, machine, tmp_path)
        for python in PYTHONS
        for machine in MACHINES
    }
    keep(f"wheels-{extra}", found)
    assert [case for case, files in found.items() if not files] == []
    sources = {case: [file for file in files if not file.endswith(".whl")] for case, files in found.items()}
    assert not any(sources.values()), sources
