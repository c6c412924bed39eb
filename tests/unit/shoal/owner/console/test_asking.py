"""One request and its answer: which answers count, and the error of each outcome.

Answers as lines and as data.
"""

import dataclasses
import threading
import time

import pytest

from aggregator.status.answers import LogRecord, RunEntry
from crypto.seal.identity import Identity, open_document
from shoal.errors import (
    BrokerUnreachableError,
    ConfigError,
    IntegrityError,
    NotReadyError,
    StorageError,
    UntrustedError,
    UsageError,
)
from shoal.owner.console import asking
from shoal.owner.console.asking import (
    COUNT_FILE,
    MOST_AHEAD,
    Question,
    RequestNumbers,
    ask,
    record_data,
    record_line,
    run_data,
    run_line,
    sign_choice,
)
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol import channels
from shoal.protocol.documents import ModelChoice
from shoal.protocol.requests import Outcome, OwnerAnswer, RequestAction
from shoal.protocol.topics import TopicKind
from shoal.transport.base import Connected, Disconnected, Message
from tests.helpers.owner_requests import AGGREGATOR, tell
from tests.helpers.parties import TOPICS, Line
from tests.helpers.receiving import founded
from tests.helpers.refusals import refused


@pytest.fixture
def fleet(tmp_path):
    return founded(tmp_path / "owner", "mqtt://h", aggregator=AGGREGATOR)


@pytest.fixture
def question(fleet):
    return Question(fleet, RequestAction.LIST)


def answer(question, outcome=Outcome.DONE, **changes):
    fields = {"fleet": "reef", "request": question.sealed.transfer_id, "accepted": 1, "answered_at_s": 7, **changes}
    return OwnerAnswer(outcome=outcome, **fields)


def test_the_answer_to_this_request_counts(fleet, question):
    """It subscribes before it publishes and takes a number."""
    line = Line()
    question.send(line)
    assert line.filters == [TOPICS.owner_answer]
    assert [(topic, retain) for topic, _, retain in line.sent] == [(TOPICS.owner_request, False)]
    assert RequestNumbers(fleet).last() == 1
    with pytest.raises(IntegrityError, match="no answer yet"):
        question.document()
    tell(question, answer(question), b'{"runs": []}')
    assert (question.answer.answered_at_s, question.document()) == (7, b'{"runs": []}')


@pytest.mark.parametrize("forgery", ["signer", "another request", "another key", "fleet", "purpose", "junk"])
def test_no_other_message_counts(question, forgery):
    right = channels.ANSWER.head("reef", "aggregator", "owner")
    message = answer(question)
    match forgery:
        case "signer":
            tell(question, message, signer=Identity.generate("aggregator"))
        case "another request":
            tell(question, dataclasses.replace(message, request=bytes(16)))
        case "another key":
            tell(question, message, key=AGGREGATOR.member.seal_key)
        case "fleet":
            tell(question, dataclasses.replace(message, fleet="atoll"))
        case "purpose":
            tell(question, message, head=dataclasses.replace(right, purpose="control"))
        case "junk":
            question.on_event(Message(TOPICS.owner_answer, b"junk"), 0.0)
            question.on_event(Message(TOPICS.at(TopicKind.OWNER_ROSTER), b"junk"), 0.0)
    assert question.answer is None


@pytest.mark.parametrize(
    ("outcome", "error", "status"),
    [
        (Outcome.UNKNOWN, UsageError, 2),
        (Outcome.NOT_NOW, NotReadyError, 11),
        (Outcome.REFUSED, UntrustedError, 6),
        (Outcome.EXPIRED, ConfigError, 3),
        (Outcome.FAILED, StorageError, 9),
    ],
)
def test_each_outcome_has_its_error(question, outcome, error, status):
    tell(question, answer(question, outcome, reason="the\x1b[31m reason", hint="do this"))
    with pytest.raises(error, match=r"refused the request: the\?\[31m reason") as caught:
        question.document()
    assert (caught.value.hint, caught.value.exit_code) == ("do this", status)


def test_overtaken_request_is_sent_again(fleet, question):
    """One that another console has overtaken may be sent again; a restored directory is named."""
    later = Question(fleet, RequestAction.LIST)
    assert not question.overtaken
    tell(question, answer(question, Outcome.REPLAYED, accepted=2))
    assert (question.overtaken, later.overtaken) == (True, False)
    tell(later, answer(later, Outcome.REPLAYED, accepted=40))
    assert not later.overtaken
    with pytest.raises(ConfigError, match="has seen request 40"):
        later.document()


def test_large_package_takes_no_number(fleet, tmp_path):
    """A package above the limit is refused before a number is taken; without an aggregator there is nobody to ask."""
    too_large = bytes(channels.REQUEST.largest)
    with refused(ConfigError, "the broker takes at most", hint="carry the file"):
        Question(fleet, RequestAction.START, package=too_large)
    assert RequestNumbers(fleet).last() == 0
    other = FleetDirectory.create(tmp_path / "other", "reef", "mqtt://h")
    with pytest.raises(ConfigError, match="no aggregator yet"):
        Question(other, RequestAction.LIST, clock=time.time)


AT = 1_795_000_000
RUN = RunEntry(
    run=2, run_id=bytes(16), algorithm="cfl", phase="round", round=4, rounds=9, stored_at_s=AT, round_at_s=AT
)
RECORD = LogRecord(
    round=4,
    final=False,
    closed_at_s=AT,
    seconds=1.25,
    ordered=8,
    contributed=1,
    absent=7,
    missing=tuple(f"dev-{n}" for n in range(7)),
    declined={"dev-1": "data"},
    loss=0.5,
    correct=3,
    tested=4,
    cluster_sizes=(2, 1),
    events=("split",),
    bytes_up=10,
)


@pytest.mark.parametrize(
    ("changes", "line"),
    [
        ({}, "run 2: cfl, round open, round 4 of 9, last round closed 2026-11-18T11:06:40Z"),
        (
            {"phase": "gathering", "order": "paused by the owner", "round_at_s": None},
            "run 2: cfl, paused by the owner, round 4 of 9",
        ),
        (
            {"order": "stopped by the owner", "phase": "finished", "round_at_s": None},
            "run 2: cfl, finished, stopped by the owner, round 4 of 9",
        ),
        (
            {"phase": "queued", "round": 0, "round_at_s": None},
            "run 2: cfl, begins once no other run is under way, round 0 of 9",
        ),
        (
            {"phase": "not_served", "obstacle": "damaged", "round_at_s": None},
            "run 2: cfl, not served now, round 4 of 9; damaged",
        ),
    ],
)
def test_a_run_is_one_line(changes, line):
    assert run_line(dataclasses.replace(RUN, **changes)) == line


def test_record_is_one_line():
    """A record is one line with five names at most; data have times in ISO 8601."""
    assert record_line(RECORD) == (
        "2026-11-18T11:06:40Z round 4: 1 of 8 devices in 1.2 s, loss 0.5, accuracy 75.0%, clusters 2+1, missing dev-0, "
        "dev-1 (data), dev-2, dev-3, dev-4 and 2 more, split"
    )
    bare = dataclasses.replace(
        RECORD, final=True, closed_at_s=None, absent=0, missing=(), tested=0, cluster_sizes=(), events=()
    )
    assert record_line(bare) == "- final round 4: 1 of 8 devices in 1.2 s, loss 0.5"
    data = run_data(dataclasses.replace(RUN, round_at_s=None))
    assert (data["stored_at"], data["round_at"], data["run_id"]) == ("2026-11-18T11:06:40Z", None, "00" * 16)
    assert (record_data(RECORD)["closed_at"], record_data(RECORD)["cluster_sizes"]) == ("2026-11-18T11:06:40Z", [2, 1])


# -- The numbers of the owner's requests --


def test_each_number_is_taken_once(fleet):
    """Each number is taken once also by another process."""
    assert RequestNumbers(fleet).last() == 0
    assert [RequestNumbers(FleetDirectory(fleet.path)).take() for _ in range(3)] == [1, 2, 3]
    assert (fleet.path / COUNT_FILE).stat().st_mode & 0o777 == 0o600


def test_restored_directory_says_so_once(fleet):
    """It goes on beyond; an aggregator can't use all numbers up."""
    numbers = RequestNumbers(fleet)
    with pytest.raises(ConfigError):
        numbers.count_on(MOST_AHEAD + 1)
    assert numbers.take() == 1
    numbers.count_on(1)
    behind = "has seen request 9 of this owner, and this directory has made 1"
    with refused(ConfigError, behind, hint="restored from a backup"):
        numbers.count_on(9)
    assert numbers.take() == 10


@pytest.mark.parametrize("data", [b"", b"-1", b"seven", "\u0663".encode(), b"9" * 30])
def test_a_damaged_file_is_named(fleet, data):
    path = fleet.path / COUNT_FILE
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(IntegrityError, match=r"requests\.count is damaged"):
        RequestNumbers(fleet).take()


# -- A request on a connection of its own: who did not answer, and how often it is sent --


class Wire(Line):
    """A transport whose ``script`` is called with the sink after each publish."""

    def __init__(self, sink, script):
        super().__init__()
        self.sink, self.script, self.left = sink, script, 0

    def start(self, *, require=False):
        assert require

    def pending(self):
        return self.left

    def publish(self, topic, payload, **options):
        super().publish(topic, payload, **options)
        self.script(self)


@pytest.fixture
def wires(monkeypatch):
    """Lines instead of connections; each takes the next script."""
    made, scripts, questions = [], [], []
    real = asking.Question

    def question(*args, **parts):
        questions.append(real(*args, **parts))
        return questions[-1]

    def transport(_address, _client, sink, **_options):
        script = scripts[len(made)]
        made.append(Wire(sink, lambda wire: script(wire, questions[-1])))
        return made[-1]

    monkeypatch.setattr(asking, "Question", question)
    monkeypatch.setattr("shoal.owner.broker.address.MqttTransport", transport)
    return made, scripts


def replying(outcome, accepted):
    def script(_wire, question):
        message = OwnerAnswer(
            fleet="reef", request=question.sealed.transfer_id, outcome=outcome, accepted=accepted, answered_at_s=7
        )
        tell(question, message, b"{}")

    return script


def test_silent_aggregator_is_named(fleet, wires, monkeypatch):
    """An aggregator that is silent is named and progress is told."""
    made, scripts = wires
    scripts.append(lambda _wire, _question: None)
    monkeypatch.setattr(asking, "TELL_S", 0.0)
    told = []
    with refused(NotReadyError, r"did not answer within 0\.1 s", hint="broker-config"):
        ask(fleet, 0.1, told.append, RequestAction.LIST)
    assert told[0].startswith("waiting for the aggregator's answer")
    assert made[0].closed


def test_a_lost_connection_is_the_brokers(fleet, wires):
    _, scripts = wires
    scripts.append(lambda wire, _question: wire.sink(Disconnected("gone")))
    with pytest.raises(BrokerUnreachableError, match="was lost before the answer came: gone"):
        ask(fleet, 0.1, lambda _line: None, RequestAction.LIST)


def test_request_is_sent_again(fleet, wires):
    """A bad link is no reason to ask the owner to begin again."""
    made, scripts = wires

    def drop_once(wire, question):
        if len(wire.sent) == 1:
            wire.sink(Disconnected("gone"))
            wire.sink(Connected(session_present=False))
        else:
            replying(Outcome.DONE, 1)(wire, question)

    scripts.append(drop_once)
    assert ask(fleet, 5.0, lambda _line: None, RequestAction.LIST) == (b"{}", 7)
    assert len(made) == 1


def test_overtaken_request_has_a_new_number(fleet, wires):
    """A request that was overtaken is sent again with a new number, three times at most."""
    made, scripts = wires
    scripts += [replying(Outcome.REPLAYED, 1), replying(Outcome.DONE, 2), *([replying(Outcome.REPLAYED, 1)] * 3)]
    assert ask(fleet, 5.0, lambda _line: None, RequestAction.LIST) == (b"{}", 7)
    assert len(made) == 2
    with pytest.raises(NotReadyError):
        ask(fleet, 5.0, lambda _line: None, RequestAction.LIST)
    assert len(made) == 5


def test_large_request_shows_progress(fleet, wires, monkeypatch):
    """A large request shows how much is sent."""
    _, scripts = wires

    def slow(wire, _question):
        wire.left = 3
        threading.Timer(0.2, setattr, (wire, "left", 0)).start()

    scripts.append(slow)
    monkeypatch.setattr(asking, "TELL_S", 0.0)
    told = []
    with pytest.raises(NotReadyError):
        ask(fleet, 0.05, told.append, RequestAction.LIST)
    assert told[0] == "sending the request: 0.0 MB sent, 3 parts left"


# -- The owner's signed choice of models --


def opened_choice(place, signed):
    return open_document(signed, ModelChoice, place.owner.owner.member.sign_key)


def test_names_a_run_and_its_number_grows(place):
    """It names a signed run and the newest and its number grows; one that the owner has not signed is refused."""
    first, second = place.sign(), place.sign()
    choice = opened_choice(place, sign_choice(place.owner, first.run, print))
    assert (choice.fleet, choice.run, choice.run_id, choice.latest) == ("reef", first.run, first.run_id, second.run)
    back = opened_choice(place, sign_choice(place.owner, 0, print))
    assert (back.run, back.run_id) == (0, bytes(16))
    assert back.sequence > choice.sequence
    with refused(UsageError, "there is no signed run 9", hint_is="the signed runs are: 1, 2"):
        sign_choice(place.owner, 9, print)
