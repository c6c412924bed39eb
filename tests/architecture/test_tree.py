"""Rules for the whole tree: sizes, forbidden words, packaging and names."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sys
import tomllib
import warnings

import pytest
from hatchling.metadata.core import ProjectMetadata
from hatchling.plugin.manager import PluginManager

from shoal.version import VERSION
from tests.helpers.trees import LAB, NAMES, PACKAGES, ROOT, sources

LONG_MODULE_LINES = 800
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
UNSAFE_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
UNSAFE_CALLS = {"eval", "exec", "torch.load", "yaml.load", "os.system", "np.load(allow_pickle)"}


def name_of(node):
    """Return a called function as it is written: ``torch.load``."""
    if isinstance(node, ast.Attribute):
        return f"{name_of(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else ""


def unsafe(tree):
    """Return the calls in a parsed module that would execute data or rebuild objects from it."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found += [a.name for a in node.names if a.name.split(".")[0] in UNSAFE_MODULES]
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in UNSAFE_MODULES:
            found.append(node.module)
        elif isinstance(node, ast.Call):
            name = name_of(node.func)
            allows = any(
                k.arg == "allow_pickle" and not (isinstance(k.value, ast.Constant) and k.value.value is False)
                for k in node.keywords
            )
            if name in UNSAFE_CALLS or allows:
                found.append(name)
    return found


@pytest.mark.filterwarnings("default::UserWarning")
def test_long_modules_are_reported():
    """A module above 800 lines is worth a look; it is a warning, since one subject belongs in one module."""
    lengths = {str(p.relative_to(ROOT)): len(p.read_text().splitlines()) for p in sources()}
    for name, length in lengths.items():
        if length > LONG_MODULE_LINES:
            warnings.warn(f"{name} has {length} lines, over {LONG_MODULE_LINES}", UserWarning, stacklevel=1)
    assert lengths


def test_nothing_is_unpickled_or_evaluated():
    """No module imports a pickle, calls eval, exec or torch.load, or lets numpy unpickle."""
    found = {str(p.relative_to(ROOT)): unsafe(ast.parse(p.read_text())) for p in sources()}
    assert {name: what for name, what in found.items() if what} == {}


@pytest.mark.parametrize(
    "line", ["import pickle", "from pickle import loads", "eval(x)", "torch.load(f)", "np.load(f, allow_pickle=True)"]
)
def test_search_for_unsafe_calls_finds_them(line):
    """The test above can fail."""
    assert unsafe(ast.parse(line))


def test_no_installed_package_collides():
    """On a disk that ignores case, ``crypto`` and pycryptodome's ``Crypto`` are one folder: nothing may bring that in."""
    ours = set(NAMES)
    theirs = {
        name
        for name, distributions in importlib.metadata.packages_distributions().items()
        if not set(distributions) <= {"shoal", "shoal-lab"}
    }
    assert {name for name in theirs if name.lower() in ours} == set()


NOT_INSTALLED = ("pyarrow",)
"""Requirements of an extra that development leaves out, because of their size. They have no requirements themselves."""


def test_nothing_asks_for_pycryptodome():
    """Neither our requirements nor those of the packages we name ask for it."""
    project = PROJECT["project"]
    asked = [*project["dependencies"], *(r for extra in project["optional-dependencies"].values() for r in extra)]
    for requirement in list(asked):
        name = re.match(r"[A-Za-z0-9._-]+", requirement).group()
        if name == "shoal":
            continue
        if name in NOT_INSTALLED:
            continue
        asked += [r for r in importlib.metadata.requires(name) or () if "extra ==" not in r]
    assert [r for r in asked if r.lower().startswith(("pycrypto", "pycryptodome"))] == []


def test_every_package_is_in_the_wheel():
    """A package that the wheel leaves out works from a checkout and nowhere else."""
    assert set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) == set(PACKAGES)
    assert set(PACKAGES) <= set(PROJECT["tool"]["hatch"]["build"]["targets"]["sdist"]["include"])
    assert {p.parent.name for p in ROOT.glob("*/__init__.py")} == set(PACKAGES)


def test_every_package_is_checked():
    """Mypy and import-linter know each package."""
    assert set(PROJECT["tool"]["mypy"]["files"]) == {*PACKAGES, LAB}
    assert set(PROJECT["tool"]["importlinter"]["root_packages"]) == set(NAMES)


SHARED = tuple(
    f"shoal/{name}"
    for name in (
        "__init__",
        "errors",
        "limits",
        "hints",
        "types",
        "address",
        "digests",
        "version",
        "util",
        "protocol",
        "membership",
        "page",
    )
)
INSTALLED_BY = {
    (*SHARED, "crypto"): [],
    ("shoal/transport",): [],
    ("edge_client", "shoal/task"): ["edge"],
    ("aggregator",): ["aggregator"],
    ("shoal/owner",): ["edge", "fleet"],
    (
        "shoal/simulation",
        "shoal/new",
        "shoal/demo",
        "shoal/report",
        "shoal/cli",
        "shoal/__main__",
    ): [
        "edge",
        "aggregator",
        "fleet",
        "demo",
        "plot",
        "frames",
    ],
    (LAB,): ["edge", "aggregator", "fleet", "demo", "images", "plot"],
}
"""The extras that bring what each part of the tree imports."""


def test_every_module_is_installed():
    """The table names the whole tree."""
    named = {path for parts in INSTALLED_BY for part in parts for path in modules_of(part)}
    assert named == set(sources())


def modules_of(part):
    return sorted((ROOT / part).rglob("*.py")) or [ROOT / f"{part}.py"]


@pytest.mark.parametrize(("parts", "extras"), INSTALLED_BY.items(), ids=[p[0] for p in INSTALLED_BY])
def test_imports_are_declared(parts, extras):
    """Every third-party module that a part of the tree imports is a dependency of the extras that install it."""
    provides = {
        "PIL": "pillow",
        "sklearn": "scikit-learn",
        "paho": "paho-mqtt",
        "prometheus_client": "prometheus-client",
    }
    project = PROJECT["project"]
    declared = list(project["dependencies"])
    for extra in extras:
        declared += project["optional-dependencies"][extra]
    if parts == ("shoal/transport",):
        declared += ["amqtt"]  # the embedded broker: looked for before it is used
    if "shoal/simulation" in parts:
        declared += ["mlflow"]  # a writer's, which says what to install
    if parts == (LAB,):
        declared += ["pfl", "flwr"]  # peers of the race, each in an environment of its own
        declared += tomllib.loads((ROOT / "lab" / "pyproject.toml").read_text())["project"]["dependencies"]
    names = {re.match(r"[A-Za-z0-9._-]+", r).group() for r in declared}
    imported = set()
    for path in (path for part in parts for path in modules_of(part)):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                imported |= {a.name.split(".")[0] for a in node.names}
            elif isinstance(node, ast.ImportFrom) and not node.level:
                imported.add(node.module.split(".")[0])
    foreign = imported - set(sys.stdlib_module_names) - set(NAMES) - {"__future__", "tests"}
    assert {provides.get(m, m) for m in foreign} - names == set()


def test_unit_tests_follow_folders_of_source():
    """The path of a module's tests follows from the path of the module."""
    folders = {p.parent.relative_to(ROOT / "tests/unit") for p in (ROOT / "tests/unit").rglob("test_*.py")}
    assert len(folders) > len(PACKAGES)
    assert {str(folder) for folder in folders if not list((ROOT / folder).glob("*.py"))} == set()


def test_announced_version_is_the_packages():
    """`shoal.version` is a constant, since a device does not read the installed package's metadata. The build reads it there."""
    assert PROJECT["project"]["dynamic"] == ["version"]
    assert ProjectMetadata(str(ROOT), PluginManager()).version == VERSION
