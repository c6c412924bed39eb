"""The owner's side of enrolment: collect requests from the broker, answer them with grants, publish the newest roster.

`Registrar` runs over any transport and reads no clock: the program drives it from a queue, tests from a loopback broker.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Final

from crypto.seal.envelope import is_from, open_from_group, read_head, seal_message_to_member
from crypto.seal.identity import Identity, fingerprint, peek_document, sign_document
from shoal import limits
from shoal.errors import BrokerUnreachableError, ConfigError, ShoalError, UntrustedError, UsageError
from shoal.membership.enrol_requests import prove, token_group, token_id
from shoal.membership.grants import DEVICE_ROLE, OWNER_NAME, open_card, open_notice
from shoal.membership.roster import FORK_HINT, digest_of
from shoal.membership.roster_changes import owner_purpose, read_owner_purpose
from shoal.owner.enrolment.tokens import TokenStore
from shoal.owner.keys.directory import OTHER_NAME_HINT, FleetDirectory
from shoal.protocol import channels
from shoal.protocol.chunking import split
from shoal.protocol.codec import decode
from shoal.protocol.documents import Card, Member, ReceivingKeys, ReceivingNotice
from shoal.protocol.enrolment import MAX_REASON_BYTES, EnrolRefusal, EnrolRequest, EnrolStatement, Token
from shoal.protocol.messages import Sealed
from shoal.protocol.reassembly import Reassembler
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport.base import Message, Transport, TransportEvent
from shoal.transport.retained import RetainedPublisher

REJECTED: Final = "rejected"
"""Stands in a token's file, where the fingerprint of the device that used it would."""
REJECTED_REASON: Final = "the owner has rejected a request with this enrolment line"
LIST_HINT: Final = "`shoal-fleet devices DIR` lists pending requests, and refused ones with the reason"
ASK_HINT: Final = (
    "on the device: shoal-edge enrol DIR --name NAME, in a new directory, while the command waits; of several, give the "
    "fingerprint. After a replace that was interrupted: shoal-fleet publish"
)
NEW_LINE_HINT: Final = "ask the owner for another enrolment line: shoal-fleet invite"


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """An enrolment request with a valid token.

    Attributes:
        token: the token's id; answered: whether the owner approved the same keys before.
        asked_at_s: unix seconds by the device's clock.
    """

    name: str
    fingerprint: str
    token: str
    asked_at_s: int
    card: bytes
    answered: bool


@dataclass(frozen=True, slots=True)
class Refused:
    """A request that can't be granted; ``name`` is the unverified name in it, and ``hint`` for whoever set the device up."""

    name: str
    token: str
    reason: str
    hint: str = ""


class RequestError(UntrustedError):
    """A request proves its token and can't be granted. ``member`` made it, and is told."""

    def __init__(self, member: Member, message: str, *, hint: str = NEW_LINE_HINT) -> None:
        super().__init__(message, hint=hint)
        self.member = member


def examine(fleet: FleetDirectory, tokens: TokenStore, token: str, data: bytes | memoryview, now_s: int) -> Request:
    """Check the request that was published at the topic of ``token``, and return it.

    Args:
        fleet: the owner's directory.
        tokens: the owner's tokens.
        token: the id in the topic.
        data: an encoded EnrolRequest.
        now_s: unix seconds by the owner's clock.

    Raises:
        RequestError: the token has expired, was used by another device, or the owner has rejected a request with it.
        UntrustedError: the token is unknown, or the request does not prove it or is for another fleet.
        WireError: the request is malformed.
    """
    file = tokens.find(token)
    card, asked = open_request(data, file.token)
    member = card.member
    print_ = fingerprint(member)
    if file.used_by == REJECTED:
        raise RequestError(member, REJECTED_REASON)
    if file.used_by not in ("", print_):
        raise RequestError(member, f"the line was used before, by {file.used_by}")
    answered = bool(file.used_by) and fleet.listed(member)
    if file.used_by and not answered and member.name in fleet.roster.revoked:
        raise RequestError(member, f"device {member.name!r} is revoked, and its line was used")
    if now_s > file.token.expires_at_s and not answered:
        raise RequestError(member, "the line has expired")
    return Request(
        name=member.name,
        fingerprint=print_,
        token=token,
        asked_at_s=asked.asked_at_s,
        card=asked.card,
        answered=answered,
    )


class Registrar:
    """The owner's side of enrolment.

    Attributes:
        pending: requests that wait for the owner, by fingerprint; refused: those that can't be granted, by token id.
    """

    def __init__(
        self,
        fleet: FleetDirectory,
        transport: Transport,
        complain: Callable[[str], None] = lambda _: None,
        drain: Callable[[], None] = lambda: None,
    ) -> None:
        """Read the fleet's state; `start` subscribes.

        Args:
            fleet: the owner's directory.
            transport: connection to the broker.
            complain: called with warnings about damaged token files and forked rosters.
            drain: returns once the broker has everything that was published; the fleet stays locked meanwhile.
        """
        self._fleet = fleet
        self._tokens = TokenStore(fleet)
        self._transport = transport
        self._complain, self._drain = complain, drain
        self._old: list[str] = []
        self._topics = Topics(fleet.name)
        self._retained = RetainedPublisher(transport)
        self._chunks = Reassembler(channels.ENROLMENT.largest, whole_transfers=1, max_per_source=1)
        self._notices = Reassembler(channels.RECEIVING.largest, whole_transfers=1)
        self._receiving: dict[str, ReceivingKeys] = {}
        self._rosters = Reassembler(channels.OWNER_ROSTER.largest, whole_transfers=1, max_per_source=1)
        self._left: tuple[int, bytes] = (0, b"")
        self.pending: dict[str, Request] = {}
        self.refused: dict[str, Refused] = {}

    def start(self, now_s: int) -> None:
        """Subscribe to requests, and clear retained messages of tokens that expired long ago."""
        # Receiving keys come before the roster, whose arrival shows that all retained messages before it have been read.
        self._transport.subscribe(self._topics.filter(TopicKind.RECEIVING))
        self._transport.subscribe(self._topics.filter(TopicKind.ENROL))
        self._old = self._tokens.old(now_s, self._complain)
        for token in self._old:
            for base in (self._topics.enrol(token), self._topics.grant(token)):
                self._transport.publish(base, b"", retain=True)

    def look_for_roster(self) -> None:
        """Subscribe to the roster that the owner published before; see `publish_roster`."""
        self._transport.subscribe(self._topics.filter(TopicKind.OWNER_ROSTER))

    def flush(self) -> None:
        """Wait until the broker has everything, then remove the tokens that expired long ago."""
        self._drain()
        while self._retained.stale:
            self._retained.republish()
            self._drain()
        if self._old:
            self._tokens.forget(self._old)
            self._old = []

    def on_event(self, event: TransportEvent, now_s: int) -> None:
        """Handle one event of the transport; ``now_s`` is unix seconds. An approved request is answered again."""
        if not isinstance(event, Message):
            return
        parsed = self._topics.parse(event.topic)
        if parsed.kind is TopicKind.OWNER_ROSTER and event.payload:
            self._on_roster(event.payload, now_s)
        if parsed.kind is TopicKind.RECEIVING and event.payload:
            self._on_receiving(parsed.device, event.payload, now_s)
        if parsed.kind is not TopicKind.ENROL or not event.payload:
            return
        token, name = parsed.label, "?"
        self.refused.pop(token, None)
        self.pending = {k: r for k, r in self.pending.items() if r.token != token}
        try:
            transfer = self._chunks.add(token, event.payload, float(now_s), channels.ENROLMENT.limit())
            if transfer is None:
                raise UntrustedError("a request in pieces")
            name = decode(transfer.payload, EnrolRequest).member.name  # not checked yet
            self._tokens.find(token)  # before taking the lock, which requests without a token could otherwise hog
            with self._fleet.changing():
                request = examine(self._fleet, self._tokens, token, transfer.payload, now_s)
                if request.answered:
                    self._answer({request.fingerprint: token})
        except BrokerUnreachableError:
            # Not the request's fault: the command ends with this error.
            raise
        except ShoalError as error:
            self._chunks.drop(token)
            if isinstance(error, RequestError):
                self._refuse(error.member, token, error)
            # Bounded, since anyone who can publish requests can send any number of bad ones.
            elif len(self.refused) < limits.MAX_REQUESTS:
                self.refused[token] = Refused(name, token, str(error))
            return
        if not request.answered:
            self.pending[request.fingerprint] = request

    def _on_receiving(self, device: str, payload: bytes, now_s: float) -> None:
        """Note a device's newest receiving keys; `take_receiving` stores them.

        A notice that is older than the keys known is left out: a broker may have repeated it.
        """
        member = self._fleet.roster.device(device)
        if member is None:
            return
        transfer = self._notices.add(device, payload, float(now_s), channels.RECEIVING.limit())
        if transfer is None:
            return
        entry = self._fleet.receiving.devices.get(device)
        known = None if entry is None else entry.receiving
        try:
            notice = peek_document(transfer.payload, ReceivingNotice)
            if notice.receiving == known and (notice.fleet, notice.device) == (self._fleet.name, device):
                return  # spares the checks, which take a second for 2,000 devices
            notice = open_notice(transfer.payload, member.sign_key)
        except ShoalError as error:
            if self._fleet.users.times_replaced(device):
                return  # the broker still has those of the one before
            raise UntrustedError(f"receiving keys at the topic of {device}: {error}") from error
        if (notice.fleet, notice.device) != (self._fleet.name, device):
            raise UntrustedError(f"{device} has signed receiving keys of another device or fleet")
        found = notice.receiving
        if known is None:
            self._receiving[device] = found
            return
        if found.first < known.first:
            self._complain(
                f"warning: the broker holds receiving keys of {device} from number {found.first} on, and it has published those "
                f"from {known.first} on: its keys stay sealed to the newer ones. Was its directory restored from a backup?"
            )
        elif any(found.key(n) != known.key(n) for n in range(found.first, min(found.last, known.last) + 1)):
            self._complain(
                f"warning: {device} has published other receiving keys under the numbers of its earlier ones. Was its directory "
                "restored from a backup?"
            )
        if found.first > known.first:
            self._receiving[device] = found

    def take_receiving(self) -> None:
        """Store the receiving keys that were published, before anything is sealed; call it in `changing`."""
        self._fleet.take_receiving(self._receiving)
        self._receiving.clear()

    @property
    def newest_roster(self) -> int:
        """Sequence of the newest roster of this owner's that the broker has delivered; 0 if absent."""
        return self._left[0]

    def _on_roster(self, payload: bytes, now_s: float) -> None:
        """Note which roster is on the broker, and warn if it is newer than this directory's or a fork of it.

        It is sealed to the aggregator, so only sequence and digest can be read, from the head that the owner signed.
        """
        transfer = self._rosters.add("roster", payload, float(now_s), channels.OWNER_ROSTER.limit())
        if transfer is None:
            return
        head, _ = read_head(transfer.payload)
        found = read_owner_purpose(head.purpose)
        ours = (head.fleet, head.sender) == (self._fleet.name, OWNER_NAME)
        if found is None or not ours or found[0] < self._left[0]:
            return
        if not is_from(transfer.payload, head, self._fleet.owner.member.sign_key, transfer.signed):
            raise UntrustedError("a roster on the broker that this owner did not sign")
        with self._fleet.changing():  # reads the state again: another shoal-fleet may have signed it a moment ago
            self._left = found
            if self.overtaken:
                self._complain(
                    f"warning: the broker holds roster {found[0]}, signed by this owner, which is not in this directory "
                    f"(its newest is {self._fleet.roster.sequence}): {FORK_HINT}"
                )

    @property
    def overtaken(self) -> bool:
        """Whether the roster on the broker is newer than ours, or a fork of it; call it in `changing`."""
        sequence, digest = self._left
        ours = self._fleet.roster.sequence
        return sequence > ours or (sequence == ours and digest != digest_of(self._fleet.roster_bytes))

    def _count_on(self) -> bool:
        """If the roster on the broker overtook ours, sign one with a higher sequence and new secrets; return whether it did.

        Call it in `changing`.
        """
        if not self.overtaken:
            return False
        self._fleet.sign_beyond(self._left[0])
        self._complain(
            f"signed roster {self._fleet.roster.sequence}, beyond roster {self._left[0]} on the broker, with new secrets; "
            "compare the devices with `shoal-fleet show`, and repeat approvals and revocations that are missing"
        )
        return True

    def approve_all(self, fingerprints: Iterable[str], now_s: int) -> list[Member]:
        """Use the requests' tokens, sign a roster with the devices, publish grants and roster, and return the devices.

        One roster and at most one draw of secrets serve for all; if the admission draws new secrets, those of the other members
        are published as well. For a device that is already listed, grant and roster are published again.

        Raises:
            UntrustedError: no such request is pending, or a token has expired or was used meanwhile; no device is added then.
            ConfigError: a name is taken; no device is added then.
        """
        wanted = [text.strip().lower() for text in fingerprints]
        with self._fleet.changing():
            for fingerprint_ in wanted:
                if fingerprint_ not in self.pending and self.listed(fingerprint_) is None:
                    raise UntrustedError(
                        f"no request of fingerprint {fingerprint_} waits on the broker",
                        hint=LIST_HINT,
                    )
            requests = {each: self.pending[each] for each in wanted if each in self.pending}
            self._admit(list(requests.values()), now_s)
            return self._answer(
                {each: requests[each].token if each in requests else self._tokens.used_by(each) for each in wanted}
            )

    def give_way(self, name: str, fingerprint_: str, now_s: int) -> str:
        """Record that the device ``name`` gives way to the one that asks under its name; return that one's fingerprint.

        `approve` then puts it in the place of the other.

        Args:
            name: of a device of the fleet.
            fingerprint_: of the request; empty if only one has the name.
            now_s: unix seconds.

        Raises:
            UsageError: the fleet has no such device, or not one request has the name.
            UntrustedError: the token of the request has expired, or a device with its keys was replaced before.
        """
        found = [r for r in self.pending.values() if r.name == name and fingerprint_ in ("", r.fingerprint)]
        if len(found) != 1:
            raise UsageError(f"{len(found)} requests of {name!r} wait on the broker, and one must", hint=ASK_HINT)
        with self._fleet.changing():
            self._check_life(found[0], now_s)
            self._fleet.burn(open_card(found[0].card))
        return found[0].fingerprint

    def refuse_unfit(self, now_s: int) -> None:
        """Refuse the pending requests that can't be approved, and tell their devices why: the other ones stay pending.

        Of two devices with one name the one that says that it asked first stays. The line of a refused request stays valid, for
        the same device under another name.
        """
        names: set[str] = set()
        with self._fleet.changing():
            for request in sorted(self.pending.values(), key=lambda r: (r.asked_at_s, r.fingerprint)):
                try:
                    self._check(request, now_s)
                    if request.name in names:
                        raise ConfigError(f"another device called {request.name!r} asks as well", hint=OTHER_NAME_HINT)
                    names.add(request.name)
                except ShoalError as error:
                    self._refuse(open_card(request.card).member, request.token, error)

    def reject(self, wanted: str) -> str:
        """Refuse a request for good, tell its device, and return the name in it: its line admits nobody any more.

        Args:
            wanted: the fingerprint, name or token of a pending request, or the token of a refused one, which is only removed.

        Raises:
            UsageError: there is no such request, or several devices ask with that name.
        """
        found = self._named(wanted)
        if len(found) > 1:
            raise UsageError(f"{len(found)} devices called {wanted!r} ask", hint="give a fingerprint")
        with self._fleet.changing():
            for request in found:
                self._tokens.use(request.token, REJECTED)
                self._refuse(
                    open_card(request.card).member, request.token, UntrustedError(REJECTED_REASON, hint=NEW_LINE_HINT)
                )
                return request.name
        if wanted not in self.refused:
            raise UsageError(f"no request of {wanted!r} waits on the broker", hint=LIST_HINT)
        self._transport.publish(self._topics.enrol(wanted), b"", retain=True)
        return self.refused[wanted].name

    def knows(self, wanted: str) -> bool:
        """Return whether `reject` would find a request."""
        return bool(self._named(wanted)) or wanted in self.refused

    def _named(self, wanted: str) -> list[Request]:
        return [r for r in self.pending.values() if wanted in (r.fingerprint, r.name, r.token)]

    def _refuse(self, member: Member, token: str, error: ShoalError) -> None:
        """Tell a device that its request is refused, and remove the request from the broker.

        Not retained: another device may have used the line before, and its grant is retained there. A device that is away asks
        again when it comes back.
        """
        refusal = make_refusal(self._fleet.owner, self._fleet.name, token, member, error)
        (chunk,) = split(refusal, kind=channels.REFUSAL.kind, round=0)
        self._transport.publish(self._topics.grant(token), chunk)
        self._transport.publish(self._topics.enrol(token), b"", retain=True)
        self.pending.pop(fingerprint(member), None)
        self.refused[token] = Refused(member.name, token, str(error), error.hint)

    def _check(self, request: Request, now_s: int) -> None:
        self._check_life(request, now_s)
        self._fleet.check_device(open_card(request.card))

    def _check_life(self, request: Request, now_s: int) -> None:
        if now_s > self._tokens.find(request.token).token.expires_at_s:
            raise UntrustedError("the line has expired", hint=NEW_LINE_HINT)

    def _admit(self, requests: list[Request], now_s: int) -> None:
        for request in requests:  # all of them before a token is used up
            self._check(request, now_s)
        new = [request for request in requests if not self._fleet.listed(open_card(request.card).member)]
        for request in requests:
            self._tokens.use(request.token, request.fingerprint)
        if new:
            self._fleet.add_devices(request.card for request in new)
        for request in requests:
            del self.pending[request.fingerprint]

    def publish_roster(self) -> None:
        """Publish the newest roster for the aggregator, which forwards it to the devices; see `_count_on`."""
        with self._fleet.changing():
            aggregator = self._fleet.roster.aggregator
            if aggregator is not None:
                self._count_on()
                signed = self._fleet.roster_bytes
                purpose = owner_purpose(self._fleet.roster.sequence, signed)
                head = Sealed(self._fleet.name, purpose, OWNER_NAME, aggregator.name)
                sealed = seal_message_to_member(self._fleet.owner, aggregator.seal_key, head, signed)
                self._leave(channels.OWNER_ROSTER, sealed.payload)

    def publish_keys(self) -> None:
        """Publish the newest secrets, sealed to each member, and clear those of revoked devices."""
        with self._fleet.changing():
            for name in self._fleet.roster.revoked:
                self._transport.publish(self._topics.keys(name), b"", retain=True)
            self.take_receiving()
            for name in self._fleet.roster.active():
                if self._fleet.receiving.of(name).exhausted:
                    self._complain(
                        f"warning: {name} has published no receiving keys for a long time: start it, then shoal-fleet publish"
                    )
            for card in self._fleet.cards():
                self._leave(channels.KEYS, self._fleet.grant_for(card, renewal=True), card.member.name)

    def clear_refused(self) -> None:
        """Remove the refused requests from the broker."""
        for token in self.refused:
            self._transport.publish(self._topics.enrol(token), b"", retain=True)
        self.refused.clear()

    def listed(self, fingerprint_: str) -> Member | None:
        """Return the device with this fingerprint, if the roster lists it and it is not revoked."""
        roster = self._fleet.roster
        found = (d for d in roster.devices if fingerprint(d) == fingerprint_)
        return next((d for d in found if d.name not in roster.revoked), None)

    def _answer(self, tokens: Mapping[str, str]) -> list[Member]:
        """Publish each device's grant under its token, the roster, and the others' keys if new ones may have been drawn.

        Call it in `changing`.

        Args:
            tokens: id of the token that the device used, or "", by fingerprint.

        Raises:
            UntrustedError: a device is not in the roster, or is revoked.
        """
        members = []
        for fingerprint_ in tokens:
            member = self.listed(fingerprint_)
            if member is None:
                raise UntrustedError("the device no longer belongs to the fleet")
            members.append(member)
        # Also when no keys were drawn just now: a crash may have come between a draw and its publication.
        if self._count_on() or self._fleet.roster.keys_since:
            self.publish_keys()
        self.take_receiving()
        for member, token in zip(members, tokens.values(), strict=True):
            if token:
                self._leave(channels.GRANT, self._fleet.grant_for(Card(DEVICE_ROLE, member)), token)
                self._transport.publish(self._topics.enrol(token), b"", retain=True)
        self.publish_roster()
        self.flush()
        return members

    def _leave(self, channel: channels.Channel, payload: bytes, name: str = "") -> None:
        """Publish ``payload``, retained; ``name`` is that of the party or the token in the topic."""
        base = self._topics.at(channel.topic, name)
        self._retained.adopt(base)  # an earlier command may have published fewer chunks there
        self._retained.publish(base, payload, kind=channel.kind)


PROOF_BYTES: Final = 32


def open_request(data: bytes | memoryview, token: Token) -> tuple[Card, EnrolStatement]:
    """Open a request, check that it was made with ``token`` by the holder of the keys that it names, and return its card.

    With it comes the statement, which has the card as the device signed it. The caller checks expiry and single use.

    Raises:
        UntrustedError: another token, another fleet, other fingerprints, swapped keys or altered bytes.
        WireError: the bytes are no request.
    """
    request = decode(data, EnrolRequest)
    head, at = read_head(request.sealed)
    if head != channels.ENROLMENT.head(token.fleet, request.member.name, OWNER_NAME):
        raise UntrustedError(f"a request of {head.sender!r} to {head.recipient!r} of fleet {head.fleet!r}")
    try:
        plain = bytes(open_from_group(token_group(token), request.sealed, head, at, request.member.sign_key))
    except ShoalError as error:
        raise UntrustedError("the request does not prove the token that it names") from error
    proof, raw = plain[:PROOF_BYTES], plain[PROOF_BYTES:]
    # In constant time, or the duration would tell a forger how many of the first bytes are right.
    if not hmac.compare_digest(proof, prove(token, raw)):
        raise UntrustedError("the request does not prove the token that it names")
    statement = decode(raw, EnrolStatement)
    expected = (token.fleet, token.owner, token.aggregator, token_id(token.secret), token.expires_at_s)
    found = (statement.fleet, statement.owner, statement.aggregator, statement.token, statement.expires_at_s)
    if found != expected:
        raise UntrustedError("the request is for another fleet, owner, aggregator or token than the enrolment line")
    card = open_card(statement.card)
    if card.member != request.member or card.role != DEVICE_ROLE:
        raise UntrustedError("the request's card does not belong to the keys that sign the request")
    return card, statement


def make_refusal(owner: Identity, fleet: str, token: str, member: Member, error: ShoalError) -> bytes:
    """Return the owner's signed refusal of the request that ``member`` made under the token with the id ``token``."""
    reason, hint = (text.encode()[:MAX_REASON_BYTES].decode(errors="ignore") for text in (str(error), error.hint))
    refusal = EnrolRefusal(
        owner=owner.member, fleet=fleet, token=token, device=fingerprint(member), reason=reason, hint=hint
    )
    return sign_document(owner, refusal)
