"""The conversation of a system's program with the benchmark, between two real processes."""

import json
import subprocess
import sys

import pytest
from shoal_lab.bench.race.tasks import descendants_cpu_s

from tests.helpers.trees import ROOT

pytestmark = pytest.mark.process

PROGRAM = """
import sys
from shoal_lab.bench.race.tasks import Turns

turns = Turns()
print("a library's chatter")
for _ in range(2):
    turns.begin()
    sum(range(200_000))
    turns.trained()
turns.tested(0.75)
"""
BURN_S = 0.3
BURN = f"""
import time

while time.process_time() < {BURN_S}:
    pass
print(1, flush=True)
input()
"""
CHILD = f"""
import subprocess, sys

subprocess.run([sys.executable, "-c", {BURN!r}])
"""


def program(text):
    return subprocess.Popen(
        [sys.executable, "-c", text],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": str(ROOT)},
    )


def test_requests_get_rounds_then_figures():
    process = program(PROGRAM)
    out, errors = process.communicate("go\ngo\n", timeout=30)
    first, second, end = map(json.loads, out.splitlines())
    assert first.keys() == second.keys() == {"cpu_s"}
    assert 0 < first["cpu_s"] < 10
    assert end["accuracy"] == 0.75
    assert 5 < end["peak_mb"] < 100, "this process has imported torch, the program has not"
    assert (process.returncode, "a library's chatter" in errors) == (0, True)


def test_a_program_ends_with_its_input():
    process = program(PROGRAM)
    out, errors = process.communicate("go\n", timeout=30)
    assert len(out.splitlines()) == 1
    assert process.returncode != 0
    assert "EndedError" in errors


def test_time_of_started_processes_counts():
    """Also of those that these have started, and of none beside them."""
    before = descendants_cpu_s()
    process = program(CHILD)
    assert process.stdout is not None
    assert process.stdin is not None
    try:
        assert process.stdout.readline() == "1\n"
        spent = descendants_cpu_s() - before
        apart = json.loads(
            subprocess.run(
                [sys.executable, "-c", "from shoal_lab.bench.race.tasks import *; print(descendants_cpu_s())"],
                env={"PYTHONPATH": str(ROOT)},
                capture_output=True,
                check=True,
            ).stdout
        )
    finally:
        process.stdin.close()
        process.wait(10)
        process.stdout.close()
        assert process.stderr is not None
        process.stderr.close()
    assert BURN_S - 1e-6 <= spent < BURN_S + 5  # a difference of two readings
    assert apart == 0
