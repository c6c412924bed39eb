"""One request of the owner and its answer, over any transport. `Question` waits for nothing.

`RequestNumbers` keeps the number of the last request to the aggregator in the file ``requests.count``. A number is taken under
the fleet's lock and durable before its request is sent, so that no two requests share one.

`sign_choice` signs the owner's choice of the run whose finished models the devices answer with. Under round keys the devices
hold the models, and the aggregator none. So a choice carries no model: the owner signs the id of a run, and each device takes
that run's model from the last ones that it has stored.

`ask` asks on an MQTT connection that lasts for one command of `shoal-fleet`.

`run_line` and its like give the aggregator's answers as lines for people, and `run_data` and its like as the data of ``--json``
with times in ISO 8601.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from aggregator.rounds.state import RunPhase
from aggregator.status.answers import QUEUED, STOPPED_UNBEGUN, LogRecord, RunEntry, ScheduleEntry
from aggregator.status.record import NOT_SERVED, document_of
from crypto.seal.envelope import open_from_member, read_expected, seal_message_to_member
from crypto.seal.identity import sign_document
from shoal.errors import (
    BrokerUnreachableError,
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
from shoal.owner.broker.address import OwnerLink
from shoal.owner.keys.run_list import signed_plans
from shoal.owner.keys.vault import BACKUP_HINT
from shoal.protocol import channels
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import ModelChoice
from shoal.protocol.reassembly import Reassembler, Transfer
from shoal.protocol.requests import REQUEST_LIFE_S, Outcome, OwnerAnswer, OwnerRequest, RequestAction
from shoal.protocol.topics import TopicKind, Topics
from shoal.transport.base import Connected, Disconnected, Message, Transport, TransportEvent, publish_in_chunks
from shoal.util.console import second, span
from shoal.util.files import read_if_there, write_private

if TYPE_CHECKING:
    from shoal.owner.keys.directory import FleetDirectory
    from shoal.transport.mqtt import MqttTransport

COUNT_FILE: Final = "requests.count"
MOST: Final = (1 << 63) - 1
MOST_AHEAD: Final = 1 << 32
"""Largest jump of the number: an aggregator that cheats can't use the numbers up."""
RESTORED_HINT: Final = (
    "the directory was restored from a backup, or two copies of it are in use: end the other copy. Then run this again: requests "
    "go on from the aggregator's number now"
)


class RequestNumbers:
    """The numbers of one fleet's requests."""

    def __init__(self, fleet: FleetDirectory) -> None:
        self._fleet = fleet
        self._path = fleet.path / COUNT_FILE

    def last(self) -> int:
        """Return the last number taken, 0 before the first.

        Raises:
            IntegrityError: the file is damaged.
        """
        data = read_if_there(self._path)
        if data is None:
            return 0
        if not data.isascii() or not data.isdigit() or not int(data) <= MOST:
            raise IntegrityError(f"{self._path} is damaged", hint=BACKUP_HINT)
        return int(data)

    def take(self) -> int:
        """Take the next number, durably.

        Raises:
            ConfigError: another `shoal-fleet` has the directory locked for too long, or the disk fails.
        """
        with self._fleet.changing():
            number = self.last() + 1
            write_private(self._path, str(number).encode())
        return number

    def count_on(self, accepted: int) -> None:
        """Go on from ``accepted``, the highest number that the aggregator has seen, if it is above ours.

        Raises:
            ConfigError: it was above ours: this directory is older than a request of its owner.
        """
        with self._fleet.changing():
            ours = self.last()
            if accepted <= ours:
                return
            if accepted - ours <= MOST_AHEAD:
                write_private(self._path, str(accepted).encode())
        raise ConfigError(
            f"the aggregator has seen request {accepted} of this owner, and this directory has made {ours}",
            hint=RESTORED_HINT,
        )


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
        schedule: see `OwnerRequest`.
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
        schedule: bool = False,
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
            schedule=schedule,
        )
        head = channels.REQUEST.head(fleet.name, OWNER_NAME, self._aggregator.name)
        self.sealed = seal_message_to_member(fleet.owner, self._aggregator.seal_key, head, encode(request), package)
        self._chunks = Reassembler(channels.ANSWER.largest, whole_transfers=1, max_per_source=2)

    def send(self, transport: Transport) -> None:
        """Subscribe to answers, then publish the request."""
        transport.subscribe(self._topics.filter(TopicKind.OWNER_ANSWER))
        sealed = self.sealed
        publish_in_chunks(
            transport, self._topics.owner_request, sealed.payload, channels.REQUEST.kind, sealed.transfer_id
        )

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
        wanted = channels.ANSWER.head(self._fleet.name, self._aggregator.name, OWNER_NAME)
        head, at = read_expected(transfer.payload, wanted, "the aggregator's answer")
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


NO_RUN: Final = bytes(16)


def sign_choice(fleet: FleetDirectory, run: int, complain: Callable[[str], None]) -> bytes:
    """Return a signed `ModelChoice`.

    Args:
        fleet: the owner's directory.
        run: number of the run; 0 lets each device follow its own rule again.
        complain: called for files in the directory of runs that are none of this fleet.

    Raises:
        UsageError: the owner has signed no run of this number.
        ConfigError: another `shoal-fleet` has the directory locked for too long, or the disk fails.
    """
    plans = {plan.run: plan for plan in signed_plans(fleet, complain, turns=True)}
    if run and run not in plans:
        known = ", ".join(map(str, sorted(plans))) or "none"
        raise UsageError(f"there is no signed run {run}", hint=f"the signed runs are: {known}")
    choice = ModelChoice(
        fleet=fleet.name,
        sequence=RequestNumbers(fleet).take(),
        run=run,
        run_id=plans[run].run_id if run else NO_RUN,
        latest=max(plans, default=0),
    )
    return sign_document(fleet.owner, choice)


POLL_S: Final = 0.05
TELL_S: Final = 2.0
"""Time to the first line of progress, and between two."""
ATTEMPTS: Final = 3
"""Most requests for one command: another console may overtake one."""
SILENT_HINT: Final = (
    "the aggregator is not running or has no connection to the broker: shoal-aggregator status DIR on its machine says which. If "
    "`shoal-fleet broker-config` of an earlier version made the access list, make it again. A request that arrives within 10 "
    "minutes is still carried out; sending it again is safe"
)


def ask(
    fleet: FleetDirectory, wait_s: float, tell: Callable[[str], None], action: RequestAction, **parts: Any
) -> tuple[bytes, int]:
    """Send a request and return the document of the answer, and its time in unix seconds by the aggregator's clock.

    Args:
        fleet: the owner's directory.
        wait_s: seconds to wait for the answer once the broker has the request.
        tell: called with lines of progress.
        action: of the request.
        parts: further arguments of `Question`.

    Raises:
        BrokerUnreachableError: no broker answers, it refuses the owner's user, or the connection was lost.
        NotReadyError: the aggregator does not answer.
        UsageError, UntrustedError, ConfigError, StorageError: as `Question.document`.
    """
    for attempt in range(ATTEMPTS):
        question = Question(fleet, action, **parts)
        _exchange(fleet, wait_s, tell, question)
        if not question.overtaken or attempt == ATTEMPTS - 1:
            break
    document = question.document()
    assert question.answer is not None, "without an answer there is no document"
    return document, question.answer.answered_at_s


def _exchange(fleet: FleetDirectory, wait_s: float, tell: Callable[[str], None], question: Question) -> None:
    """Send a request and wait for its answer.

    Raises:
        BrokerUnreachableError, NotReadyError: as `ask`.
    """
    with OwnerLink(fleet) as link:
        transport = link.transport
        transport.start(require=True)
        question.send(transport)
        began_s = told_s = sent_s = online_s = time.monotonic()
        lost = ""
        while question.answer is None:
            now_s = time.monotonic()
            if not lost:
                online_s = now_s
            elif now_s - online_s >= wait_s:
                raise BrokerUnreachableError(
                    f"the connection to the broker was lost before the answer came: {lost}",
                    hint="run this again when the broker is back: a request that was carried out already changes nothing",
                )
            if lost or transport.pending():
                sent_s = now_s
            elif now_s - sent_s >= wait_s:
                raise NotReadyError(f"the aggregator did not answer within {wait_s:g} s", hint=SILENT_HINT)
            if now_s - told_s >= TELL_S:
                told_s = now_s
                tell(_progress(transport, now_s - began_s))
            event = link.next(POLL_S)
            if event is None:
                continue
            if isinstance(event, Disconnected):
                lost = event.reason
            elif isinstance(event, Connected) and lost:
                # In chunks that the broker takes by now. A request that was carried out changes nothing.
                lost = ""
                question.send(transport)
            question.on_event(event, time.monotonic())


def _progress(transport: MqttTransport, seconds: float) -> str:
    left = transport.pending()
    if left:
        return f"sending the request: {transport.bytes_sent / 1e6:.1f} MB sent, {left} parts left"
    return f"waiting for the aggregator's answer ({seconds:.0f} s)"


PHASES = {
    QUEUED: "begins once no other run is under way",
    STOPPED_UNBEGUN: "over before its first round",
    NOT_SERVED: "not served now",
    RunPhase.GATHERING.value: "waits for devices",
    RunPhase.ROUND.value: "round open",
    RunPhase.FINAL.value: "final round open",
    RunPhase.FINISHED.value: "finished",
}


def run_line(entry: RunEntry) -> str:
    """Return a run as one line."""
    phase = PHASES.get(entry.phase, entry.phase)
    if entry.order and entry.phase == RunPhase.GATHERING.value:
        phase = entry.order
    elif entry.order:
        phase += f", {entry.order}"
    last = f", last round closed {second(entry.round_at_s)}" if entry.round_at_s is not None else ""
    obstacle = f"; {entry.obstacle}" if entry.obstacle else ""
    return f"run {entry.run}: {entry.algorithm}, {phase}, round {entry.round} of {entry.rounds}{last}{obstacle}"


def run_data(entry: RunEntry) -> dict[str, Any]:
    """Return a run as the data of ``--json``."""
    return {**document_of(entry), "run_id": entry.run_id.hex()}


def schedule_line(entry: ScheduleEntry) -> str:
    """Return a standing order as one line."""
    runs = f"runs {entry.first} to {entry.first + entry.count - 1}, {entry.begun} begun"
    grows = f", when data have grown by {entry.growth} %" if entry.growth else ""
    ends = f"one every {span(entry.interval_s)} until {second(entry.until_s)}{grows}"
    kept = f"; with an earlier model, which fits their data better: {', '.join(entry.kept)}" if entry.kept else ""
    return f"standing order: {entry.algorithm}, {runs}, {ends}; {entry.waits or 'the next run begins after any under way'}{kept}"


def schedule_data(entry: ScheduleEntry) -> dict[str, Any]:
    """Return a standing order as the data of ``--json``."""
    document = document_of(entry)
    del document["interval"]  # a time span, and no time
    return {**document, "interval_s": entry.interval_s}


def record_line(record: LogRecord) -> str:
    """Return a record of a run's log as one line."""
    at = "-" if record.closed_at_s is None else second(record.closed_at_s)
    accuracy = f", accuracy {100 * record.correct / record.tested:.1f}%" if record.tested else ""
    sizes = f", clusters {'+'.join(map(str, record.cluster_sizes))}" if record.cluster_sizes else ""
    events = f", {', '.join(record.events)}" if record.events else ""
    name = "final round" if record.final else "round"
    took = f"{record.contributed} of {record.ordered} devices in {record.seconds:.1f} s"
    loss = (
        f", loss {record.loss:.4g}" if record.loss else ""
    )  # without one if no device has trained, or no sum was opened
    return f"{at} {name} {record.round}: {took}{loss}{accuracy}{sizes}{_missing(record)}{events}"


def _missing(record: LogRecord) -> str:
    if not record.absent:
        return ""
    named = ", ".join(
        f"{name} ({record.declined[name]})" if name in record.declined else name for name in record.missing[:5]
    )
    return f", missing {named}{f' and {record.absent - 5} more' if record.absent > 5 else ''}"


def record_data(record: LogRecord) -> dict[str, Any]:
    """Return a record of a run's log as the data of ``--json``."""
    return {**document_of(record), "declined": dict(record.declined)}
