"""Build a release of the commit that is checked out: wheels, sources, Debian packages, lists of packages, notes and checksums.

    python -m deploy.release.make [--out DIR]     # `make release`

Rules:

1. The version stands in ``shoal/version.py`` alone. It is X.Y.Z: a development version is not released.
2. The tree is clean, so that the commit has everything that is built.
3. CHANGELOG.md has a dated section for the version, which becomes the notes.
4. A version is built once: not if it has a tag, or its files are in the output folder.
5. All is built twice, from two exports of the commit in different folders, and must be equal byte by byte. Times in the archives
   are the commit's (SOURCE_DATE_EPOCH).
6. The wheel is installed for each party with the packages of its lock (../locks), which must have all that the party needs.
   cyclonedx-py lists what is there. A list has the commit's time and no serial number, so that it can be made again.
7. The Debian packages of both architectures hold that wheel and the packages of the same locks.

Example: for version 0.1.0 the folder ``dist/0.1.0`` has the archives and packages, ``shoal-edge-0.1.0.cdx.json`` and the lists of
the other parties, ``shoal-0.1.0.md`` and ``SHA256SUMS``, which `sha256sum --check` reads.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import venv
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[2]
SUMS: Final = "SHA256SUMS"
PARTIES: Final = ("edge", "aggregator", "keeper", "fleet")
"""Extras of the wheel whose packages are listed. The others are for researchers and for tests."""
ARCHITECTURES: Final = ("amd64", "arm64")
"""Of the Debian packages."""
_VERSION: Final = re.compile(r'^VERSION: Final = "([^"]+)"$', re.MULTILINE)
_RELEASED: Final = re.compile(r"\d+\.\d+\.\d+")
_NAMES_SHOWN: Final = 5


class ReleaseError(Exception):
    """A release can't be built; the message has the remedy."""


def version_of(root: Path) -> str:
    """Return the version in ``shoal/version.py``.

    Raises:
        ReleaseError: there is none, or it is a development version.
    """
    found = _VERSION.search((root / "shoal/version.py").read_text())
    if found is None:
        raise ReleaseError('shoal/version.py has no line VERSION: Final = "X.Y.Z"')
    if _RELEASED.fullmatch(found[1]) is None:
        raise ReleaseError(f"shoal/version.py has {found[1]}, which is no release: write X.Y.Z there, and commit")
    return found[1]


def notes_of(changelog: str, version: str) -> str:
    """Return the section of a version in the changelog, without its heading.

    Raises:
        ReleaseError: there is none, it has no date, or it is empty.
    """
    sections = re.split(r"^## ", changelog, flags=re.MULTILINE)[1:]
    section = next((s for s in sections if s.startswith(f"[{version}]")), None)
    if section is None:
        raise ReleaseError(f"CHANGELOG.md has no section for {version}: add ## [{version}] - YYYY-MM-DD")
    heading, _, body = section.partition("\n")
    if re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d{{2}}-\d{{2}}", heading) is None:
        raise ReleaseError(f"CHANGELOG.md has {heading!r}: a release has its date, ## [{version}] - YYYY-MM-DD")
    if not body.strip():
        raise ReleaseError(f"CHANGELOG.md says nothing of {version}: write the changes that users notice")
    return body.strip() + "\n"


def release(root: Path, out: Path) -> list[Path]:
    """Build a release and return its files.

    Args:
        root: the repository, with git.
        out: the folder under which a folder of the version's name is made.

    Raises:
        ReleaseError: a rule of this module is broken.
    """
    version = version_of(root)
    _check_clean(root)
    notes = notes_of((root / "CHANGELOG.md").read_text(), version)
    target = out / version
    if _git(root, "tag", "--list", f"v{version}"):
        raise ReleaseError(f"{version} is released: there is a tag v{version}. Give shoal/version.py the next version")
    if target.exists():
        raise ReleaseError(f"{target} exists: move it away to build {version} again")
    made_at_s = int(_git(root, "log", "-1", "--format=%ct").decode())
    with tempfile.TemporaryDirectory(prefix="shoal-release-") as folder:
        first, second = (_built(root, Path(folder) / name, made_at_s) for name in ("first", "second"))
        for one, other in zip(first, second, strict=True):
            if one.read_bytes() != other.read_bytes():
                raise ReleaseError(
                    f"two builds of {one.name} differ: the build reads something that is not in the commit"
                )
        if any(f"-{version}" not in path.name for path in first):
            raise ReleaseError(
                f"lab/pyproject.toml has another version than shoal/version.py: write {version} there, twice"
            )
        stage = Path(folder) / version
        stage.mkdir()
        for path in first:
            shutil.copy(path, stage / path.name)
        _list_packages(root, stage, version, made_at_s)
        wheel = str(stage / f"shoal-{version}-py3-none-any.whl")
        for architecture in ARCHITECTURES:
            build = ("deploy.debian.build", "--wheel", wheel, "--arch", architecture, "--out", str(stage))
            _python(f"the packages for {architecture} can't be built", *build, cwd=root, made_at_s=made_at_s)
        (stage / f"shoal-{version}.md").write_text(f"# Shoal {version}\n\n{notes}")
        sums = [f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in sorted(stage.iterdir())]
        (stage / SUMS).write_text("".join(sums))
        out.mkdir(parents=True, exist_ok=True)
        shutil.copytree(stage, target)
    return sorted(target.iterdir())


def _check_clean(root: Path) -> None:
    changed = _git(root, "status", "--porcelain").decode().splitlines()
    if changed:
        names = ", ".join(line[3:] for line in changed[:_NAMES_SHOWN])
        more = f" and {len(changed) - _NAMES_SHOWN} more" if len(changed) > _NAMES_SHOWN else ""
        raise ReleaseError(f"the tree has changes that are in no commit: {names}{more}; commit or remove them")


def _built(root: Path, folder: Path, made_at_s: int) -> list[Path]:
    """Export the commit, build the source distribution from it and both wheels from that; return the three by name."""
    source, unpacked, made = folder / "commit", folder / "sdist", folder / "made"
    source.mkdir(parents=True)
    with tarfile.open(fileobj=io.BytesIO(_git(root, "archive", "HEAD"))) as archive:
        archive.extractall(source, filter="data")
    _hatch(source, made, "sdist", made_at_s)
    (sdist,) = made.iterdir()
    # From the archive that users get, which shows that it is complete.
    with tarfile.open(sdist) as archive:
        archive.extractall(unpacked, filter="data")
    (inner,) = unpacked.iterdir()
    for project in (inner, inner / "lab"):
        _hatch(project, made, "wheel", made_at_s)
    return sorted(made.iterdir())


def _hatch(source: Path, out: Path, target: str, made_at_s: int) -> None:
    command = ["hatchling", "build", "--target", target, "--directory", str(out)]
    _python(f"hatchling can't build the {target}", *command, cwd=source, made_at_s=made_at_s)


def _list_packages(root: Path, stage: Path, version: str, made_at_s: int) -> None:
    """Write a CycloneDX list of the packages of each party that the wheel in ``stage`` is installed with."""
    (wheel,) = stage.glob(f"shoal-{version}-*.whl")
    ours = f" @ {wheel.as_uri()} --hash=sha256:{hashlib.sha256(wheel.read_bytes()).hexdigest()}\n"
    for party in PARTIES:
        with tempfile.TemporaryDirectory(prefix="shoal-release-") as folder:
            needs, place = Path(folder, "requirements.txt"), Path(folder, "installed")
            needs.write_text((root / f"deploy/locks/{party}.txt").read_text() + f"shoal[{party}]{ours}")
            venv.create(place, symlinks=True)  # without pip, which would be listed
            install = ("--python", str(place), "install", "--quiet", "--no-compile", "--require-hashes")
            _python(f"pip can't install shoal[{party}]", "pip", *install, "--requirement", str(needs))
            reads = ["--pyproject", str(root / "pyproject.toml"), "--output-reproducible", str(place)]
            found = _python("cyclonedx-py fails", "cyclonedx_py", "environment", *reads, made_at_s=made_at_s)
        document = json.loads(found)
        document["metadata"]["component"]["version"] = version  # which pyproject.toml leaves to the build
        (stage / f"shoal-{party}-{version}.cdx.json").write_text(json.dumps(document, indent=2) + "\n")


def _python(failure: str, *module: str, cwd: Path | None = None, made_at_s: int = 0) -> str:
    """Run a module of this interpreter with the words that follow it; return its output."""
    # A PYTHONPATH would bring packages that no party has.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    environment = {**inherited, "SOURCE_DATE_EPOCH": str(made_at_s)}
    command = [sys.executable, "-m", *module]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ReleaseError(f"{failure}: {(done.stderr or done.stdout).strip()}")
    return done.stdout


def _git(root: Path, *arguments: str) -> bytes:
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, check=False)
    if done.returncode:
        raise ReleaseError(f"git {arguments[0]} failed: {done.stderr.decode(errors='replace').strip()}")
    return done.stdout


def main() -> None:
    """Build the release of the commit that is checked out; exit status 1 with a reason if that can't be done."""
    parser = argparse.ArgumentParser(prog="make release", description="Build a release of the checked-out commit.")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder for the release's own folder")
    arguments = parser.parse_args()
    try:
        files = release(ROOT, arguments.out)
    except ReleaseError as error:
        sys.exit(f"no release: {error}")
    for path in files:
        sys.stdout.write(f"{path}\n")


if __name__ == "__main__":
    main()
