"""`make gpu` ends on a machine without a card with every part skipped by name; with one, two ranks share it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from shoal_lab.bench.race.tasks import Task

from tests.gpu import check
from tests.helpers.trees import ROOT

NO_CARD = check.lacking()
SHARED = """
import numpy as np
from aggregator.numerics.backend import NumpyBackend
from aggregator.numerics.torch_backend import TorchBackend
from shoal.simulation.engine.ranks import ByCoordinates, torchrun_ranks
rows = np.random.default_rng(0).standard_normal((50, 100_000), dtype=np.float32)
with torchrun_ranks() as ranks:
    found = ByCoordinates(TorchBackend("cuda"), ranks).gram(rows)
    assert ranks.world == 2
np.testing.assert_allclose(found, NumpyBackend().gram(rows), atol=0.1)
"""


@pytest.mark.skipif(not NO_CARD, reason="this machine has a card")
def test_without_a_card_parts_are_skipped() -> None:
    """The whole of `make gpu`, with this Python."""
    words = ["make", "--silent", "gpu", f"PYTHON={sys.executable}"]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert document.pop("versions")["python"] == sys.version.split()[0]
    assert document == {name: {"skipped": NO_CARD} for name in ("limits", "equality", "kernels", "race", "ranks")}


@pytest.mark.skipif(bool(NO_CARD), reason=NO_CARD)
def test_two_ranks_share_a_card(tmp_path: Path) -> None:
    """The products of two processes on one card are those of the CPU."""
    program = tmp_path / "shared.py"
    program.write_text(SHARED)
    words = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", str(program)]
    subprocess.run(words, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=80, check=True)


@pytest.mark.torch
@pytest.mark.skipif(NO_CARD == "torch is not installed", reason=NO_CARD)
def test_parts_run_with_the_cpu_as_the_card(monkeypatch: pytest.MonkeyPatch) -> None:
    """At small sizes; the figures mean nothing."""
    monkeypatch.setattr(check, "CARD", "cpu")
    monkeypatch.setattr(check, "SIZES", ((8, 500), (30, 20_000)))
    monkeypatch.setattr("shoal_lab.bench.race.tasks.TASKS", {"logistic": Task("logistic", 50, devices=3)})
    names = ("sgemm_flops_per_s", "dgemm_flops_per_s", "pinned_copy_bytes_per_s")
    found = check.kernels(dict.fromkeys(names, 1e10))
    assert found.keys() == {f"{k} {size}" for k in ("gram", "edc", "cut", "mean") for size in ("8 x 500", "30 x 20000")}
    assert found["cut 30 x 20000"]["equal"]
    assert found["gram 30 x 20000"]["largest_difference"] < 1e-5
    assert min(row["share_of_limit"] for row in found.values()) > 0
    (trained,) = check.race().values()
    assert min(trained.values()) > 0


def test_every_part_is_a_function() -> None:
    assert all(callable(getattr(check, name)) for name in check.PARTS)
    assert [path for path in check.EQUAL if not (ROOT / path).exists()] == []
