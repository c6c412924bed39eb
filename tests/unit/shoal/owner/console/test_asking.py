"""One request and its answer: which answers count, and the error of each outcome.

Answers as lines and as data.
"""

import dataclasses
import time

import pytest

from aggregator.status.answers import LogRecord, RunEntry
from crypto.seal.identity import Identity
from shoal.errors import ConfigError, IntegrityError, NotReadyError, StorageError, UntrustedError, UsageError
from shoal.membership.grants import AGGREGATOR_ROLE, make_card
from shoal.owner.console.asking import Question, RequestNumbers, record_data, record_line, run_data, run_line
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol import channels
from shoal.protocol.requests import Outcome, OwnerAnswer, RequestAction
from shoal.protocol.topics import TopicKind
from shoal.transport.base import Message
from tests.helpers.owner_requests import AGGREGATOR, tell
from tests.helpers.parties import TOPICS, Line
from tests.helpers.refusals import refused


@pytest.fixture
def fleet(tmp_path):
    made = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://h")
    made.add_aggregator(make_card(AGGREGATOR, AGGREGATOR_ROLE))
    return made


@pytest.fixture
def question(fleet):
    return Question(fleet, RequestAction.LIST)


def answer(question, outcome=Outcome.DONE, **changes):
    fields = {"fleet": "reef", "request": question.sealed.transfer_id, "accepted": 1, "answered_at_s": 7, **changes}
    return OwnerAnswer(outcome=outcome, **fields)


def test_subscribes_before_it_publishes(fleet, question):
    """It subscribes before it publishes and takes a number."""
    line = Line()
    question.send(line)
    assert line.filters == [TOPICS.owner_answer]
    assert [(topic, retain) for topic, _, retain in line.sent] == [(TOPICS.owner_request, False)]
    assert RequestNumbers(fleet).last() == 1


def test_the_answer_to_this_request_counts(question):
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
    """A request that another console has overtaken may be sent again."""
    later = Question(fleet, RequestAction.LIST)
    assert not question.overtaken
    tell(question, answer(question, Outcome.REPLAYED, accepted=2))
    assert (question.overtaken, later.overtaken) == (True, False)


def test_a_restored_directory_is_named(question):
    tell(question, answer(question, Outcome.REPLAYED, accepted=40))
    assert not question.overtaken
    with pytest.raises(ConfigError, match="has seen request 40"):
        question.document()


def test_large_package_takes_no_number(fleet):
    """A package above the limit is refused before a number is taken."""
    too_large = bytes(channels.REQUEST.largest)
    with refused(ConfigError, "the broker takes at most", hint="carry the file"):
        Question(fleet, RequestAction.START, package=too_large)
    assert RequestNumbers(fleet).last() == 0


def test_nobody_to_ask_without_aggregator(tmp_path):
    """Without an aggregator there is nobody to ask."""
    fleet = FleetDirectory.create(tmp_path / "other", "reef", "mqtt://h")
    with pytest.raises(ConfigError, match="no aggregator yet"):
        Question(fleet, RequestAction.LIST, clock=time.time)


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


def test_data_have_times_in_iso_8601():
    data = run_data(dataclasses.replace(RUN, round_at_s=None))
    assert (data["stored_at"], data["round_at"], data["run_id"]) == ("2026-11-18T11:06:40Z", None, "00" * 16)
    assert record_data(RECORD)["closed_at"] == "2026-11-18T11:06:40Z"
    assert record_data(RECORD)["cluster_sizes"] == [2, 1]


def test_record_is_one_line():
    """A record is one line with five names at most."""
    assert record_line(RECORD) == (
        "2026-11-18T11:06:40Z round 4: 1 of 8 devices in 1.2 s, loss 0.5, accuracy 75.0%, clusters 2+1, missing dev-0, "
        "dev-1 (data), dev-2, dev-3, dev-4 and 2 more, split"
    )
    bare = dataclasses.replace(
        RECORD, final=True, closed_at_s=None, absent=0, missing=(), tested=0, cluster_sizes=(), events=()
    )
    assert record_line(bare) == "- final round 4: 1 of 8 devices in 1.2 s, loss 0.5"
