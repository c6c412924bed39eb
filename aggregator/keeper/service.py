"""A keeper on a transport: takes the owner's roster and keys, and answers the aggregator's requests.

It owns no thread and reads no clock: a driver calls `KeeperService.on_event`.
"""

from __future__ import annotations

import logging

from aggregator.keeper.answer import answered
from aggregator.keeper.memory import KeeperMemory
from aggregator.owner_inbox import GrantInbox
from aggregator.shards.membership import WorkerMembership, presence_of
from shoal.errors import ShoalError, UntrustedError
from shoal.membership.signed_plans import open_package
from shoal.protocol import channels
from shoal.protocol.cells import OpenCells
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import RunPackage
from shoal.protocol.reassembly import Reassembler, Transfer
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport.base import Connected, Message, Transport, TransportEvent
from shoal.util.log_throttle import Refusals

LOG = logging.getLogger("shoal.keeper")


class KeeperService:
    """Answers requests for the runs that name this keeper.

    Args:
        membership: its keys, the roster, and the directory with its memory.
        transport: client of the broker.
        birth: grows with every start.

    Attributes:
        memory: what it has opened.

    Raises:
        IntegrityError: the memory is missing or damaged.
    """

    def __init__(self, membership: WorkerMembership, transport: Transport, birth: int) -> None:
        self.memory = KeeperMemory.load(membership.directory)
        self._membership = membership
        self._transport = transport
        self._birth = birth
        self._topics = Topics(membership.fleet)
        self._grants = GrantInbox(membership)
        self._chunks = Reassembler()
        self._refusals = Refusals(LOG)

    def start(self) -> None:
        """Subscribe, and say that the keeper is there."""
        self.subscribe()
        self._tell_presence()

    def subscribe(self) -> None:
        """Subscribe to the owner's keys, the roster and the aggregator's requests."""
        self._grants.subscribe(self._transport)
        self._transport.subscribe(self._topics.filter(TopicKind.ROSTER))
        self._transport.subscribe(self._topics.filter(TopicKind.JOB, self._membership.identity.name))

    def _tell_presence(self) -> None:
        self._transport.publish(*presence_of(self._membership, self._birth, online=True), retain=True)

    def on_event(self, event: TransportEvent, now_s: float) -> None:
        """Handle one event of the transport; a message that is refused is logged and changes nothing else."""
        match event:
            case Message(topic, payload) if payload:
                try:
                    if not self._grants.take(topic, payload, now_s):
                        self._on_message(topic, payload, now_s)
                except ShoalError as error:
                    self._refusals.tell(topic, error, now_s)
            case Connected():
                self._tell_presence()

    def _on_message(self, topic: str, payload: bytes, now_s: float) -> None:
        kind = self._topics.parse(topic).kind
        allowed = {TopicKind.JOB: channels.OPEN_CELLS, TopicKind.ROSTER: channels.ROSTER}.get(kind)
        if allowed is None:
            raise UntrustedError(f"a message on {kind.base}, which a keeper does not read")
        self._chunks.expire(now_s)
        transfer = self._chunks.add(kind.name, payload, now_s, allowed.limit())
        if transfer is None:
            return
        if kind is TopicKind.ROSTER:
            self._membership.take_roster(transfer)
        else:
            self._answer(transfer)

    def _answer(self, transfer: Transfer) -> None:
        member = self._membership
        request = decode(member.open_job(transfer)[1], OpenCells)
        plan = open_package(decode(request.plan, RunPackage), member.owner_key)
        if plan.fleet != member.fleet:
            raise UntrustedError(f"a plan of fleet {plan.fleet!r}")
        found = answered(
            request,
            plan,
            roster=member.roster,
            identity=member.identity,
            memory=self.memory,
            owner_key=member.owner_key,
        )
        if found.memory is not self.memory:
            found.memory.save(member.directory)
            self.memory = found.memory
        told, facts = found.message, {"run": plan.run, "round": request.round, "cells": len(request.cells)}
        if told.refused or (told.false and not told.partitions):
            reason = told.refused or f"false shares of {', '.join(told.false)}"
            LOG.warning("a request is refused", extra={"kv": {**facts, "reason": reason}})
        else:
            LOG.info("opened" if request.look is None else "looked", extra={"kv": facts})
        body = bytearray()
        for pads in found.pads():
            body += pads.astype("<u4", copy=False).data.cast("B")
        member.send(self._transport, channels.CELL_SUMS, encode(told), bytes(body))
