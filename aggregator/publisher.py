"""Publish the aggregator's messages: roster, run package, means, announcements and answers to single devices.

Messages to the fleet are signed, sealed under the broadcast key and retained, so that a device that connects later finds
them on the broker. Messages to one device are not retained. Example: `open_round` publishes the means and checkpoints that
are not on the broker yet, then the announcement that names the transfer of each.

`Revocations` sends revoked devices the owner's roster. A device that was offline while the owner revoked it reconnects with old
keys. The aggregator uses newer keys by then, so the device can open none of the messages retained for the fleet. When it signs
a presence, reminder or decline, the aggregator answers with the owner's signed roster, sealed to that device. The device trusts
the owner's signature only, so an aggregator can't revoke a device by itself.

`NoticeBoard` publishes the notice to all devices: the owner's order for the run that is served, and its choice of models. It is
one small retained message, published again when its contents or the broadcast key have changed, and after the broker was away.
A device that restarts finds it on the broker. Without a run or an order a notice says so, in place of an earlier one.

Example: the owner pauses run 2. The notice says PAUSED of run 2, until the owner resumes it or another run is served.

`RelayedModels` publishes the means and checkpoints of a run, and lists them for the announcement. Each is published once and
stays on the broker until the announcement of a later round no longer names it. After a restart, or under another broadcast key,
all are sealed and published again.
"""

from __future__ import annotations

import json
import logging
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Final

from aggregator.membership import TOLD_FILE, AggregatorMembership
from aggregator.numerics.rows import drop_pages
from aggregator.rounds.held_models import HeldModels, KeptCheckpoint, KeptMean, offers_of, transcript_of
from aggregator.rounds.state import OpenRound, Order
from aggregator.storage.signed_runs import OwnerOrders
from aggregator.workers import InlineWorkers, Workers
from crypto.seal.envelope import (
    GroupKey,
    is_from,
    read_head,
    seal_message_to_group,
    seal_message_to_member,
)
from crypto.seal.identity import SIGNATURE_BYTES, Identity
from shoal import limits
from shoal.errors import WireError
from shoal.membership.roster_changes import roster_change
from shoal.membership.statements import signers_needed
from shoal.protocol import channels
from shoal.protocol.channels import Channel
from shoal.protocol.chunking import TRANSFER_ID_BYTES, split
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import Member, Roster, RosterChange, RunPlan
from shoal.protocol.messages import (
    NO_ASSIGNMENT,
    SHARED_MODEL,
    Action,
    Announcement,
    Assignment,
    Control,
    Notice,
    RunOrder,
)
from shoal.protocol.precision.lengths import encoded_bytes
from shoal.protocol.reassembly import Reassembler, Transfer
from shoal.protocol.states import (
    CheckpointRef,
    MeanHeader,
    MeanRef,
    Offer,
    RetainedStep,
    RoundModels,
    StateId,
    checkpoint_number,
    mean_number,
    spare_number,
)
from shoal.protocol.topics import Topics
from shoal.transport.base import Connected, Disconnected, Transport, TransportEvent, publish_in_chunks
from shoal.transport.retained import RetainedPublisher, out_of_memory, stored
from shoal.transport.stored import STORED_FROM_BYTES, StoredBytes
from shoal.util.files import write_atomic

Publish = Callable[["Channel", Sequence[bytes | memoryview], int, str], bytes]
"""Seals and retains a message of a channel, in pieces, for a round, at a label; returns its transfer id."""
_Key = tuple[str, bytes, int, int]
"""Mean or checkpoint, run id, model, round."""
_MEAN: Final = "mean"
_CHECKPOINT: Final = "checkpoint"


class RelayedModels:
    """The means and checkpoints of one run on the broker.

    Args:
        publish: see `Publish`.
        label: returns the topic label of a number.
    """

    def __init__(self, publish: Publish, label: Callable[[bytes, int], str]) -> None:
        self._publish = publish
        self._label = label
        self._sent: dict[_Key, bytes] = {}
        self.spare_labels: list[str] = []

    def clear(self) -> None:
        """Forget what was published: devices with another broadcast key can't open it."""
        self._sent.clear()

    def announce(
        self,
        run: RunPlan,
        held: HeldModels,
        offers: Mapping[int, StateId],
        round_: int,
        *,
        signers: int,
        devices: Iterable[str] = (),
    ) -> RoundModels:
        """Publish the means and checkpoints that are not on the broker yet; return the models of the announcement.

        ``signers`` is the number of statements that certify a state (`signers_needed`), ``devices`` the fleet.
        """
        current: set[_Key] = set()
        steps = tuple(
            RetainedStep(k.step, tuple(self._mean(run, k.step.round, mean, current) for mean in k.means))
            for k in held.steps
        )
        found = held.announced(signers)
        # Two models may be at one state, such as the halves of a split: it is announced once.
        of_state = {c.state: (model, c) for model, c in found.items()}
        refs = tuple(self._checkpoint(run, model, c, current) for _, (model, c) in sorted(of_state.items()))
        self.spare_labels = [label for model in found for label in self._spares(run, model, held, current)]
        self._sent = {key: transfer for key, transfer in self._sent.items() if key in current}
        return RoundModels(
            key_version=held.key_version,
            offers=tuple(Offer(model, state) for model, state in sorted(offers.items())),
            steps=steps,
            checkpoints=refs,
            statements=tuple(dict.fromkeys((*held.statements(of_state), *held.history(devices)))),
            transcript=transcript_of(held, run, round_, offers),
        )

    def _spares(self, run: RunPlan, model: int, held: HeldModels, current: set[_Key]) -> Iterable[str]:
        """Publish the spare checkpoints of a model, and yield their labels; no announcement names them."""
        for turn, spare in enumerate(held.spares.get(model, ())):
            label = self._label(run.run_id, spare_number(model, turn))
            self._sealed((f"spare {turn}", run.run_id, model, spare.round), spare, label, current)
            yield label

    def _once(
        self,
        key: _Key,
        channel: Channel,
        plain: Callable[[], Sequence[bytes | memoryview]],
        label: str,
        current: set[_Key],
    ) -> bytes:
        """Publish what is not on the broker yet; return its transfer id."""
        current.add(key)
        if key not in self._sent:
            self._sent[key] = self._publish(channel, plain(), key[3], label)
        return self._sent[key]

    def _sealed(self, key: _Key, checkpoint: KeptCheckpoint, label: str, current: set[_Key]) -> bytes:
        return self._once(key, channels.CHECKPOINT, lambda: [checkpoint.data.data], label, current)

    def _mean(self, run: RunPlan, round_: int, mean: KeptMean, current: set[_Key]) -> MeanRef:
        label = self._label(run.run_id, mean_number(mean.model, round_))
        if mean.parts:
            # The workers publish it in parts, at labels of their own; devices know it by its digest.
            return MeanRef(mean.model, label, mean.digest[:TRANSFER_ID_BYTES], mean.contributors, mean.digest)
        segment = "shared" if mean.model == SHARED_MODEL else "cluster"
        header = MeanHeader(
            fleet=run.fleet,
            run_id=run.run_id,
            round=round_,
            key_id=mean.key_id,
            model=mean.model,
            length=len(mean.vector),
            segment="" if len(mean.vector) == run.length else segment,
        )
        key = (_MEAN, run.run_id, mean.model, round_)
        transfer = self._once(key, channels.MEAN, lambda: [encode(header), mean.wire], label, current)
        return MeanRef(mean.model, label, transfer, mean.contributors, mean.digest)

    def _checkpoint(self, run: RunPlan, model: int, checkpoint: KeptCheckpoint, current: set[_Key]) -> CheckpointRef:
        label = self._label(run.run_id, checkpoint_number(model))
        transfer = self._sealed((_CHECKPOINT, run.run_id, model, checkpoint.round), checkpoint, label, current)
        return CheckpointRef(checkpoint.state, checkpoint.round, checkpoint.key_version, label, transfer)


LEDGER_FILE: Final = "retained.json"
LOG = logging.getLogger("shoal.aggregator")
CONTROL_BYTES: Final = 768
"""Upper bound for the size of a sealed answer without its list of missing chunks."""


def first_reminder_s(uploads: int, upload_bytes: int) -> float:
    """Return the least time, in seconds, before a device's first reminder of an upload that was not acknowledged.

    Args:
        uploads: number of devices that upload in the round.
        upload_bytes: size of one masked update.
    """
    return limits.REMIND_BASE_S + uploads * (limits.REMIND_PER_UPLOAD_S + upload_bytes / limits.REMIND_BYTES_PER_S)


class Publisher:
    """Seals and publishes the aggregator's messages.

    It records its retained topics in a file, so that after a restart it can clear those that are superseded.

    Args:
        identity: the aggregator's keys.
        group: the fleet's broadcast key.
        transport: where to publish.
        ledger: the file that lists the retained topics; made when the first round is published.
        workers: seal the answers to devices; None seals them at once.
    """

    def __init__(
        self,
        identity: Identity,
        group: GroupKey,
        transport: Transport,
        ledger: Path,
        workers: Workers | None = None,
    ) -> None:
        self._workers = workers or InlineWorkers()
        self._identity = identity
        self._group = group
        self._plan: bytes | StoredBytes = b""
        self._roster: tuple[bytes, RosterChange] | None = None
        self._transport = transport
        self._retained = RetainedPublisher(transport, ledger.parent)
        self._topics = Topics(group.fleet)
        self._ledger = ledger
        self._told_file = ledger.with_name(TOLD_FILE)
        self._listed: set[str] = set()
        self._sealed_bytes: dict[Channel, int] = {}
        self._announcement: tuple[bytes | StoredBytes, bytes] | None = None
        self._relayed = RelayedModels(self._publish_group, self._label)
        if ledger.exists():
            self._listed = _read_ledger(ledger)
            for topic in self._listed:
                self._retained.adopt(topic)

    def roster(self, signed: bytes, roster: Roster) -> None:
        """Publish the newest roster, in full and as a change from the one published before.

        Args:
            signed: the roster as the owner signed it.
            roster: the same roster, decoded.
        """
        before = _read_told(self._told_file)
        self._roster = signed, roster_change(before, roster, signed)
        self._tell_roster()
        # Written last, so that after a crash the change is made again from the same earlier roster.
        write_atomic(self._told_file, encode(roster))

    def _tell_roster(self) -> None:
        if self._roster is not None:
            signed, change = self._roster
            self._publish_group(channels.ROSTER, [signed])
            encoded = encode(change)
            if len(encoded) > limits.MAX_ROSTER_CHANGE_BYTES - limits.SEALED_HEAD_BYTES:
                # Devices refuse a larger change. One without members still makes them request the full roster.
                encoded = encode(roster_change(None, decode(signed[SIGNATURE_BYTES:], Roster), signed))
            self._publish_group(channels.ROSTER_CHANGE, [encoded])

    def run(self, package: bytes) -> None:
        """Publish the owner's run package."""
        self._plan = out_of_memory(package, self._ledger.parent)
        self._publish_group(channels.RUN, [package])

    def regroup(self, group: GroupKey) -> None:
        """Use another broadcast key from now on, and publish roster and run again under it."""
        if group == self._group:
            return
        self._group = group
        self._relayed.clear()
        if self._plan:
            self._tell_roster()
            self.run(bytes(self._plan))

    def open_round(self, run: RunPlan, roster: Roster, opened: OpenRound) -> None:
        """Publish new means and checkpoints, then the announcement, and clear means and checkpoints that it does not name."""
        plan = opened.plan
        signers = signers_needed(run.recipe.min_contributors, roster.active_count)
        offers = offers_of(plan, opened.held.states)
        held = self._relayed.announce(run, opened.held, offers, plan.round, signers=signers, devices=roster.active())
        # Most devices have equal assignments: each is listed once, and a device gets its place in the list.
        assignments: dict[Assignment, int] = {}
        place_of = {
            device: assignments.setdefault(assignment, len(assignments))
            for device, assignment in plan.assignments.items()
        }
        assignment_of = tuple(place_of.get(d.name, NO_ASSIGNMENT) for d in roster.devices)
        announcement = Announcement(
            fleet=run.fleet,
            run=run.run,
            run_id=run.run_id,
            roster_sequence=roster.sequence,
            round=plan.round,
            nonce=opened.nonce,
            deadline_s=run.recipe.deadline_s,
            finished=plan.final,
            assignments=tuple(assignments),
            assignment_of=assignment_of,
            remind_after_s=first_reminder_s(len(plan.assignments), encoded_bytes(run.length, run.recipe.precision_up)),
            package_bytes=self._sealed_bytes.get(channels.RUN, 0),
            held=held,
            unit=opened.unit,
        )
        self._publish_group(channels.ANNOUNCEMENT, [encode(announcement)], plan.round)
        self._clear_all_but(self._topics_of(held))

    def _topics_of(self, held: RoundModels) -> set[str]:
        labels = [mean.label for step in held.steps for mean in step.means]
        labels += [*(checkpoint.label for checkpoint in held.checkpoints), *self._relayed.spare_labels]
        return {self._topics.model(label) for label in labels}

    def _clear_all_but(self, keep: set[str]) -> None:
        """Remove retained means and checkpoints from the broker, except those at the topics ``keep``."""
        for base in self._retained.bases():
            # The label is the last level of the topic, so this is the prefix of all of them.
            if base.startswith(self._topics.model("x")[:-1]) and base not in keep:
                self._retained.clear(base)
        self._remember()

    def _label(self, run_id: bytes, number: int) -> str:
        return self._group.topic_label(run_id, number)

    def _publish_group(
        self, channel: Channel, plain: Sequence[bytes | memoryview], round_: int = 0, label: str = ""
    ) -> bytes:
        """Seal the pieces of ``plain`` to the fleet and publish them as a retained message; return its transfer id."""
        head = channel.head(self._group.fleet, self._identity.name)
        seal = partial(seal_message_to_group, self._identity, self._group, head, *plain)
        payload: bytes | StoredBytes = b""
        if sum(map(len, plain)) >= STORED_FROM_BYTES:
            with suppress(OSError):  # on a full disk they are sealed in memory
                parcel, payload = stored(lambda write: seal(write=write), self._ledger.parent)
        if not payload:
            parcel = seal()
            payload = parcel.payload
        drop_pages(plain)
        self._sealed_bytes[channel] = len(payload)
        if channel is channels.ANNOUNCEMENT:
            self._announcement = payload, parcel.transfer_id
        base = self._topics.at(channel.topic, label)
        return self._retained.publish(base, payload, kind=channel.kind, round_=round_, name=parcel.transfer_id)

    def answer(
        self,
        member: Member,
        run: RunPlan,
        round_: int,
        transfer: bytes,
        action: Action,
        reason: str = "",
        missing: tuple[int, ...] = (),
    ) -> None:
        """Tell one device about its upload, under the key in use now; of missing chunks as many as one packet can list."""
        control = Control(
            fleet=run.fleet,
            device=member.name,
            action=action,
            run=run.run,
            round=round_,
            transfer=transfer,
            missing=missing[: (self._transport.chunk_bytes - CONTROL_BYTES) // 4],
            reason=reason,
        )
        self._workers.submit(partial(self._send_control, member, control, self._group), key=member.name)

    def announce_again(self, devices: Iterable[str], round_: int) -> None:
        """Send the announcement of round ``round_``, the one published last, to single devices, which may not have heard it."""
        kind, size = channels.ANNOUNCED_AGAIN.kind, self._transport.chunk_bytes
        assert self._announcement is not None, "a round is announced before it waits for devices"
        payload, name = self._announcement
        chunks = split(payload, kind=kind, round=round_, chunk_bytes=size, name=name)
        for device in devices:
            for chunk in chunks:
                self._transport.publish(self._topics.ctl(device), chunk)

    def revoked(self, member: Member, signed: bytes) -> None:
        """Send the owner's newest roster to a device that it revokes, sealed to the device, which lacks the broadcast key."""
        head = channels.REVOCATION.head(self._group.fleet, self._identity.name, member.name)
        parcel = seal_message_to_member(self._identity, member.seal_key, head, signed)
        publish_in_chunks(
            self._transport,
            self._topics.ctl(member.name),
            parcel.payload,
            channels.REVOCATION.kind,
            parcel.transfer_id,
        )

    def _send_control(self, member: Member, control: Control, group: GroupKey) -> None:
        head = channels.CONTROL.head(control.fleet, self._identity.name, member.name)
        parcel = seal_message_to_group(self._identity, group, head, encode(control))
        publish_in_chunks(
            self._transport,
            self._topics.ctl(member.name),
            parcel.payload,
            channels.CONTROL.kind,
            parcel.transfer_id,
            control.round,
        )

    def republish(self) -> None:
        """Publish all retained messages again, for a broker that restarted."""
        self._retained.republish()

    def _remember(self) -> None:
        topics = set(self._retained.topics())
        if topics != self._listed:
            self._listed = topics
            write_atomic(self._ledger, json.dumps(sorted(topics)).encode())


def _read_told(file: Path) -> Roster | None:
    """Return the roster that was published last; None if absent or its file is damaged."""
    try:
        return decode(file.read_bytes(), Roster)
    except (OSError, WireError):
        return None


def _read_ledger(ledger: Path) -> set[str]:
    """Return the listed topics.

    A damaged list counts as empty: messages retained before the restart then stay on the broker until they are replaced.
    """
    try:
        listed = json.loads(ledger.read_bytes())
        if not isinstance(listed, list) or not all(isinstance(topic, str) for topic in listed):
            raise ValueError("not a list of topics")
    except (ValueError, RecursionError) as error:
        LOG.warning("the list of retained topics is damaged", extra={"kv": {"file": ledger.name, "reason": error}})
        return set()
    return set(listed)


FIRST_PAUSE_S: Final = 1.0
"""Shorter than the time between a device's first two presences, so that the second triggers a resend of a lost roster."""
MAX_PAUSE_S: Final = 60.0
"""Longest pause before the roster is sent to a device again; pauses double because a roster may be large."""
MAX_NOTE_BYTES: Final = limits.CHUNK_BYTES
"""Only messages of one chunk are checked: presences, reminders and declines. An upload is followed by reminders."""


class Revocations:
    """Answers messages of revoked devices with the newest roster.

    Args:
        membership: the aggregator's.
        publisher: sends the roster.
    """

    def __init__(self, membership: AggregatorMembership, publisher: Publisher) -> None:
        self._membership = membership
        self._publisher = publisher
        self._again_s: dict[str, tuple[float, float]] = {}

    def look(self, device: str, payload: bytes, now_s: float) -> None:
        """Send the roster to ``device`` if it is revoked and has signed the message, unless a pause is still running.

        Args:
            device: the name in the topic.
            payload: one chunk of a message.
            now_s: seconds of a monotonic clock.
        """
        roster = self._membership.roster
        # Each message comes through here: the list of the revoked is searched for the names of no active device.
        if roster.device(device) is not None or device not in roster.revoked:
            return
        again_s, pause_s = self._again_s.get(device, (-math.inf, FIRST_PAUSE_S))
        member = next((d for d in roster.devices if d.name == device), None)
        # The signature last: it is the only costly check, and anyone who can publish can make us do it.
        if now_s < again_s or member is None or not self._is_signed(member, payload, now_s):
            return
        self._again_s[device] = now_s + pause_s, min(2 * pause_s, MAX_PAUSE_S)
        self._publisher.revoked(member, self._membership.roster_bytes)
        LOG.info("a revoked device was sent the roster", extra={"kv": {"device": device, "roster": roster.sequence}})

    def _is_signed(self, member: Member, payload: bytes, now_s: float) -> bool:
        with suppress(WireError):
            # A reassembler for this message alone: an unverified sender must take no room from the fleet's transfers.
            transfer: Transfer | None = Reassembler(MAX_NOTE_BYTES, whole_transfers=1, max_per_source=1).add(
                member.name, payload, now_s
            )
            if transfer is not None:
                head, _ = read_head(transfer.payload)
                ours = (head.fleet, head.sender) == (self._membership.fleet, member.name)
                return ours and is_from(transfer.payload, head, member.sign_key, transfer.signed)
        return False


ORDERS: Final = {
    Order.GO: RunOrder.NONE,
    Order.PAUSE: RunOrder.PAUSED,
    Order.STOP: RunOrder.STOPPED,
    Order.STOP_NOW: RunOrder.STOPPED,
}
NO_RUN: Final = bytes(16)


class NoticeBoard:
    """Publishes the notice of one fleet.

    Args:
        membership: the aggregator's, with the broadcast key in use.
        transport: client of the broker.
        orders: the owner's orders, on disk.
        clock: returns unix seconds.
    """

    def __init__(
        self,
        membership: AggregatorMembership,
        transport: Transport,
        orders: OwnerOrders,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._membership, self._clock = membership, clock
        self._retained = RetainedPublisher(transport)
        self._topic = Topics(membership.fleet).notice
        self._orders = orders
        self._published: tuple[GroupKey, Notice] | None = None
        self._lost = False

    def on_event(self, event: TransportEvent) -> None:
        """Publish the notice again once the broker is back, which may have lost it."""
        if isinstance(event, Disconnected):
            self._lost = True
        elif isinstance(event, Connected) and self._lost:
            self._lost = False
            self._retained.republish()

    def keep_up(self, plan: RunPlan | None) -> None:
        """Publish the notice if it has changed.

        Args:
            plan: of the run that is served; None if none is.
        """
        order = Order.GO if plan is None else self._orders.of(plan.run_id)
        notice = Notice(
            fleet=self._membership.fleet,
            sequence=self._orders.record.accepted,
            sent_at_s=int(self._clock()),
            run=0 if plan is None else plan.run,
            run_id=NO_RUN if plan is None else plan.run_id,
            order=ORDERS[order],
            choice=self._orders.choice,
        )
        now = self._membership.group, notice
        if self._published is not None and _same(self._published, now):
            return
        head = channels.NOTICE.head(notice.fleet, self._membership.identity.name)
        sealed = seal_message_to_group(self._membership.identity, now[0], head, encode(notice))
        self._retained.publish(self._topic, sealed.payload, kind=channels.NOTICE.kind, name=sealed.transfer_id)
        self._published = now


def _same(before: tuple[GroupKey, Notice], now: tuple[GroupKey, Notice]) -> bool:
    """Return whether two notices say the same under one key; requests that only read change the number alone."""
    (old_key, old), (key, new) = before, now
    return old_key == key and (old.run_id, old.order, old.choice) == (new.run_id, new.order, new.choice)
