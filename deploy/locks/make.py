"""Write the locks: of each package that a party needs one version, with the hashes of its wheels. `make locks`.

    python deploy/locks/make.py

A lock is a requirements file beside this one, named after an extra: edge.txt, edge-lite.txt, aggregator.txt, keeper.txt and
fleet.txt.
Images, Debian packages and the lists of a release are installed from it with `pip install --require-hashes`.

Rules:

1. pip chooses the packages, on this machine, in the versions that are installed beside this program: the tests ran with them.
2. The hashes are those of the same versions' wheels for every Python and processor that Shoal supports, glibc 2.28.
3. torch's builds with NVIDIA's libraries are left out. Where pip finds none but these, the lock has no torch for that Python:
   PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu make locks
"""

from __future__ import annotations

import json
import runpy
import subprocess
import sys
import tempfile
from collections import defaultdict
from pathlib import Path
from typing import Any, Final

HERE: Final = Path(__file__).resolve().parent
DEBIAN: Final = runpy.run_path(str(HERE.parent / "debian" / "build.py"), run_name="build")
PROJECT: Final = DEBIAN["PROJECT"]
EXTRAS: Final = ("edge", "edge-lite", "aggregator", "keeper", "fleet")
PYTHONS: Final = [
    c.rpartition(" ")[2] for c in PROJECT["classifiers"] if c.startswith("Programming Language :: Python :: ")
]
HEAD: Final = "# `make locks` writes this file: versions that the tests ran with, and their wheels for all platforms.\n"
CPU_BUILD: Final = "+cpu"
"""What the names of torch's builds without NVIDIA's libraries have. PyPI has none of them for Linux."""


def report(*arguments: str) -> list[dict[str, Any]]:
    """Return the packages that pip would install.

    Raises:
        SystemExit: it finds no set of them.
    """
    command = [
        sys.executable,
        "-m",
        "pip",
        "install",
        "--dry-run",
        "--ignore-installed",
        "--quiet",
        "--only-binary=:all:",
    ]
    done = subprocess.run([*command, "--report=-", *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"pip finds no wheels: {done.stderr.strip()}")
    return list(json.loads(done.stdout)["install"])


def pin(item: dict[str, Any]) -> str:
    """Return a package of a report as ``name==version``, without the name of its build."""
    name, version = item["metadata"]["name"], item["metadata"]["version"]
    return f"{name.lower().replace('_', '-')}=={version.partition('+')[0]}"


def pins(extra: str, tested: Path) -> list[str]:
    """Return the packages of an extra as ``name==version``."""
    needs = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"][extra]]
    return sorted(pin(item) for item in report(f"--constraint={tested}", *needs))


def wheels(python: str, machine: str, wanted: list[str]) -> dict[str, str]:
    """Return pin -> hash of its wheel for one Python and processor."""
    places = [f"--platform={name}" for name in DEBIAN["platforms"](machine)]
    found = {}
    for item in report("--no-deps", f"--python-version={python}", f"--target={HERE}", *places, *wanted):
        file = item["download_info"]
        if item["metadata"]["name"] == "torch" and CPU_BUILD not in file["url"].replace("%2B", "+"):
            sys.stderr.write(f"torch: no build without NVIDIA's libraries for Python {python} on {machine}; left out\n")
        else:
            found[pin(item)] = file["archive_info"]["hashes"]["sha256"]
    return found


def main() -> None:
    """Write all locks."""
    freeze = [
        sys.executable,
        "-m",
        "pip",
        "freeze",
        "--exclude-editable",
        "--exclude",
        "shoal",
        "--exclude",
        "shoal-lab",
    ]
    hashes = defaultdict(set)
    with tempfile.TemporaryDirectory(prefix="shoal-locks-") as folder:
        tested = Path(folder, "tested.txt")
        tested.write_bytes(subprocess.run(freeze, capture_output=True, check=True).stdout)
        of_extra = {extra: pins(extra, tested) for extra in EXTRAS}
    wanted = sorted(set().union(*of_extra.values()))
    for python in PYTHONS:
        for machine in DEBIAN["MACHINES"].values():
            for one, digest in wheels(python, machine, wanted).items():
                hashes[one].add(digest)
    for extra, named in of_extra.items():
        rows = [
            " \\\n    ".join([one, *(f"--hash=sha256:{digest}" for digest in sorted(hashes[one]))]) for one in named
        ]
        (HERE / f"{extra}.txt").write_text(HEAD + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
