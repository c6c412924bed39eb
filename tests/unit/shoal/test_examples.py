"""The pages and the notebook of docs/examples run, and print what they show."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("matplotlib")

pytestmark = pytest.mark.torch
DOCS = Path(__file__).parents[3] / "docs"
FIGURE = re.compile(r"-?\d+\.\d+")
CLOSE = 0.04
"""Largest difference of a printed figure: other processors and libraries round differently while a model trains."""


@pytest.fixture(scope="module")
def examples():
    """The script that runs them."""
    spec = importlib.util.spec_from_file_location("run_examples", DOCS / "run_examples.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def same(printed, shown):
    """Compare two texts but for small differences of their figures."""
    assert FIGURE.sub("#", printed) == FIGURE.sub("#", shown)
    for one, other in zip(FIGURE.findall(printed), FIGURE.findall(shown), strict=True):
        assert float(one) == pytest.approx(float(other), abs=CLOSE), (printed, shown)


@pytest.mark.parametrize("name", ["ifca", "cfl"])
def test_page_prints_and_draws(examples, tmp_path, name):
    """A page prints what it shows and draws its picture."""
    shown_blocks = 0
    for printed, shown, _ in examples.run_page(examples.EXAMPLES / f"{name}.md", tmp_path):
        same(printed, shown)
        shown_blocks += bool(shown)
    assert shown_blocks >= 1
    assert (tmp_path / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    assert (examples.PICTURES / f"examples-{name}.png").exists()


@pytest.mark.long
def test_notebook_runs_as_shown(examples):
    """The notebook runs and shows what it has shown."""
    pytest.importorskip("nbclient")
    pytest.importorskip("ipykernel")
    import nbformat

    kept = nbformat.read(examples.NOTEBOOK, as_version=4)
    for cell, before in zip(examples.run_notebook().cells, kept.cells, strict=True):
        assert cell.source == before.source
        for output, shown in zip(cell.get("outputs", []), before.get("outputs", []), strict=True):
            assert output.output_type == shown.output_type
            if output.output_type == "stream":
                same(output.text, shown.text)
            elif "image/png" in shown.data:
                assert output.data["image/png"]
            else:
                same(output.data["text/plain"], shown.data["text/plain"])
