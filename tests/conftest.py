"""Settings and fixtures of every test directory."""

import functools
import gc
import itertools
import logging
import os
import shutil
import signal
import sys
from pathlib import Path

import pytest
from hypothesis import settings

# Before any test imports NumPy or torch: several test processes share the cores, and idle threads would spin on them.
for library in ("OMP", "OPENBLAS", "MKL"):
    os.environ[f"{library}_NUM_THREADS"] = "1"

# Tests start hundreds of processes, and each would compile every module that it imports: a third of a program's start.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Every program syncs what it writes, thousands of times in all tests. In memory that takes no time.
MEMORY = Path("/dev/shm")
MEMORY_BYTES = 2 << 30
if MEMORY.is_dir() and shutil.disk_usage(MEMORY).free >= MEMORY_BYTES:
    os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", str(MEMORY))

# Before any test imports ONNX Runtime: it would write a device identifier into the home directory and report models.
os.environ["ORT_DISABLE_TELEMETRY"] = "1"

# A shell starts background jobs with SIGINT ignored, and programs under test would inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)

# An example's time depends on the machine. `make long` takes the profile "long".
settings.register_profile("untimed", deadline=None)
settings.register_profile("long", deadline=None, max_examples=500)
settings.load_profile("untimed")


def pytest_addoption(parser):
    """Let every test that computes with numpy use torch instead: on a machine with a GPU, ``pytest --numerics cuda``."""
    parser.addoption("--numerics", choices=("numpy", "cpu", "cuda"), default="numpy")


@pytest.fixture(scope="session", autouse=True)
def _numerics(request):
    """Replace numpy's products by torch's on the chosen device."""
    device = request.config.getoption("--numerics")
    if device == "numpy":
        yield
        return
    from aggregator.numerics.backend import NumpyBackend
    from aggregator.numerics.torch_backend import TorchBackend

    backend, patch = TorchBackend(device), pytest.MonkeyPatch()
    for name in ("gram", "products", "city_block"):
        patch.setattr(NumpyBackend, name, staticmethod(getattr(backend, name)))
    yield
    patch.undo()


@pytest.fixture(autouse=True)
def _logging():
    """Undo what a program that a test calls in this process does to the root logger."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Collect no garbage meanwhile, and never look at the tests again: a third of the time that finding them takes."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


def pytest_collection_modifyitems(items):
    """Spread files whose tests wait for programs among those that compute: each process has both, from start to end."""
    files = [list(tests) for _, tests in itertools.groupby(items, key=lambda item: item.path)]
    halves = {True: [], False: []}
    for tests in files:
        halves[any(item.get_closest_marker(name) for item in tests for name in ("process", "broker"))].append(tests)
    places = [place for half in halves.values() for place in _places(half)]
    items[:] = [item for _, tests in sorted(places, key=lambda place: place[0]) for item in tests]


def _places(files):
    """Yield each file with the share of all tests that comes before it."""
    total, before = sum(map(len, files)), 0
    for tests in files:
        yield before / total, tests
        before += len(tests)


@pytest.fixture(scope="session")
def logistic():
    """Return a function (inputs, classes) -> bundle of logistic regression, made once a session."""
    from tests.helpers.tasks import logistic_bundle

    return functools.cache(logistic_bundle)


@pytest.fixture(scope="session")
def once(tmp_path_factory):
    """Return a function (name, make) -> what ``make()`` returns, called once for all processes of the session."""
    from tests.helpers.once import Once

    folder = tmp_path_factory.getbasetemp()
    return Once((folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder) / "once")


@pytest.fixture(scope="session")
def compile_once(once):
    """Return a function that compiles as `compile_task` does, each task once for all processes of the session."""
    from tests.helpers.once import Compiler

    return Compiler(once)
