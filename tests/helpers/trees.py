"""The source tree: its path, its packages and modules, and the files that a container image of it contains."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("shoal", "crypto", "edge_client", "aggregator")
"""Of the product; nothing in them imports the lab."""
LAB = "lab/shoal_lab"
NAMES = (*PACKAGES, "shoal_lab")
PROGRAMS = {
    name: target.removesuffix(":main")
    for name, target in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"].items()
}
"""The module of each program's command line."""
ONE_THREAD = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "NO_COLOR": "1", "COLUMNS": "100"}


def sources(*packages):
    """Return every module of the named packages, or of the product and the lab."""
    return sorted(p for package in packages or (*PACKAGES, LAB) for p in (ROOT / package).rglob("*.py"))


def lay_out_image(dockerfile, target):
    """Copy into ``target`` the files of a Dockerfile's COPY lines, and return it."""
    for line in (ROOT / dockerfile).read_text().splitlines():
        if not line.startswith("COPY "):
            continue
        *origins, into = line.split()[1:]
        for origin in origins:
            source, place = ROOT / origin, target / into
            if source.is_dir():
                shutil.copytree(source, place, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                place = place / source.name if into.endswith("/") else place
                place.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(source, place)
    return target


def python(script, *arguments, cwd=ROOT, timeout=60):
    """Run a script in a fresh interpreter that finds our packages in ``cwd`` only, and return the finished process."""
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        cwd=cwd,
        env={**os.environ, **ONE_THREAD, "PYTHONPATH": f"{cwd}{os.pathsep}{cwd}/lab"},
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        stdin=subprocess.DEVNULL,
    )
