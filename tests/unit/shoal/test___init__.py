"""`import shoal`: fast, lazy, with an error for a missing part; the examples of its page and docstring are run."""

import inspect
import re
import typing

import numpy as np
import pytest

import shoal
from shoal.protocol.recipe import DEFAULTS, Choices, Recipe, knobs
from tests.helpers import documents
from tests.helpers.trees import lay_out_image, python

HEAVY = ("numpy", "torch", "onnxruntime", "scipy", "pandas", "matplotlib", "aggregator", "shoal.simulation")


@pytest.mark.parametrize(
    ("script", "told"),
    [
        (
            f"print([m for m in {HEAVY!r} if m in sys.modules], shoal.errors.UsageError.__name__)",
            "[] UsageError",
        ),
        ("shoal.Strategy; print('numpy' in sys.modules, 'torch' in sys.modules)", "True False"),
    ],
    ids=["import", "use of a name"],
)
def test_heavy_modules_load_when_used(script, told):
    """The import loads neither numpy nor torch, nor anything of a party; using a name loads its module."""
    done = python(f"import sys, shoal; {script}")
    assert done.stdout.strip() == told, done.stderr


@pytest.mark.torch
def test_every_public_name_exists():
    assert set(shoal.__all__) <= set(dir(shoal))
    assert all(getattr(shoal, name) is not None for name in shoal.__all__)
    assert set(shoal._LAZY) | {"__version__", "errors"} == set(shoal.__all__)


def test_the_version_is_the_installed_one(tmp_path):
    """From the metadata; a source tree alone has none."""
    lay_out_image("deploy/docker/edge.Dockerfile", tmp_path)
    assert re.match(r"\d+\.\d+", shoal.__version__)
    script = (
        "import importlib.metadata as m, shoal\n"
        "def missing(name): raise m.PackageNotFoundError(name)\n"
        "m.version = missing\n"
        "print(shoal.__version__)"
    )
    assert python(script, cwd=tmp_path).stdout.strip() == "0+source"


@pytest.mark.parametrize(
    ("image", "name", "missing"),
    [
        ("edge", "simulate", "shoal.simulation"),
        ("edge", "Result", "shoal.simulation"),
        ("aggregator", "split", "shoal.simulation"),
    ],
)
def test_an_image_says_what_it_lacks(tmp_path, image, name, missing):
    """A party's image holds `shoal` without the simulator: the import works, and using the name says what is missing."""
    lay_out_image(f"deploy/docker/{image}.Dockerfile", tmp_path)
    script = (
        "import sys, shoal\n"
        "try: getattr(shoal, sys.argv[1])\n"
        "except shoal.errors.ConfigError as error: print(error, '/', error.hint)"
    )
    done = python(script, name, cwd=tmp_path)
    assert f"shoal.{name} needs {missing}, which is not installed here / " in done.stdout, done.stderr
    assert "pip install 'shoal[all]'" in done.stdout


def test_own_failure_is_not_hidden(monkeypatch):
    """A module that exists but fails keeps its own error; an unknown name is an attribute error."""
    monkeypatch.setitem(shoal._LAZY, "Broken", "shoal.errors:NoSuchName")
    with pytest.raises(AttributeError, match="NoSuchName"):
        _ = shoal.Broken
    with pytest.raises(AttributeError, match="has no attribute 'simulat'"):
        _ = shoal.simulat


@pytest.mark.torch
def test_defaults_are_the_fleets():
    """Each choice of a recipe that changes a simulated run is an argument, for callers, `help` and type checkers alike."""
    given = {name: p.default for name, p in inspect.signature(shoal.simulate).parameters.items()}
    assert list(given)[:15] == [
        *("model", "partitions", "strategy", "settings", "local", "task", "progress", "personal", "private"),
        *("standardise", "target", "mask", "precision", "writer", "secure"),
    ]
    choices = {name: getattr(DEFAULTS, name) for name, knob in knobs(Recipe).items() if knob.simulated}
    assert (choices.pop("mode"), choices.pop("precision_up")) == ("rotation", given["precision"]), (
        "by names of their own"
    )
    assert dict(list(given.items())[15:]) == {**choices, "rounds": 100, "seed": 0}
    assert (given["min_contributors"], given["mask"], given["robust"]) == (3, "default", "filter")
    typed = typing.get_type_hints(Choices)
    recipe = typing.get_type_hints(Recipe)
    assert typed == {name: recipe[name] for name in choices}


@pytest.mark.torch
def test_the_researchers_pages_run(tmp_path, monkeypatch):
    """Every Python block of the two pages, one after another; a strategy takes at most 20 lines there."""
    monkeypatch.chdir(tmp_path)
    pages = [f"docs/researcher/{name}.md" for name in ("simulate", "extend")]
    blocks = [(page, "\n".join(block.lines)) for page in pages for block in documents.blocks(page, "python")]
    names: dict[str, object] = {}
    results = []
    for page, block in blocks:
        exec(compile(block, page, "exec"), names)
        results.append(names["result"])
    clustered, own, swept, written, _secure, robust = results
    assert len((tmp_path / "run.csv").read_text().splitlines()) == 1 + len(written.history)
    assert swept.accuracy.mean() > 0.7
    assert clustered.accuracy.mean() > 0.9
    assert list(clustered.clusters[:5] == clustered.clusters[0]) == [True] * 5
    assert list(clustered.clusters[5:] == clustered.clusters[0]) == [False] * 5
    assert own.accuracy.shape == (4,)
    assert robust.clusters.tolist() == [0] * 10
    strategy = re.search(r"class .*?\n\n\n", blocks[-1][1], re.DOTALL).group()
    assert len(strategy.strip().splitlines()) <= 20


@pytest.mark.torch
def test_the_worked_example_runs():
    """The example in the package's docstring prints what it says."""
    lines = shoal.__doc__.split("IFCA finds both groups:")[1]
    names: dict[str, object] = {}
    exec(compile(inspect.cleandoc(lines), "shoal/__init__.py", "exec"), names)
    assert len(np.unique(names["result"].clusters)) == 2
    assert names["result"].accuracy.mean() > 0.9
