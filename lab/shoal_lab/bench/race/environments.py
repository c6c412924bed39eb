"""Environments of their own for the peers, below the cache folder: their dependencies would not fit into Shoal's."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.metadata import version
from pathlib import Path
from typing import Final

from shoal.errors import ConfigError
from shoal.util.files import write_atomic
from shoal_lab.experiments.data.datasets import cache_dir

PEERS: Final[Mapping[str, str]] = {
    "pfl-research": "pfl==0.6.0",
    "flower": "flwr[simulation]==1.41.0",
    "flower-fleet": "flwr==1.42.0",
}
"""What pip installs for each peer, besides the torch that Shoal has; `bench.beside` runs the last."""
INSTALL_S: Final = 1800.0
"""Most seconds of an installation."""
_READY: Final = "ready.txt"


class MissingPeerError(ConfigError):
    """A peer's environment is not there, or could not be made."""


def folder(peer: str) -> Path:
    """Return the folder of a peer's environment."""
    return cache_dir() / "race" / peer


def requirements(peer: str) -> tuple[str, ...]:
    """Return what a peer's environment has: the peer, psutil, which counts CPU time, and the same torch as Shoal's."""
    return PEERS[peer], "psutil", "torch==" + version("torch").partition("+")[0]


def find(peer: str) -> Path:
    """Return the Python of a peer's environment.

    Raises:
        MissingPeerError: it is not there, or has another version of the peer or of torch.
    """
    ready = folder(peer) / _READY
    wanted = " ".join(requirements(peer))
    if not ready.is_file() or ready.read_text() != wanted:
        raise MissingPeerError(f"{wanted} is not installed in {folder(peer)}", hint="give --install")
    return folder(peer) / "bin" / "python"


def install(peer: str, progress: Callable[[str], None]) -> Path:
    """Make a peer's environment unless it is there; return its Python.

    Raises:
        MissingPeerError: pip can't install it.
    """
    try:
        return find(peer)
    except MissingPeerError:
        pass
    place, wanted = folder(peer), requirements(peer)
    progress(f"installing {' '.join(wanted)} in {place}")
    shutil.rmtree(place, ignore_errors=True)
    try:
        _run([sys.executable, "-m", "venv", str(place)])
        _run([str(place / "bin" / "python"), "-m", "pip", "install", "--quiet", *wanted])
    except (OSError, subprocess.SubprocessError) as error:
        shutil.rmtree(place, ignore_errors=True)
        said = getattr(error, "stderr", None) or str(error)
        reason = said.strip().splitlines()[-1] if said.strip() else "no reason given"
        raise MissingPeerError(
            f"{' '.join(wanted)} can't be installed: {reason}",
            hint="pip needs a package index: check the network, or name an index in PIP_INDEX_URL",
        ) from error
    write_atomic(place / _READY, " ".join(wanted).encode())
    return find(peer)


def _run(command: list[str]) -> None:
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=INSTALL_S)
