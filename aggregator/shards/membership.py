"""A worker's membership in a fleet: its keys, the owner's grant, the roster and the run plans it serves.

`signed_presence` and `witness` make and read the presences that the aggregator and its workers sign in clear.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from crypto.seal.identity import open_document, sign_document
from shoal.membership.directory import Membership, accept_grant, make_identity
from shoal.membership.grants import WORKER_ROLE
from shoal.protocol.channels import WORKER_STATE
from shoal.protocol.chunking import parse, split
from shoal.protocol.documents import AggregatorGrant
from shoal.protocol.jobs import WorkerPresence
from shoal.transport.rivals import Witness
from shoal.util.files import private_directory
from shoal.version import VERSION

if TYPE_CHECKING:
    from crypto.seal.identity import Identity

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


def signed_presence(identity: Identity, fleet: str, birth: int, *, online: bool, rival: int = 0) -> bytes:
    """Return the presence of a start of a program; ``rival`` is a later start with the same identity, or 0."""
    told = WorkerPresence(fleet=fleet, worker=identity.name, birth=birth, online=online, version=VERSION, rival=rival)
    (chunk,) = split(sign_document(identity, told), kind=WORKER_STATE.kind, round=0)
    return chunk


def witness(identity: Identity, fleet: str, topic: str, birth: int) -> Witness:
    """Return what speaks for this start of a program on ``topic``."""

    def read(payload: bytes) -> tuple[int, int] | None:
        told = open_document(parse(payload)[1], WorkerPresence, identity.member.sign_key)
        return (told.birth, told.rival) if told.online and told.fleet == fleet else None

    def presence(rival: int) -> bytes:
        return signed_presence(identity, fleet, birth, online=True, rival=rival)

    return Witness(topic, birth, presence, read)
