"""ONNX Runtime's telemetry is switched off before its import, whichever value the environment has."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.trees import LAB, ONE_THREAD, PACKAGES, ROOT

LOADER = "shoal/util/telemetry.py"
PROGRAMS = {
    "device": "from edge_client.cli import main",
    "serving device": "from edge_client.program import main",
    "aggregator": "from aggregator.cli import main",
    "owner": "from shoal.owner.cli.main import main",
    "simulator": "from shoal.cli import main",
}
TRAIN = """
import numpy as np
from edge_client.learning.model import OrtModel
from tests.helpers.tasks import logistic_bundle, samples
bundle = logistic_bundle()
OrtModel(bundle).grad(np.zeros(bundle.length, np.float32), *samples(4))
"""
WATCH = """
import atexit, os, sys
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name == "onnxruntime":
            print("imported with", os.environ.get("ORT_DISABLE_TELEMETRY"))
sys.meta_path.insert(0, Watch())
atexit.register(lambda: print("ended with", os.environ.get("ORT_DISABLE_TELEMETRY")))
"""


def run(code, home, *arguments):
    """Run ``code`` in a process with a home directory of its own that inherits telemetry switched on; return its output."""
    environment = {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT), "HOME": str(home), "ORT_DISABLE_TELEMETRY": "0"}
    environment.pop("XDG_CACHE_HOME", None)
    done = subprocess.run(
        [sys.executable, "-c", code, *map(str, arguments)],
        env=environment,
        cwd=home,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.stdout + done.stderr


def files_of(home):
    return sorted(str(path.relative_to(home)) for path in home.rglob("*"))


def test_training_leaves_no_telemetry(tmp_path):
    """Training leaves no file of the telemetry."""
    told = run(WATCH + TRAIN, tmp_path)
    assert told.splitlines() == ["imported with 1", "ended with 1"]
    assert files_of(tmp_path) == []


def test_onnx_runtime_writes_an_identifier(tmp_path):
    """Otherwise the test above could not fail. Releases before 1.31 have no telemetry on Linux."""
    run("import onnxruntime", tmp_path)
    if not any(name.endswith("deviceid") for name in files_of(tmp_path)):
        pytest.skip("this release of ONNX Runtime writes nothing on Linux")


@pytest.mark.parametrize("program", PROGRAMS)
def test_programs_switch_it_off_for_children(tmp_path, program):
    """A library that a program uses may import ONNX Runtime by itself."""
    told = run(f"{WATCH}{PROGRAMS[program]}\nmain()", tmp_path, "--help")
    assert "ended with 1" in told.splitlines()


def test_onnx_runtime_is_not_imported_alone():
    """No module imports onnx runtime by itself."""
    found = [
        str(path.relative_to(ROOT))
        for package in (*PACKAGES, LAB)
        for path in sorted((ROOT / package).rglob("*.py"))
        if names_it(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert found == [LOADER]


def names_it(tree):
    """Whether a module imports onnxruntime, or hands its bare name to a function."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import) and any(a.name.split(".")[0] == "onnxruntime" for a in node.names):
            return True
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "onnxruntime":
            return True
        if isinstance(node, ast.Call) and any(getattr(a, "value", None) == "onnxruntime" for a in node.args):
            return True
    return False


@pytest.mark.parametrize("text", ["import onnxruntime as ort", "from onnxruntime import x", "load('onnxruntime')"])
def test_the_search_finds_an_import(text):
    assert names_it(ast.parse(text))


def test_tests_switch_it_off_first():
    """The tests switch it off before any import."""
    assert os.environ["ORT_DISABLE_TELEMETRY"] == "1"


@pytest.mark.parametrize(
    "file",
    [*sorted((ROOT / "deploy/systemd").glob("*.service")), *sorted((ROOT / "deploy/docker").glob("*.Dockerfile"))],
    ids=lambda path: Path(path).name,
)
def test_units_and_images_switch_it_off(file):
    assert "ORT_DISABLE_TELEMETRY=1" in file.read_text()
