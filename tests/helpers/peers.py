"""Programs of the race, run as the race runs them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from shoal_lab.bench.race import environments
from shoal_lab.bench.race.benchmark import _program
from shoal_lab.bench.race.environments import MissingPeerError
from shoal_lab.bench.race.tasks import TASKS

ROUNDS = 3


def accuracy_of(system: str, path: Path) -> float:
    """Return a system's accuracy after three rounds of ``logistic``; skip the test if a peer is not installed."""
    try:
        python = environments.find(system) if system in environments.PEERS else Path(sys.executable)
    except MissingPeerError as error:
        pytest.skip(str(error))
    with _program(system, python, path, TASKS["logistic"], ROUNDS) as running:
        for _ in range(ROUNDS):
            assert running.round()["cpu_s"] > 0
        return running.answer()["accuracy"]
