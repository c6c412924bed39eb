"""Publish the aggregator's messages: roster, run package, means, announcements and answers to single devices.

Messages to the fleet are signed, sealed under the broadcast key and retained, so that a device that connects later finds
them on the broker. Messages to one device are not retained. Example: `open_round` publishes the means and checkpoints that
are not on the broker yet, then the announcement that names the transfer of each.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Final

from aggregator.relayed_models import RelayedModels
from aggregator.rounds.events import OpenRound
from aggregator.rounds.held_models import offers_of
from aggregator.workers import InlineWorkers, Workers
from crypto.seal.envelope import GroupKey, SealedMessage, seal_message_to_group, seal_message_to_member
from crypto.seal.identity import SIGNATURE_BYTES, Identity
from shoal import limits
from shoal.errors import WireError
from shoal.membership.roster_delta import roster_change
from shoal.membership.statements import signers_needed
from shoal.protocol import channels
from shoal.protocol.channels import Channel
from shoal.protocol.chunking import split
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import Member, Roster, RosterChange, RunPlan
from shoal.protocol.messages import (
    NO_ASSIGNMENT,
    Action,
    Announcement,
    Assignment,
    Control,
)
from shoal.protocol.precision.lengths import encoded_bytes
from shoal.protocol.states import RoundModels
from shoal.protocol.topics import Topics
from shoal.transport.base import Transport
from shoal.transport.retained import RetainedPublisher
from shoal.util.files import write_atomic

TOLD_FILE: Final = "roster.told"
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
        self._plan = b""
        self._roster: tuple[bytes, RosterChange] | None = None
        self._transport = transport
        self._retained = RetainedPublisher(transport)
        self._topics = Topics(group.fleet)
        self._ledger = ledger
        self._told_file = ledger.with_name(TOLD_FILE)
        self._listed: set[str] = set()
        self._sealed_bytes: dict[Channel, int] = {}
        self._announcement: SealedMessage | None = None
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
            self._publish_group(channels.ROSTER, signed)
            encoded = encode(change)
            if len(encoded) > limits.MAX_ROSTER_CHANGE_BYTES - limits.SEALED_HEAD_BYTES:
                # Devices refuse a larger change. One without members still makes them request the full roster.
                encoded = encode(roster_change(None, decode(signed[SIGNATURE_BYTES:], Roster), signed))
            self._publish_group(channels.ROSTER_CHANGE, encoded)

    def run(self, package: bytes) -> None:
        """Publish the owner's run package."""
        self._plan = package
        self._publish_group(channels.RUN, package)

    def regroup(self, group: GroupKey) -> None:
        """Use another broadcast key from now on, and publish roster and run again under it."""
        if group == self._group:
            return
        self._group = group
        self._relayed.clear()
        if self._plan:
            self._tell_roster()
            self.run(self._plan)

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
        )
        self._publish_group(channels.ANNOUNCEMENT, encode(announcement), plan.round)
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

    def _publish_group(self, channel: Channel, plain: bytes, round_: int = 0, label: str = "") -> bytes:
        """Seal ``plain`` to the fleet and publish it as a retained message; return its transfer id."""
        head = channel.head(self._group.fleet, self._identity.name)
        parcel = seal_message_to_group(self._identity, self._group, head, plain)
        self._sealed_bytes[channel] = len(parcel.payload)
        if channel is channels.ANNOUNCEMENT:
            self._announcement = parcel
        base = self._topics.at(channel.topic, label)
        return self._retained.publish(base, parcel.payload, kind=channel.kind, round_=round_, name=parcel.transfer_id)

    def answer(
        self, member: Member, run: RunPlan, round_: int, transfer: bytes, action: Action, reason: str = ""
    ) -> None:
        """Send one device the acknowledgement or refusal of its upload."""
        self._control(
            member,
            Control(
                fleet=run.fleet,
                device=member.name,
                action=action,
                run=run.run,
                round=round_,
                transfer=transfer,
                missing=(),
                reason=reason,
            ),
        )

    def ask_again(self, member: Member, run: RunPlan, round_: int, transfer: bytes, missing: tuple[int, ...]) -> None:
        """Ask one device to retransmit missing chunks of its upload, as many as one packet can list."""
        missing = missing[: (self._transport.chunk_bytes - CONTROL_BYTES) // 4]
        nack = Control(
            fleet=run.fleet,
            device=member.name,
            action=Action.NACK,
            run=run.run,
            round=round_,
            transfer=transfer,
            missing=missing,
            reason="chunks missing",
        )
        self._control(member, nack)

    def announce_again(self, devices: Iterable[str], round_: int) -> None:
        """Send the announcement of round ``round_``, the one published last, to single devices, which may not have heard it."""
        parcel, kind, size = self._announcement, channels.ANNOUNCED_AGAIN.kind, self._transport.chunk_bytes
        assert parcel is not None, "a round is announced before it waits for devices"
        chunks = split(parcel.payload, kind=kind, round=round_, chunk_bytes=size, name=parcel.transfer_id)
        for device in devices:
            for chunk in chunks:
                self._transport.publish(self._topics.ctl(device), chunk)

    def revoked(self, member: Member, signed: bytes) -> None:
        """Send the owner's newest roster to a device that it revokes, sealed to the device, which lacks the broadcast key."""
        head = channels.REVOCATION.head(self._group.fleet, self._identity.name, member.name)
        parcel = seal_message_to_member(self._identity, member.seal_key, head, signed)
        kind, size = channels.REVOCATION.kind, self._transport.chunk_bytes
        for chunk in split(parcel.payload, kind=kind, round=0, chunk_bytes=size, name=parcel.transfer_id):
            self._transport.publish(self._topics.ctl(member.name), chunk)

    def _control(self, member: Member, control: Control) -> None:
        """Have a message to one device sealed and published; it is under the key in use now."""
        self._workers.submit(partial(self._send_control, member, control, self._group), key=member.name)

    def _send_control(self, member: Member, control: Control, group: GroupKey) -> None:
        head = channels.CONTROL.head(control.fleet, self._identity.name, member.name)
        parcel = seal_message_to_group(self._identity, group, head, encode(control))
        for chunk in split(parcel.payload, kind=channels.CONTROL.kind, round=control.round, name=parcel.transfer_id):
            self._transport.publish(self._topics.ctl(member.name), chunk)

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
