"""The program of a keeper: its files, and its checks."""

from __future__ import annotations

import subprocess
import sys

from aggregator.config import AggregatorConfig
from aggregator.keeper import daemon
from aggregator.keeper.memory import MEMORY_FILE
from shoal.owner.keys.directory import FleetDirectory


def results(directory):
    return {check.name: check.result for check in daemon.diagnose(AggregatorConfig(directory))}


def test_doctor_looks_at_the_memory(tmp_path):
    fleet = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://localhost:1")
    directory = tmp_path / "keeper"
    card = daemon.init(directory, "keeper")
    assert results(directory)["membership"] == "failure"
    daemon.membership.join(directory, fleet.add_helper("keeper", card.read_bytes()).read_bytes(), fleet.fingerprint)
    found = results(directory)
    assert (found["membership"], found["memory"], found["broker"]) == ("ok", "ok", "failure")
    (directory / MEMORY_FILE).unlink()
    assert results(directory)["memory"] == "failure"


def test_keeper_is_small():
    """Neither the program nor a look of CFL loads torch or scikit-learn."""
    modules = "aggregator.keeper.daemon, aggregator.keeper.looks, aggregator.strategies.cfl, sys"
    heavy = '{"torch", "sklearn", "scipy", "prometheus_client"} & sys.modules.keys()'
    told = subprocess.run([sys.executable, "-c", f"import {modules}; print({heavy})"], capture_output=True, text=True)
    assert told.stdout == "set()\n", told.stderr
