"""Build the Debian packages of each party from the wheel: `make packages`, or `python deploy/debian/build.py --help`.

A package holds a private environment in /opt/shoal-PARTY: what a virtual environment of /usr/bin/python3 would hold, without
pip. All of it comes from wheels, none of which is run here, so that one machine makes the packages of both architectures. The
libraries are those of ../locks, checked by hash. The packages fit one minor version of Python, that of the interpreter that runs
this script, since the compiled wheels do.

Of our own code a package holds only the parts that the image of its party holds (the COPY lines of ../docker/*.Dockerfile):
the aggregator's package has no mask code that could be loaded. The owner's holds the whole wheel.
"""

from __future__ import annotations

import argparse
import compileall
import csv
import gzip
import os
import py_compile
import re
import runpy
import shutil
import stat
import subprocess
import sys
import tempfile
import tomllib
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Final

HERE: Final = Path(__file__).resolve().parent
ROOT: Final = HERE.parents[1]
LOCKS: Final = ROOT / "deploy" / "locks"
PROJECT: Final = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
VERSION: Final = runpy.run_path(str(ROOT / "shoal" / "version.py"))["VERSION"].replace(".dev", "~dev")
"""The packages' version; Debian sorts a tilde before the end of a version, so that a release replaces what led to it."""
PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor}"
NEXT_PYTHON: Final = f"{sys.version_info.major}.{sys.version_info.minor + 1}"

MACHINES: Final = {"amd64": "x86_64", "arm64": "aarch64"}
"""Debian's name of an architecture, and the one in the names of wheels."""
GLIBC_MINOR: Final = 28
"""The newest glibc 2.x that a wheel may need: ONNX Runtime's wheels need 2.28."""
OLDEST_GLIBC_MINOR: Final = 17
"""The oldest one that wheels of our dependencies are still built for (manylinux2014)."""

DROPPED_DIRECTORIES: Final = frozenset({"tests", "__pycache__", "f2py", "distutils"})
"""Directories of libraries that no program imports; numpy loads f2py and distutils on demand alone."""
DROPPED_FILES: Final = ("onnxruntime/capi/libonnxruntime.so.*", "**/*.a", "**/*.h", "**/*.pyi", "**/py.typed")
"""ONNX Runtime's wheel has its library twice: in its Python module, and as a file of 29 MB that nothing links."""
DROPPED_TREES: Final = ("bin", "share", "include", "torch/include", "torch/share")
"""Scripts and C++ headers."""

SCRIPTS: Final = ("postinst", "prerm", "postrm")
"""The maintainer scripts of a package with a service: NAME.sh beside this file, with the program's name for @PROGRAM@."""

DIRECTORY_MODE: Final = 0o755
PROGRAM_MODE: Final = 0o755
FILE_MODE: Final = 0o644
SECRET_MODE: Final = 0o600
"""Of /etc/shoal/*.env, which may hold the broker's password; systemd reads it as root."""
UNCOMPILED: Final = re.compile(r"/pygments/(lexers|styles)/")
"""4 MB of bytecode for modules that Rich reads, one at a time, to print a traceback."""
ZSTD_LEVEL: Final = 12
"""xz would save a sixth of it, but takes minutes for torch; dpkg reads zstd since Debian 12 and Ubuntu 18.04."""
SECOND_1980: Final = 315532800
"""Of files, unless SOURCE_DATE_EPOCH says otherwise: equal inputs give equal packages."""


@dataclass(frozen=True)
class Package:
    """A Debian package.

    Attributes:
        name: the package's.
        party: edge, aggregator, keeper or fleet: the program is shoal-PARTY, in /opt/shoal-PARTY.
        extra: the wheel's extra with the party's dependencies.
        summary: the first line of the description.
        details: the rest of it.
        dockerfile: the image whose parts of the wheel the package holds; None for the whole wheel.
        rivals: packages with the same files.
    """

    name: str
    party: str
    extra: str
    summary: str
    details: str
    dockerfile: str | None
    rivals: tuple[str, ...] = ()

    @property
    def program(self) -> str:
        """Return the name of the program, of its user and of its unit."""
        return f"shoal-{self.party}"

    @property
    def home(self) -> Path:
        """Return the environment's place in the package."""
        return Path("opt") / self.program

    @property
    def unit(self) -> Path | None:
        """Return the systemd unit of the repository; None for the owner, who runs no service."""
        unit = ROOT / "deploy" / "systemd" / f"{self.program}.service"
        return unit if unit.exists() else None


PACKAGES: Final = (
    Package(
        "shoal-edge",
        "edge",
        "edge",
        "federated learning over MQTT: a device",
        "Trains on the data of this machine and sends masked, sealed updates only.",
        "edge.Dockerfile",
        ("shoal-edge-lite",),
    ),
    Package(
        "shoal-edge-lite",
        "edge",
        "edge-lite",
        "federated learning over MQTT: a device without ONNX Runtime",
        "As shoal-edge, for tasks without convolutions, which numpy computes.",
        "edge.Dockerfile",
        ("shoal-edge",),
    ),
    Package(
        "shoal-aggregator",
        "aggregator",
        "aggregator",
        "federated learning over MQTT: the aggregator",
        "Groups devices and averages their masked updates, which it can't read.",
        "aggregator.Dockerfile",
    ),
    Package(
        "shoal-keeper",
        "keeper",
        "keeper",
        "federated learning over MQTT: a keeper",
        "Opens sums of updates for the aggregator of a fleet, and no single update.",
        "aggregator.Dockerfile",
    ),
    Package(
        "shoal-fleet",
        "fleet",
        "fleet",
        "federated learning over MQTT: the owner's tools",
        "Keys, roster, tasks and runs of a fleet. For the owner's machine, not for the server.",
        None,
    ),
)


def platforms(machine: str) -> list[str]:
    """Return the names of wheels' platforms that run with glibc 2.28 on ``machine``, the newest first."""
    versions = [f"manylinux_2_{minor}_{machine}" for minor in range(GLIBC_MINOR, OLDEST_GLIBC_MINOR - 1, -1)]
    return [*versions, f"manylinux2014_{machine}"]


def resolve(wheel: Path, extra: str, machine: str, site: Path) -> None:
    """Put ``wheel`` and the wheels for ``machine`` that the lock of ``extra`` names into ``site``, a new directory.

    Without dependencies: the lock has them all, and pip would take the conditions in them for this machine's.

    Raises:
        SystemExit: pip found no wheel with a hash of the lock.
    """
    choices = [f"--platform={name}" for name in platforms(machine)]
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--only-binary=:all:", "--no-deps"]
    lock = ["--require-hashes", f"--requirement={LOCKS / extra}.txt"]
    done = subprocess.run([*pip, *choices, f"--python-version={PYTHON}", f"--target={site}", *lock], check=False)
    if done.returncode:
        raise SystemExit(
            f"pip found no wheels of deploy/locks/{extra}.txt for {machine} with Python {PYTHON}; where torch is the one, "
            "make locks finds its CPU build with PIP_EXTRA_INDEX_URL=https://download.pytorch.org/whl/cpu, and so does this"
        )
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)


def parts(dockerfile: str) -> tuple[str, ...]:
    """Return the files and directories of our packages that an image's COPY lines name."""
    lines = (ROOT / "deploy" / "docker" / dockerfile).read_text(encoding="utf-8").splitlines()
    named = [source for line in lines if line.startswith("COPY ") for source in line.split()[1:-1]]
    return tuple(name for name in named if not name.startswith("deploy/"))


def keep_parts(site: Path, wheel: Path, kept: tuple[str, ...]) -> None:
    """Remove from ``site`` the wheel's files that are none of ``kept`` nor below one of them."""
    with zipfile.ZipFile(wheel) as archive:
        names = [name for name in archive.namelist() if ".dist-info/" not in name]
    for name in names:
        if not any(name == part or name.startswith(f"{part}/") for part in kept):
            (site / name).unlink()
    remove_empty(site)


def remove_empty(folder: Path) -> None:
    """Remove the directories below ``folder`` that hold no file."""
    for path, _, _ in os.walk(folder, topdown=False):
        if path != str(folder) and not any(Path(path).iterdir()):
            Path(path).rmdir()


def prune(site: Path) -> None:
    """Remove what no program needs: tests, type stubs, headers, and ONNX Runtime's unlinked library."""
    for name in DROPPED_TREES:
        shutil.rmtree(site / name, ignore_errors=True)
    for path, directories, _ in os.walk(site):
        for name in [name for name in directories if name in DROPPED_DIRECTORIES]:
            shutil.rmtree(Path(path) / name)
            directories.remove(name)
    for pattern in DROPPED_FILES:
        for file in site.glob(pattern):
            file.unlink()
    remove_empty(site)
    for record in site.glob("*.dist-info/RECORD"):
        _shorten(record, site)


def _shorten(record: Path, site: Path) -> None:
    """Take the files that were removed out of a distribution's list of its files."""
    with record.open(newline="", encoding="utf-8") as file:
        rows = [row for row in csv.reader(file) if row and (site / row[0]).exists()]
    with record.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(rows)


def compile_modules(site: Path, installed: Path) -> None:
    """Write the bytecode, which a service's user could not write later.

    It is never compared with its source (unchecked hash), because dpkg is free to change times.

    Raises:
        SystemExit: a module of ours does not compile.
    """
    mode = py_compile.PycInvalidationMode.UNCHECKED_HASH
    # Libraries ship modules for other versions of Python, which need not compile.
    paths = {"stripdir": str(site), "prependdir": f"/{installed}"}
    compileall.compile_dir(site, quiet=2, rx=UNCOMPILED, invalidation_mode=mode, **paths)
    for package in ("shoal", "crypto"):
        if not compileall.compile_dir(site / package, quiet=1, invalidation_mode=mode, **paths):
            raise SystemExit(f"{package} does not compile")


def lay_out(package: Package, site: Path, root: Path) -> None:
    """Write a package's files below ``root``; ``site`` becomes its environment's packages."""
    home = root / package.home
    library = package.home / "lib" / f"python{PYTHON}" / "site-packages"
    (home / "bin").mkdir(parents=True)
    (root / library).parent.mkdir(parents=True)
    shutil.move(site, root / library)
    compile_modules(root / library, library)
    settings = ("home = /usr/bin", "include-system-site-packages = false", f"version = {PYTHON}")
    (home / "pyvenv.cfg").write_text("".join(f"{line}\n" for line in settings), encoding="ascii")
    (home / "bin" / "python3").symlink_to("/usr/bin/python3")
    module, function = PROJECT["scripts"][package.program].split(":")
    program = home / "bin" / package.program
    start = f"#!/{package.home}/bin/python3\nfrom {module} import {function}\n\n{function}()\n"
    program.write_text(start, encoding="ascii")
    _link(root / "usr/bin" / package.program, f"/{package.home}/bin/{package.program}")
    documents = root / "usr/share/doc" / package.name
    documents.mkdir(parents=True)
    shutil.copy(HERE / "copyright", documents / "copyright")
    shutil.copy(ROOT / "docs" / "packages.md", documents / "packages.md")
    (documents / "changelog.gz").write_bytes(gzip.compress((ROOT / "CHANGELOG.md").read_bytes(), mtime=0))
    if package.unit is not None:
        unit = root / "lib/systemd/system" / package.unit.name
        unit.parent.mkdir(parents=True)
        unit.write_text(unit_of(package), encoding="utf-8")
        settings_file = root / "etc/shoal" / f"{package.party}.env"
        settings_file.parent.mkdir(parents=True)
        shutil.copy(HERE / f"{package.party}.env", settings_file)


def unit_of(package: Package) -> str:
    """Return the text of a package's systemd unit: the repository's, with the package's paths and without its head."""
    assert package.unit is not None, "the owner has no service"
    text = package.unit.read_text(encoding="utf-8")
    text = text[text.index("[Unit]") :]
    lines = []
    for line in text.splitlines():
        if line.startswith("Documentation="):
            lines.append(f"Documentation=file:///usr/share/doc/{package.name}/packages.md")
        else:
            lines.append(line.replace("/opt/shoal/.venv/bin/", f"/{package.home}/bin/"))
    return "".join(f"{line}\n" for line in lines)


def _link(path: Path, target: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.symlink_to(target)


def write_control(package: Package, architecture: str, root: Path) -> None:
    """Write DEBIAN/control, the maintainer scripts and the list of configuration files, once all other files stand."""
    needs = [f"python3 (>= {PYTHON}~)", f"python3 (<< {NEXT_PYTHON}~)", f"libc6 (>= 2.{GLIBC_MINOR})", "libstdc++6"]
    needs += ["adduser"] if package.unit is not None else []
    rivals = ", ".join(package.rivals)
    fields = {
        "Package": package.name,
        "Version": VERSION,
        "Architecture": architecture,
        "Maintainer": "The Shoal developers <shoal@localhost>",
        "Installed-Size": str(installed_bytes(root) // 1024),
        "Depends": ", ".join(needs),
        "Conflicts": rivals,
        "Replaces": rivals,
        "Section": "science",
        "Priority": "optional",
        "Description": f"{package.summary}\n {package.details}",
    }
    control = root / "DEBIAN"
    control.mkdir()
    text = "".join(f"{name}: {value}\n" for name, value in fields.items() if value)
    (control / "control").write_text(text, encoding="utf-8")
    if package.unit is not None:
        (control / "conffiles").write_text(f"/etc/shoal/{package.party}.env\n", encoding="ascii")
        for name in SCRIPTS:
            script = (HERE / f"{name}.sh").read_text(encoding="utf-8").replace("@PROGRAM@", package.program)
            (control / name).write_text(script, encoding="utf-8")


def installed_bytes(root: Path) -> int:
    """Return the space that a package's files take on a disk, in bytes: what `du` counts."""
    files = [Path(path) / name for path, directories, names in os.walk(root) for name in (*directories, *names)]
    return sum(file.lstat().st_blocks * 512 for file in files if file.parts[len(root.parts)] != "DEBIAN")


def set_modes(root: Path, second: int) -> None:
    """Give every file and directory its mode and its time."""
    for path, directories, names in os.walk(root, topdown=False):
        for name in names:
            file = Path(path) / name
            if not file.is_symlink():
                file.chmod(_mode(file.relative_to(root), runs=bool(file.stat().st_mode & stat.S_IXUSR)))
            os.utime(file, (second, second), follow_symlinks=False)
        for name in directories:
            (Path(path) / name).chmod(DIRECTORY_MODE)
            os.utime(Path(path) / name, (second, second))
    root.chmod(DIRECTORY_MODE)


def _mode(file: Path, *, runs: bool) -> int:
    """Return the mode of a file below the package's root; ``runs`` if it may be executed as it is."""
    if file.parts[:2] == ("etc", "shoal"):
        return SECRET_MODE
    script = file.parts[0] == "DEBIAN" and file.name in SCRIPTS
    program = file.parts[0] == "opt" and (runs or file.parts[2:3] == ("bin",))
    return PROGRAM_MODE if script or program else FILE_MODE


def second() -> int:
    """Return the time of all files, unix seconds."""
    return int(os.environ.get("SOURCE_DATE_EPOCH", SECOND_1980))


def pack(root: Path, file: Path) -> None:
    """Write the package ``file`` from what lies below ``root``."""
    command = ["dpkg-deb", "--root-owner-group", "-Zzstd", f"-z{ZSTD_LEVEL}", "--build", str(root), str(file)]
    environment = {**os.environ, "SOURCE_DATE_EPOCH": str(second())}
    subprocess.run(command, check=True, env=environment, stdout=subprocess.DEVNULL)


def build(package: Package, wheel: Path, architecture: str, out: Path) -> Path:
    """Build one package and return its file."""
    with tempfile.TemporaryDirectory(prefix="shoal-package-") as folder:
        site, root = Path(folder) / "site", Path(folder) / "root"
        resolve(wheel, package.extra, MACHINES[architecture], site)
        if package.dockerfile is not None:
            keep_parts(site, wheel, parts(package.dockerfile))
        prune(site)
        lay_out(package, site, root)
        write_control(package, architecture, root)
        file = out / f"{package.name}_{VERSION}_{architecture}.deb"
        set_modes(root, second())
        pack(root, file)
        mb = installed_bytes(root) / 1e6
    print(f"{file}: {file.stat().st_size / 1e6:.1f} MB, installed {mb:.1f} MB")  # noqa: T201 - a script's result
    return file


def build_wheel(out: Path) -> Path:
    """Build our wheel in ``out`` and return its file."""
    command = [sys.executable, "-m", "hatchling", "build", "--target", "wheel", "--directory", str(out)]
    subprocess.run(command, check=True, cwd=ROOT, stdout=subprocess.DEVNULL)
    return next(out.glob("shoal-*.whl"))


def main() -> None:
    """Run the script."""
    parser = argparse.ArgumentParser(description="Build the Debian packages from the wheel.")
    names = [package.name for package in PACKAGES]
    parser.add_argument("packages", nargs="*", metavar="PACKAGE", help=f"{', '.join(names)}; all by default")
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="directory of the packages (dist)")
    parser.add_argument("--wheel", type=Path, help="a wheel of this version; by default it is built")
    parser.add_argument(
        "--arch", choices=sorted(MACHINES), help="the packages' architecture; this machine's by default"
    )
    given = parser.parse_args()
    unknown = sorted(set(given.packages) - set(names))
    if unknown:
        parser.error(f"no such package: {', '.join(unknown)}")
    if shutil.which("dpkg-deb") is None:
        raise SystemExit("dpkg-deb is not here: build on Debian or Ubuntu, or install dpkg")
    own = {machine: name for name, machine in MACHINES.items()}.get(os.uname().machine)
    architecture = given.arch or own
    if architecture is None:
        raise SystemExit(f"no wheels for {os.uname().machine}: choose --arch amd64 or --arch arm64")
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="shoal-wheel-") as folder:
        wheel = given.wheel.resolve() if given.wheel else build_wheel(Path(folder))
        for package in PACKAGES:
            if not given.packages or package.name in given.packages:
                build(package, wheel, architecture, given.out)


if __name__ == "__main__":
    main()
