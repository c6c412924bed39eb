"""The contents of the wheel: the modules of our packages, and nothing that only the repository needs."""

from __future__ import annotations

import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Final

import pytest
from hatchling.builders.sdist import SdistBuilder
from hatchling.builders.wheel import WheelBuilder
from packaging.requirements import Requirement

from shoal.version import VERSION

ROOT: Final = Path(__file__).resolve().parents[2]
PACKAGES: Final = {"shoal", "crypto", "edge_client", "aggregator"}
MAX_WHEEL_BYTES: Final = 4 << 20
"""All files of the wheel before compression: an edge-only install has 195 MB, and other people's libraries take 190."""


@pytest.fixture(scope="module")
def shipped() -> dict[str, Path]:
    """Return the wheel's files: the source of each, by the path that it is installed under."""
    return {f.distribution_path: Path(f.path) for f in WheelBuilder(str(ROOT)).recurse_included_files()}


def test_the_wheel_holds_every_module(shipped: dict[str, Path]) -> None:
    """Where it stands in a checkout, with the word to type checkers that it has types; and the wheel is small."""
    modules = {str(p.relative_to(ROOT)) for package in PACKAGES for p in (ROOT / package).rglob("*.py")}
    assert modules | {f"{package}/py.typed" for package in PACKAGES} <= set(shipped)
    assert {name: str(path.relative_to(ROOT)) for name, path in shipped.items()} == {name: name for name in shipped}
    assert sum(path.stat().st_size for path in shipped.values()) < MAX_WHEEL_BYTES


def test_wheel_holds_nothing_else(shipped: dict[str, Path]) -> None:
    """Tests, results, documents and deployment files stay out, also those that might stand inside a package."""
    assert {name.split("/")[0] for name in shipped} == PACKAGES
    page = {f"shoal/page/assets/{name}" for name in ("page.html", "page.css", "page.js")}
    starts = {name for name in shipped if name.startswith("shoal/new/templates/") and name.endswith(".txt")}
    assert len(starts) == 8
    assert {name for name in shipped if not name.endswith(".py")} - page - starts <= {
        f"{package}/py.typed" for package in PACKAGES
    }
    assert page <= set(shipped)
    folders = {part for name in shipped for part in name.split("/")[:-1]}
    assert folders & {"tests", "results", "docs", "deploy", "lab", "attacks"} == set()


def test_wheel_holds_no_attacks_and_no_mocks(shipped: dict[str, Path]) -> None:
    """They are the lab's, a distribution of its own."""
    found = [name for name, path in shipped.items() if re.search(r"shoal_lab|unittest|mock", path.read_text())]
    assert found == ["shoal/__init__.py"], "it says where the lab is"


def test_the_lab_is_of_the_same_version() -> None:
    project = tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]
    assert project["version"] == VERSION
    assert [r.partition("==")[2] for r in project["dependencies"] if r.startswith("shoal[")] == [VERSION]


def test_onnx_runtime_has_a_lower_bound_only() -> None:
    """Versions before 1.27 leak memory in convolutions on ARM; a device that may not go past 1.31 would miss fixes.

    The lite extra adds nothing to the dependencies of every party, and those have none of it.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    bounds = [need for needs in extras.values() for need in needs if need.startswith("onnxruntime")]
    assert bounds == ["onnxruntime>=1.27"] * 2
    assert extras["edge-lite"] == []
    assert not [need for need in project["dependencies"] if need.startswith("onnx")]


@pytest.mark.parametrize(("pip_status", "terminal"), [(0, ""), (0, "1"), (1, ""), (1, "1")])
def test_make_repairs_a_venv_without_pip(tmp_path: Path, pip_status: int, terminal: str) -> None:
    """Debian's python3 without python3-venv leaves such a one behind. It is not ready, nor is one where pip fails."""
    (tmp_path / "lab").mkdir()
    for name in ("Makefile", "pyproject.toml", "lab/pyproject.toml"):
        shutil.copy(ROOT / name, tmp_path / name)
    fill = tmp_path / "python3"
    fill.write_text(
        '#!/bin/sh\nfor p in python pip; do printf \'#!/bin/sh\\ncase "$*" in *torch*) exit '
        f"{pip_status};; esac\\n' > .venv/bin/$p; chmod +x .venv/bin/$p; done\n"
    )
    broken = tmp_path / ".venv/bin/python"
    broken.parent.mkdir(parents=True)
    broken.write_text("#!/bin/sh\nexit 1\n")
    for file in (fill, broken):
        file.chmod(0o755)
    command = ["make", ".venv/.ready", f"PYTHON={fill}", f"MAKE_TERMOUT={terminal}"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=30, check=False)
    assert bool(done.returncode) == bool(pip_status), done.stderr
    assert (tmp_path / ".venv/.ready").exists() == (not pip_status)


@pytest.mark.parametrize("extra", ["edge", "edge-lite", "aggregator", "fleet"])
def test_locks_have_what_a_party_needs(extra: str) -> None:
    """After a change of the requirements: `make locks`."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lock = (ROOT / f"deploy/locks/{extra}.txt").read_text()
    pins = dict(re.findall(r"^([\w.-]+)==(\S+) \\$", lock, re.MULTILINE))
    needs = map(Requirement, [*project["dependencies"], *project["optional-dependencies"][extra]])
    assert [str(need) for need in needs if not need.specifier.contains(pins.get(need.name, "0"))] == []
    assert len(re.findall(r"--hash=sha256:[0-9a-f]{64}\b", lock)) >= len(pins)


def test_source_archive_builds_the_images() -> None:
    """The source distribution has the Dockerfiles and what they copy."""
    shipped = {f.distribution_path for f in SdistBuilder(str(ROOT)).recurse_included_files()}
    for file in (ROOT / "deploy/docker").glob("*.Dockerfile"):
        named = [line.split()[1:-1] for line in file.read_text().splitlines() if line.startswith("COPY ")]
        for source in (word for words in named for word in words):
            assert any(name == source or name.startswith(f"{source}/") for name in shipped), source
        assert {f"deploy/docker/{file.name}", f"deploy/docker/{file.name}.dockerignore"} <= shipped


def test_named_pythons_have_wheels() -> None:
    """The oldest is the one that an installation requires, and the page for operators names the same range."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    start = "Programming Language :: Python :: "
    named = [c.removeprefix(start) for c in project["classifiers"] if c.startswith(start)]
    asked = re.search(r"^PYTHONS = \((.*)\)$", (ROOT / "tests/long/test_wheels.py").read_text(), re.MULTILINE)
    assert asked is not None
    assert [word.strip(' "') for word in asked[1].split(",")] == named
    assert project["requires-python"] == f">={named[0]}"
    assert f"Python {named[0]} to {named[-1]}" in (ROOT / "docs/packages.md").read_text()
    assert f"python{named[-1]}" in (ROOT / "Makefile").read_text()
