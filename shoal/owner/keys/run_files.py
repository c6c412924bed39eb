"""Names and numbers of the run files in the owner's directory."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Final

RUNS: Final = "runs"
_NUMBERED: Final = re.compile(r"([0-9]{6})\.run")


def run_file(path: Path, run: int) -> Path:
    """Return the path of a run's file in the owner's directory ``path``."""
    return path / RUNS / f"{run:06d}.run"


def highest_run(path: Path) -> int:
    """Return the highest run number of a file in the owner's directory ``path``, 0 if it holds no run."""
    found = (_NUMBERED.fullmatch(p.name) for p in (path / RUNS).glob("*.run"))
    return max((int(m[1]) for m in found if m), default=0)
