"""A worker's membership in a fleet: its keys, the owner's grant, the roster and the run plans it serves."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from shoal.membership.directory import Membership, accept_grant, make_identity
from shoal.membership.grants import WORKER_ROLE
from shoal.protocol.documents import AggregatorGrant
from shoal.util.files import private_directory

RUNS_DIRECTORY: Final = "runs"


class WorkerMembership(Membership[AggregatorGrant]):
    """The membership of a worker, with the broadcast key in use as ``group``. Its grant has no field for a mask secret."""

    def __init__(self, directory: Path) -> None:
        """Load what `join` left in ``directory``.

        Raises:
            NotEnrolledError: the directory holds no membership.
            UntrustedError: the roster is not the owner's, or has expired.
        """
        super().__init__(directory, AggregatorGrant)

    def use_version(self, version: int) -> None:
        """Put the secrets of a key version in force if they are newer than those in use."""
        grant = self.newer(version)
        if grant is not None:
            self.promote(grant)


def init(directory: Path, name: str) -> Path:
    """Make a worker's keys and its directory; return the path of the card for the owner."""
    card = make_identity(directory, name, WORKER_ROLE)
    private_directory(directory / RUNS_DIRECTORY)
    return card


def join(directory: Path, grant_file: bytes, owner_fingerprint: str) -> WorkerMembership:
    """Accept the owner's grant and return the membership."""
    accept_grant(directory, grant_file, AggregatorGrant, owner_fingerprint)
    return WorkerMembership(directory)
