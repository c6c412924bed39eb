"""The membership of a worker or a keeper in a fleet: its keys, the owner's grant and the roster.

`signed_presence` and `witness` make and read the presences that the aggregator, its workers and keepers sign in clear.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from crypto.seal.envelope import open_from_member, read_expected, seal_message_to_member
from crypto.seal.identity import Identity, open_document, sign_document
from shoal.membership.directory import Membership, accept_grant, make_identity
from shoal.membership.grants import WORKER_ROLE
from shoal.membership.roster import aggregator_of
from shoal.protocol.channels import ROSTER, WORKER_STATE, Channel, channel_at
from shoal.protocol.chunking import parse, split
from shoal.protocol.documents import AggregatorGrant
from shoal.protocol.jobs import WorkerPresence
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport.base import Transport, Will, publish_in_chunks
from shoal.transport.rivals import Witness
from shoal.util.files import private_directory
from shoal.version import VERSION

if TYPE_CHECKING:
    from shoal.protocol.reassembly import Transfer

RUNS_DIRECTORY: Final = "runs"


class WorkerMembership(Membership[AggregatorGrant]):
    """The membership of a worker or a keeper, with the broadcast key in use as ``group``.

    Its grant has no field for a mask secret.
    """

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

    def open_job(self, transfer: Transfer) -> tuple[Channel, memoryview]:
        """Return the channel and the message of a transfer from the aggregator.

        Raises:
            UntrustedError: it is not from the aggregator.
        """
        channel = channel_at(TopicKind.JOB, transfer.kind)
        sender = aggregator_of(self.roster)
        wanted = channel.head(self.fleet, sender.name, self.identity.name)
        head, at = read_expected(transfer.payload, wanted, "a job")
        message, _ = open_from_member(self.identity, transfer.payload, head, at, sender.sign_key, transfer.signed)
        return channel, message

    def take_roster(self, transfer: Transfer) -> None:
        """Adopt the roster in a transfer, which the aggregator has forwarded.

        Raises:
            UntrustedError: it is not from the aggregator, or not the owner's.
        """
        sender = aggregator_of(self.roster)
        head, at = read_expected(transfer.payload, ROSTER.head(self.fleet, sender.name), "the roster")
        _, plain = self.open_under_any(transfer.payload, head, at, sender.sign_key, transfer.signed)
        self.adopt(bytes(plain))

    def send(self, transport: Transport, channel: Channel, message: bytes, body: bytes = b"") -> None:
        """Send a sealed message to the aggregator."""
        aggregator, name = aggregator_of(self.roster), self.identity.name
        head = channel.head(self.fleet, name, aggregator.name)
        parcel = seal_message_to_member(self.identity, aggregator.seal_key, head, message, body)
        publish_in_chunks(
            transport,
            Topics(self.fleet).at(TopicKind.REPORT, name),
            parcel.payload,
            channel.kind,
            parcel.transfer_id,
        )


def presence_of(membership: WorkerMembership, birth: int, *, online: bool) -> Will:
    """Return topic and payload of the presence of a worker or a keeper."""
    topic = Topics(membership.fleet).at(TopicKind.WORKER_STATE, membership.identity.name)
    return topic, signed_presence(membership.identity, membership.fleet, birth, online=online)


def init(directory: Path, name: str, role: str = WORKER_ROLE) -> Path:
    """Make a worker's keys, or a keeper's, and its directory; return the path of the card for the owner."""
    card = make_identity(directory, name, role)
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
