"""All dependencies have wheels for every Python and processor that we name, and ours install from a folder.

The first asks the registry and downloads nothing. pip evaluates conditions on the processor for this machine, so that torch
is looked up without what it requires.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

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


def install(python, *arguments):
    """Run pip for one interpreter."""
    command = [sys.executable, "-m", "pip", "--python", str(python), "install", "--quiet", "--no-compile", *arguments]
    subprocess.run(command, check=True, cwd="/", timeout=PIP_S)


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


@pytest.fixture(scope="module")
def folder(registry):
    """Return a folder with our two wheels and all wheels that they need, in the versions that are installed here."""
    # On a disk, where tmp_path may not be.
    folder = Path(tempfile.mkdtemp(prefix="shoal-wheels-", dir="/var/tmp"))
    for project in (ROOT, ROOT / "lab"):
        build = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(folder)]
        subprocess.run(build, check=True, cwd=project)
    pip = [sys.executable, "-m", "pip"]
    freeze = [*pip, "freeze", "--exclude-editable", "--exclude", "shoal", "--exclude", "shoal-lab"]
    (folder / "tested.txt").write_bytes(subprocess.run(freeze, check=True, capture_output=True).stdout)
    download = [
        *pip,
        "download",
        "--quiet",
        f"--dest={folder}",
        f"--find-links={folder}",
        f"--constraint={folder / 'tested.txt'}",
    ]
    subprocess.run([*download, "shoal-lab"], check=True, cwd="/", timeout=PIP_S)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.parametrize(
    ("wheel", "command"),
    [
        ("shoal[edge-lite]", ("shoal-edge", "--version")),
        ("shoal[edge]", ("shoal-edge", "--version")),
        ("shoal-lab", ("shoal", "bench", "--help")),
    ],
)
def test_every_wheel_installs_from_a_folder(folder, wheel, command):
    """Without an index, in an environment of its own, which a program of it then starts in."""
    with tempfile.TemporaryDirectory(prefix="shoal-clean-", dir="/var/tmp") as place:
        venv.create(place, symlinks=True)
        install(Path(place, "bin/python"), "--no-index", f"--find-links={folder}", "--pre", wheel)
        program, *words = command
        clean = {"PATH": "/usr/bin:/bin", "HOME": place}
        done = subprocess.run(
            [Path(place, "bin", program), *words], env=clean, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stderr
        assert program in done.stdout
