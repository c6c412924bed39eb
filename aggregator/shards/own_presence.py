"""Presences that the aggregator and its workers sign in clear: of this program, and of another one with its identity."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crypto.seal.signed import open_document, sign_document
from shoal.protocol.channels import WORKER_STATE
from shoal.protocol.chunking import parse, split
from shoal.protocol.jobs import WorkerPresence
from shoal.transport.rivals import Witness
from shoal.version import VERSION

if TYPE_CHECKING:
    from crypto.seal.identity import Identity


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
