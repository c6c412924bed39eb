"""The program of a keeper: its files, and its checks."""

from __future__ import annotations

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
    daemon.join(directory, fleet.add_keeper(card.read_bytes()).read_bytes(), fleet.fingerprint)
    found = results(directory)
    assert (found["membership"], found["memory"], found["broker"]) == ("ok", "ok", "failure")
    (directory / MEMORY_FILE).unlink()
    assert results(directory)["memory"] == "failure"
