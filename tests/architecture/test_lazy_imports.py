"""Programs must not load torch (217 MB and 1.6 s) and ONNX Runtime (43 MB and 0.2 s) unless they use them."""

from __future__ import annotations

import numpy as np
import pytest

from edge_client import membership as enrolment
from shoal.membership.directory import make_identity
from shoal.membership.grants import DEVICE_ROLE
from shoal.owner.enrolment.tokens import TokenStore
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.task_compiler.signed import Source, write_signed
from tests.helpers.tasks import logistic_bundle
from tests.helpers.trees import PROGRAMS, python

SCRIPT = """
import atexit, sys
module, heavy = sys.argv[1], sys.argv[2].split(",")
sys.argv = [module, *sys.argv[3:]]
atexit.register(lambda: print("loaded:", *(m for m in heavy if m in sys.modules)))
from importlib import import_module
import_module(module).main()
"""
DEVICE_HEAVY = "numpy,onnxruntime,torch,scipy,paho,rich,aggregator,shoal.owner"


def loaded(program, heavy, *arguments):
    """Run a program and return (status, which of ``heavy`` it had loaded at its end)."""
    done = python(SCRIPT, PROGRAMS[program], heavy, *arguments)
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout.splitlines()[-1].split()[1:]


@pytest.fixture
def fleet(tmp_path):
    """A fleet with an aggregator, whose first device still has to join."""
    made = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://127.0.0.1:1")
    made.add_aggregator(make_identity(tmp_path / "agg", "aggregator", "aggregator").read_bytes())
    return made


def test_a_devices_help_loads_nothing_heavy():
    """`shoal-edge --help` answers without numpy and ONNX Runtime."""
    assert loaded("shoal-edge", DEVICE_HEAVY, "--help") == (0, [])


def test_device_is_made_without_weight(tmp_path):
    """`shoal-edge init` makes keys with neither numpy nor ONNX Runtime."""
    assert loaded("shoal-edge", DEVICE_HEAVY, "init", tmp_path / "d", "--name", "dev-1") == (0, [])


def test_device_joins_without_anything_heavy(tmp_path, fleet):
    """`shoal-edge join` opens its grant with neither numpy nor ONNX Runtime."""
    grant = fleet.add_device(enrolment.init(tmp_path / "d", "dev-1").read_bytes())
    assert loaded("shoal-edge", DEVICE_HEAVY, "join", tmp_path / "d", grant, "--owner", fleet.fingerprint) == (0, [])


def test_enrols_without_heavy_packages(tmp_path, fleet):
    """`shoal-edge enrol` up to its connection: it needs the MQTT client and nothing else that is heavy."""
    (tmp_path / "line").write_text(TokenStore(fleet).issue(1, 600, 2**40)[0].to_line())
    heavy = DEVICE_HEAVY.replace("paho,", "")
    assert loaded("shoal-edge", heavy, "enrol", tmp_path / "d", tmp_path / "line", "--name", "dev-1") == (5, [])


def test_devices_status_loads_nothing_heavy(tmp_path, fleet):
    """`shoal-edge status` reads files and nothing more."""
    grant = fleet.add_device(make_identity(tmp_path / "d", "dev-1", DEVICE_ROLE).read_bytes())
    enrolment.join(tmp_path / "d", grant.read_bytes(), fleet.fingerprint)
    assert loaded("shoal-edge", DEVICE_HEAVY, "status", tmp_path / "d") == (0, [])


@pytest.mark.parametrize(("command", "status"), [("models", 0), ("rollback", 3)])
def test_list_of_models_loads_nothing_heavy(tmp_path, fleet, command, status):
    """`shoal-edge models` and `rollback` read the list alone: neither numpy nor ONNX Runtime."""
    grant = fleet.add_device(make_identity(tmp_path / "d", "dev-1", DEVICE_ROLE).read_bytes())
    enrolment.join(tmp_path / "d", grant.read_bytes(), fleet.fingerprint)
    assert loaded("shoal-edge", DEVICE_HEAVY, command, tmp_path / "d") == (status, [])


def test_showing_a_fleet_loads_nothing_heavy(fleet, tmp_path):
    """`shoal-fleet show` lists members and runs without numpy and torch."""
    assert loaded("shoal-fleet", "numpy,torch,onnx,onnxruntime,scipy,paho", "show", tmp_path / "owner") == (0, [])


@pytest.mark.parametrize("program", ["shoal-aggregator", "shoal-fleet"])
def test_other_help_loads_nothing_heavy(program):
    """`shoal-aggregator --help` and `shoal-fleet --help` answer without numpy and torch."""
    assert loaded(program, "numpy,torch,onnx,onnxruntime,scipy,paho", "--help") == (0, [])


def test_no_device_module_loads_torch():
    """Importing every module that a device has, one after another, never loads torch, onnx, scipy or other people's code."""
    script = """
import sys
from importlib import import_module
from pathlib import Path
for path in sorted(Path("edge_client").rglob("*.py")):
    import_module(".".join(path.with_suffix("").parts).removesuffix(".__init__"))
print(*(m for m in ("torch", "onnx", "scipy", "sklearn", "aggregator", "shoal.owner", "shoal.simulation") if m in sys.modules))
"""
    done = python(script)
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


SERVING = """
import atexit, os, sys
unused = sys.argv[1].split(",")
os.environ["SHOAL_EDGE_BROKER"] = "mqtt://127.0.0.1:1"
sys.argv = ["shoal-edge", "run", sys.argv[2], "--data", sys.argv[3]]
def loaded(name):
    return sys.modules.get(name) is not None and type(sys.modules[name]).__name__ != "_Deferred"
atexit.register(lambda: print("loaded:", *filter(loaded, ["paho.mqtt.client", "edge_client.daemon", *unused])))
from edge_client.program import main
main()
"""
SERVING_UNUSED = (
    "urllib.request,http.client,email,ssl,_ssl,hashlib,_hashlib,numpy.random,typer,click,pydantic,torch,scipy,onnx,"
    "aggregator,shoal.owner,edge_client.learning.executor.onnx_runtime,edge_client.learning.executor.numpy_graph"
)


@pytest.mark.parametrize("member", [False, True])
def test_serving_device_loads_what_it_uses(tmp_path, fleet, member):
    """`shoal-edge run` up to its first connection: web clients, TLS, numpy's generators and the command line cost 12 MB.

    The executors come with the first run: a device needs one of them.
    """
    status = 4
    if member:
        grant = fleet.add_device(enrolment.init(tmp_path / "d", "dev-1").read_bytes())
        enrolment.join(tmp_path / "d", grant.read_bytes(), fleet.fingerprint)
        status = 5
    np.savez(tmp_path / "d.npz", x=np.zeros((9, 4), np.float32), y=np.zeros(9, np.int64))
    done = python(SERVING, SERVING_UNUSED, tmp_path / "d", tmp_path / "d.npz")
    assert "Traceback" not in done.stderr, done.stderr
    assert done.returncode == status, done.stderr
    assert done.stdout.splitlines()[-1] == "loaded: paho.mqtt.client edge_client.daemon"


def test_senseless_run_is_refused_sans_torch(tmp_path, fleet):
    """`shoal-fleet run start` checks its options before it loads torch to draw the origins."""
    fleet.add_device(enrolment.init(tmp_path / "d", "dev-1").read_bytes())
    write_signed(logistic_bundle(), Source("logistic", {"inputs": 4, "classes": 3}), fleet.owner, tmp_path / "task")
    asked = [
        "run",
        "start",
        tmp_path / "owner",
        "--task",
        tmp_path / "task",
        "--algorithm",
        "cfl",
        "--set",
        "epsilon=1",
    ]
    assert loaded("shoal-fleet", "torch,onnxruntime,scipy", *asked) == (3, [])


@pytest.mark.parametrize("command", [(), ("models",), ("models", "get")])
def test_the_owners_help_loads_nothing_heavy(command):
    """`shoal-fleet --help` and the help of `models` answer without numpy and the MQTT client."""
    assert loaded("shoal-fleet", "numpy,onnxruntime,torch,scipy,paho,edge_client,aggregator", *command, "--help") == (
        0,
        [],
    )
