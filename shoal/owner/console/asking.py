"""One request of the owner and its answer, over any transport. `Question` reads no monotonic clock and waits for nothing."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from crypto.seal.envelope import open_from_member, read_head, seal_message_to_member
from shoal.errors import (
    ConfigError,
    IntegrityError,
    NotReadyError,
    ShoalError,
    StorageError,
    UntrustedError,
    UsageError,
    printable,
)
from shoal.membership.grants import OWNER_NAME
from shoal.owner.console.numbers import RequestNumbers
from shoal.protocol import channels
from shoal.protocol.chunking import split
from shoal.protocol.codec import decode, encode
from shoal.protocol.reassembly import Reassembler
from shoal.protocol.requests import REQUEST_LIFE_S, Outcome, OwnerAnswer, OwnerRequest, RequestAction
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport.base import Message

if TYPE_CHECKING:
    from shoal.owner.keys.directory import FleetDirectory
    from shoal.protocol.reassembly import Transfer
    from shoal.transport.base import Transport, TransportEvent

CARRY_HINT: Final = "carry the file to the aggregator instead: shoal-fleet run start DIR ... --out FILE"
_ERRORS: Final[dict[Outcome, type[ShoalError]]] = {
    Outcome.UNKNOWN: UsageError,
    Outcome.NOT_NOW: NotReadyError,
    Outcome.REFUSED: UntrustedError,
    Outcome.REPLAYED: NotReadyError,
    Outcome.EXPIRED: ConfigError,
    Outcome.FAILED: StorageError,
}
"""The error of each outcome but DONE."""


class Question:
    """One request, sealed and numbered, and its answer.

    Args:
        fleet: the owner's directory.
        action: of the request.
        run: number of the run; 0 if the action names none.
        now: see `OwnerRequest`.
        records: see `OwnerRequest`.
        package: the encoded run package of a request to start.
        clock: returns unix seconds.

    Attributes:
        answer: the verified answer; None until it has come.
        body: its document.

    Raises:
        ConfigError: the fleet has no aggregator, or the package is too large.
    """

    def __init__(
        self,
        fleet: FleetDirectory,
        action: RequestAction,
        *,
        run: int = 0,
        now: bool = False,
        records: int = 0,
        package: bytes = b"",
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._fleet = fleet
        if fleet.roster.aggregator is None:
            raise ConfigError("the fleet has no aggregator yet", hint="shoal-fleet add-aggregator DIR CARD")
        self._aggregator = fleet.roster.aggregator
        self._topics = Topics(fleet.name)
        self._key = X25519PrivateKey.generate()
        self._numbers = RequestNumbers(fleet)
        self.answer: OwnerAnswer | None = None
        self.body = b""
        # The head, the request itself and the seal take less than a KiB.
        if len(package) > channels.REQUEST.largest - 4096:
            raise ConfigError(
                f"the run package has {len(package)} bytes, and the broker takes at most {channels.REQUEST.largest}",
                hint=CARRY_HINT,
            )
        request = OwnerRequest(
            fleet=fleet.name,
            sequence=self._numbers.take(),
            expires_at_s=int(clock()) + REQUEST_LIFE_S,
            answer_key=self._key.public_key().public_bytes_raw(),
            action=action,
            run=run,
            now=now,
            records=records,
        )
        head = channels.REQUEST.head(fleet.name, OWNER_NAME, self._aggregator.name)
        self.sealed = seal_message_to_member(fleet.owner, self._aggregator.seal_key, head, encode(request), package)
        self._chunks = Reassembler(channels.ANSWER.largest, whole_transfers=1, max_per_source=2)

    def send(self, transport: Transport) -> None:
        """Subscribe to answers, then publish the request."""
        transport.subscribe(self._topics.filter(TopicKind.OWNER_ANSWER))
        kind, size = channels.REQUEST.kind, transport.chunk_bytes
        for chunk in split(self.sealed.payload, kind=kind, round=0, chunk_bytes=size, name=self.sealed.transfer_id):
            transport.publish(self._topics.owner_request, chunk)

    def on_event(self, event: TransportEvent, now_s: float) -> None:
        """Take an event of the transport; ``now_s`` is a monotonic clock's. Answers to other requests are ignored."""
        if not isinstance(event, Message) or event.topic != self._topics.owner_answer:
            return
        try:
            transfer = self._chunks.add("aggregator", event.payload, now_s, channels.ANSWER.limit())
            if transfer is not None:
                self._open(transfer)
        except ShoalError:
            return  # another console's answer, or a forgery: ours may still come

    def _open(self, transfer: Transfer) -> None:
        head, at = read_head(transfer.payload)
        if head != channels.ANSWER.head(self._fleet.name, self._aggregator.name, OWNER_NAME):
            raise UntrustedError(f"a {head.purpose} of {head.sender!r} where the aggregator's answer belongs")
        message, body = open_from_member(
            self._fleet.owner, transfer.payload, head, at, self._aggregator.sign_key, transfer.signed, private=self._key
        )
        answer = decode(message, OwnerAnswer)
        if (answer.fleet, answer.request) != (self._fleet.name, self.sealed.transfer_id):
            raise UntrustedError("an answer to another request")
        self.answer, self.body = answer, bytes(body)

    @property
    def overtaken(self) -> bool:
        """Whether another console of this directory has sent a later request first: then a new one may be sent."""
        answer = self.answer
        return answer is not None and answer.outcome is Outcome.REPLAYED and answer.accepted <= self._numbers.last()

    def document(self) -> bytes:
        """Return the document of the answer, which has come.

        Raises:
            UsageError: the aggregator has no such run.
            NotReadyError: the run is not in a state that allows the request.
            UntrustedError: the aggregator can't serve this run package.
            ConfigError: the owner's directory is older than a request of its owner, or a clock is wrong.
            StorageError: the aggregator's disk is full or fails.
        """
        answer = self.answer
        if answer is None:
            raise IntegrityError("there is no answer yet")
        if answer.outcome is Outcome.DONE:
            return self.body
        if answer.outcome is Outcome.REPLAYED:
            self._numbers.count_on(answer.accepted)
        reason = f"the aggregator refused the request: {printable(answer.reason)}"
        raise _ERRORS[answer.outcome](reason, hint=printable(answer.hint))
