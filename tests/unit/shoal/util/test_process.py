"""Imports that wait for the first use: nothing is loaded before, everything is as usual after."""

from __future__ import annotations

import gc
import importlib
import json
import subprocess
import sys
from types import ModuleType

import pytest

from shoal.util.process import leave_out, no_collection, put_off


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package ``heavy_things`` with modules ``one`` and ``two``, not imported yet; removed from sys.modules afterwards."""
    folder = tmp_path / "heavy_things"
    folder.mkdir()
    (folder / "__init__.py").write_text("")
    for name, value in (("one", 1), ("two", 2)):
        (folder / f"{name}.py").write_text(f"import builtins\nbuiltins.{MARK}.append(__name__)\nVALUE = {value}\n")
    loads = []
    monkeypatch.setattr(f"builtins.{MARK}", loads, raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    importlib.invalidate_caches()
    yield loads
    for name in [m for m in sys.modules if m.split(".")[0] == "heavy_things"]:
        del sys.modules[name]


def test_import_defers_the_module(package):
    """With the standard library's LazyLoader, paho's ``import urllib.request`` alone would load it. Siblings load as ever."""
    assert (put_off("heavy_things.one"), put_off("heavy_things.one")) == (True, False)
    import heavy_things.one  # noqa: F401 - the statement is what is tested

    importlib.import_module("heavy_things.one")
    assert package == []
    from heavy_things import two

    assert (two.VALUE, package) == (2, ["heavy_things.two"])


MARK = "_shoal_loads"


def test_first_use_loads_the_module(package):
    """It is the true module from then on; a name that it lacks is an attribute error. To import a name from it is a use."""
    put_off("heavy_things.one")
    put_off("heavy_things.two")
    import heavy_things.one

    deferred = heavy_things.one
    with pytest.raises(AttributeError, match="no attribute 'NOTHING'"):
        _ = deferred.NOTHING
    assert not hasattr(deferred, "NOTHING")
    assert deferred.VALUE == 1
    true = sys.modules["heavy_things.one"]
    assert type(true) is ModuleType
    assert heavy_things.one is true is not deferred
    assert deferred.VALUE == 1
    assert package == ["heavy_things.one"]
    from heavy_things.two import VALUE

    assert (VALUE, package) == (2, ["heavy_things.one", "heavy_things.two"])


def test_what_is_loaded_stays_as_it_is(package):
    import heavy_things.one

    before = heavy_things.one
    assert put_off("heavy_things.one") is False
    assert put_off("sys") is False
    assert sys.modules["heavy_things.one"] is heavy_things.one is before


@pytest.mark.parametrize("name", ["no_such_module_at_all", "heavy_things.three"])
def test_a_missing_module_is_not_deferred(package, name):
    """Importing it still raises at the import statement."""
    assert put_off(name) is False
    assert name not in sys.modules
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module(name)


def test_a_server_keeps_its_heap():
    """In a separate process, since malloc's settings can't be reset."""
    program = (
        "import resource, sys\n"
        "import numpy as np\n"
        "from shoal.util.server_process import keep_heap\n"
        "kept = keep_heap()\n"
        "def faults_of_a_round():\n"
        "    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt\n"
        "    held = [np.ones(160_000, np.float32) for _ in range(20)]\n"
        "    del held\n"
        "    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before\n"
        "first, *rest = [faults_of_a_round() for _ in range(5)]\n"
        "assert not kept or max(rest) < first / 10, (first, rest)\n"
        "print(kept)\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() in ("True", "False")


def test_left_out_module_is_not_imported(package):
    """A module that is left out can't be imported, unless it is loaded already."""
    leave_out("heavy_things.one")
    with pytest.raises(ImportError):
        importlib.import_module("heavy_things.one")
    assert package == []
    leave_out("json")
    assert sys.modules["json"] is json


def test_no_garbage_is_collected_meanwhile():
    """No garbage is collected in the body and it is again after an error."""
    during = []

    def fail():
        with no_collection():
            during.append(gc.isenabled())
            raise ValueError("stop")

    with pytest.raises(ValueError, match="stop"):
        fail()
    assert during == [False]
    assert gc.isenabled()


def test_small_heap_for_all_threads():
    """Threads that allocate have no arena of their own: malloc_info lists one heap."""
    script = """
import ctypes, threading
from shoal.util.process import small_heap
assert small_heap()
wait = threading.Barrier(4)
def work():
    blocks = [ctypes.create_string_buffer(100_000) for _ in range(20)]
    wait.wait()
threads = [threading.Thread(target=work) for _ in range(3)]
for thread in threads: thread.start()
wait.wait()
for thread in threads: thread.join()
libc = ctypes.CDLL(None)
libc.fdopen.restype = ctypes.c_void_p
out = ctypes.c_void_p(libc.fdopen(1, b"w"))
libc.malloc_info(0, out)
libc.fflush(out)
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.count("<heap nr=") == 1
