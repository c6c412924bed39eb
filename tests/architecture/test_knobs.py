"""A new choice of a run is a field of `Recipe`: with that line alone the parties, the commands and the simulator have it."""

import json

import pytest

from tests.helpers.trees import ROOT, python

FIELD = """    probe: float = knob(0.5, "A choice that this test adds", above=0, most=1)
    quorum: float = knob("""
TYPED = """    weighting: str
    probe: float
"""
ADDED = f"""
import contextlib, io, json, sys, tempfile, types
from pathlib import Path

file = Path({str(ROOT)!r}) / "shoal/protocol/recipe.py"
source = file.read_text()
for anchor, text in (("    quorum: float = knob(", {FIELD!r}), ("    weighting: str\\n", {TYPED!r})):
    assert source.count(anchor) == 1
    source = source.replace(anchor, text)
recipe = sys.modules["shoal.protocol.recipe"] = types.ModuleType("shoal.protocol.recipe")
exec(compile(source, file, "exec"), recipe.__dict__)
found = {{}}

def refused(make):
    try:
        make()
    except Exception as error:
        return f"{{type(error).__name__}}: {{error}}"
"""
FLEET = """
from shoal.membership.signed_plans import open_plan
from shoal.owner.cli.main import app
from shoal.owner.keys.run_list import summary
from shoal.owner.runs.plan import draft_plan
from shoal.protocol.codec import encode
from crypto.seal.identity import Identity
from crypto.seal.identity import sign_document
from tests.helpers.run_places import RunPlace
from tests.helpers.tasks import logistic_bundle
import typer

def told(*arguments):
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.suppress(SystemExit):
        typer.main.get_command(app)(list(arguments))
    return " ".join(out.getvalue().split())

found["help"] = told("run", "start", "--help-all")
found["command"] = refused(lambda: told("run", "start", "owner", "--run", "1", "--probe", "2"))
with tempfile.TemporaryDirectory() as folder:
    owner = RunPlace(Path(folder)).owner
    plan = draft_plan(owner, logistic_bundle(), recipe.Recipe("fedavg", probe=0.25, min_contributors=1))
    found["shown"] = summary(plan)["probe"]
    signed = sign_document(owner.owner, plan)
    key = owner.owner.member.sign_key
    found["device"] = open_plan(signed, key).recipe.probe
    object.__setattr__(plan.recipe, "probe", 1.5)
    found["refused"] = refused(lambda: open_plan(sign_document(owner.owner, plan), key))
print(json.dumps(found))
"""
SIMULATOR = """
import inspect
import numpy as np, torch
import shoal
from shoal.simulation.engine import simulate as engine

found["default"] = inspect.signature(shoal.simulate).parameters["probe"].default
seen, run = [], engine.simulate
engine.simulate = lambda *given, **others: seen.append(given[4].recipe.probe) or run(*given, **others)
x = np.zeros((4, 2), np.float32)
parts = [{"train": (x, np.arange(4) % 2)}] * 3
shoal.simulate(torch.nn.Linear(2, 2), parts, strategy="fedavg", rounds=1, probe=0.25)
found["run"] = seen
found["refused"] = refused(lambda: shoal.simulate(torch.nn.Linear(2, 2), parts, probe=1.5))
print(json.dumps(found))
"""
WORDS = "probe is a number above 0 and at most 1, not"


def after(script):
    done = python(ADDED + script)
    assert not done.returncode, done.stderr
    return json.loads(done.stdout)


def test_fleet():
    found = after(FLEET)
    assert "--probe" in found["help"]
    assert "A choice that this test adds (a number above 0 and at most 1). [default: 0.5]" in found["help"]
    assert found["command"] == f"OutOfRangeError: {WORDS} 2.0"
    assert (found["shown"], found["device"]) == (0.25, 0.25)
    assert f"{WORDS} 1.5" in found["refused"]


@pytest.mark.torch
def test_simulator():
    found = after(SIMULATOR)
    assert (found["default"], found["run"]) == (0.5, [0.25])
    assert found["refused"] == f"OutOfRangeError: {WORDS} 1.5"
