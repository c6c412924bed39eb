"""Verify the owner's requests, have them carried out, and answer.

Rules:

1. Nothing is decrypted before the owner's signature is verified, and nothing carried out that is not for this aggregator.
2. A request is carried out once: its number must be above all accepted ones, and becomes durable with its effect.
3. A request that has expired by the aggregator's clock has no effect, so that a broker can't hold one back for long. Nor has one
   that was made before the aggregator was restored from a backup, which does not tell whether it was carried out.
4. Each verified request is answered, also a refused one. The answer names the request's transfer id, and is sealed to a key
   that the owner has made for this request alone.

Example: a stranger who has recorded request 7 sends it again. Its signature is valid, and its number is not above 7: the answer
says REPLAYED, and only the owner could have read it.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from typing import Final

from aggregator.membership import AggregatorMembership
from aggregator.run_control import RunControl, UnfulfilledError
from aggregator.status.answers import encoded
from aggregator.storage.chunk_spool import ChunkSpool
from aggregator.storage.signed_runs import OwnerOrders
from crypto.seal.envelope import open_from_member, read_expected, seal_message_to_member
from shoal.errors import IntegrityError, ShoalError, UntrustedError, WireError
from shoal.membership.grants import OWNER_NAME
from shoal.protocol import channels
from shoal.protocol.codec import MAX_STRING_BYTES, decode, encode
from shoal.protocol.reassembly import Reassembler, Transfer
from shoal.protocol.requests import REQUEST_LIFE_S, Outcome, OwnerAnswer, OwnerRequest
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport.base import Transport, publish_in_chunks
from shoal.util.console import second

LOG = logging.getLogger("shoal.aggregator")
TEXT_CHARS: Final = MAX_STRING_BYTES // 4
"""Most characters of a reason or hint in an answer: each takes up to 4 bytes."""
REPLAYED_HINT: Final = (
    "the owner's directory was restored from a backup, or two copies of it are in use; or this is a recorded request, which has "
    "no effect"
)


class OwnerRequests:
    """The owner's requests to one aggregator.

    Args:
        membership: the aggregator's.
        transport: client of the broker.
        orders: the numbers of requests, on disk.
        control: carries requests out.
        clock: returns unix seconds.
    """

    def __init__(
        self,
        membership: AggregatorMembership,
        transport: Transport,
        orders: OwnerOrders,
        control: RunControl,
        *,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._membership = membership
        self._transport = transport
        self._orders = orders
        self._control = control
        self._clock = clock
        self._topics = Topics(membership.fleet)
        self._spool = ChunkSpool(membership.directory)
        self._chunks = Reassembler(channels.REQUEST.largest, whole_transfers=1, max_per_source=2, spool=self._spool)

    def subscribe(self) -> None:
        """Subscribe to the owner's requests."""
        self._transport.subscribe(self._topics.filter(TopicKind.OWNER_REQUEST))

    def close(self) -> None:
        """Release the chunks of unfinished requests."""
        self._spool.close()

    def take(self, topic: str, payload: bytes, now_s: float) -> bool:
        """Handle one message if it belongs to a request; return whether it does.

        Args:
            topic: the message's topic.
            payload: one chunk.
            now_s: monotonic seconds.

        Raises:
            UntrustedError: not from the owner, or not for this aggregator.
            WireError: malformed.
        """
        # Compared, not parsed: each upload's chunk comes through here first.
        if topic != self._topics.owner_request:
            return False
        self._chunks.expire(now_s)
        transfer = self._chunks.add("owner", payload, now_s, channels.REQUEST.limit())
        if transfer is not None:
            self._answer(transfer)
        return True

    def _answer(self, transfer: Transfer) -> None:
        request, package = self._opened(transfer)
        body, hint, reason = b"", "", ""
        try:
            self._check(request)
            outcome, body = Outcome.DONE, encoded(self._control.carry_out(request, package))
        except UnfulfilledError as error:
            outcome, reason, hint = error.outcome, str(error), error.hint
        except IntegrityError as error:
            outcome, reason, hint = Outcome.NOT_NOW, str(error), error.hint
        except ShoalError as error:
            outcome, reason, hint = Outcome.FAILED, str(error), error.hint
        facts = {"request": request.sequence, "action": request.words, "run": request.run or "-"}
        LOG.info(
            "the owner's request", extra={"kv": {**facts, "outcome": outcome.name.lower(), "reason": reason or "-"}}
        )
        answer = OwnerAnswer(
            fleet=self._membership.fleet,
            request=transfer.transfer_id,
            outcome=outcome,
            accepted=self._orders.record.accepted,
            answered_at_s=int(self._clock()),
            reason=reason[:TEXT_CHARS],
            hint=hint[:TEXT_CHARS],
        )
        self._publish(request.answer_key, answer, body)

    def _opened(self, transfer: Transfer) -> tuple[OwnerRequest, bytes]:
        member = self._membership
        wanted = channels.REQUEST.head(member.fleet, OWNER_NAME, member.identity.name)
        head, at = read_expected(transfer.payload, wanted, "the owner's request")
        message, package = open_from_member(
            member.identity, transfer.payload, head, at, member.owner_key, transfer.signed
        )
        request = decode(message, OwnerRequest)
        if request.fleet != member.fleet:
            raise UntrustedError(f"a request for fleet {request.fleet!r}")
        return request, bytes(package)

    def _check(self, request: OwnerRequest) -> None:
        now_s = int(self._clock())
        if request.sequence <= self._orders.record.accepted:
            raise UnfulfilledError(
                Outcome.REPLAYED,
                f"request {request.sequence} comes after request {self._orders.record.accepted}",
                hint=REPLAYED_HINT,
            )
        if request.expires_at_s < now_s:
            raise UnfulfilledError(
                Outcome.EXPIRED,
                f"the request expired at {second(request.expires_at_s)}, and it is {second(now_s)} by the aggregator's clock",
                hint="set the clocks of both machines (timedatectl set-ntp true); or the request came late: send it again",
            )

        restored_at_s = self._orders.record.restored_at_s
        if request.expires_at_s < restored_at_s + REQUEST_LIFE_S:
            raise UnfulfilledError(
                Outcome.EXPIRED,
                f"the request was made before the aggregator was restored from a backup, at {second(restored_at_s)}",
                hint="send it again; if that fails as well, set the clocks of both machines",
            )

    def _publish(self, key: bytes, answer: OwnerAnswer, body: bytes) -> None:
        head = channels.ANSWER.head(self._membership.fleet, self._membership.identity.name, OWNER_NAME)
        try:
            parcel = seal_message_to_member(self._membership.identity, key, head, encode(answer), body)
        except ValueError as error:
            raise WireError("a request with a key that nothing can be sealed to") from error
        publish_in_chunks(
            self._transport, self._topics.owner_answer, parcel.payload, channels.ANSWER.kind, parcel.transfer_id
        )
