"""One request and its answer: which answers count, and the error of each outcome."""

import dataclasses
import time

import pytest

from crypto.seal.identity import Identity
from shoal.errors import ConfigError, IntegrityError, NotReadyError, StorageError, UntrustedError, UsageError
from shoal.membership.grants import AGGREGATOR_ROLE, make_card
from shoal.owner.console.asking import Question, RequestNumbers
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol import channels
from shoal.protocol.requests import Outcome, OwnerAnswer, RequestAction
from shoal.protocol.topics import TopicKind
from shoal.transport.base import Message
from tests.helpers.owner_requests import AGGREGATOR, tell
from tests.helpers.parties import TOPICS, Line


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
    with pytest.raises(ConfigError, match="the broker takes at most") as caught:
        Question(fleet, RequestAction.START, package=too_large)
    assert "carry the file" in caught.value.hint
    assert RequestNumbers(fleet).last() == 0


def test_nobody_to_ask_without_aggregator(tmp_path):
    """Without an aggregator there is nobody to ask."""
    fleet = FleetDirectory.create(tmp_path / "other", "reef", "mqtt://h")
    with pytest.raises(ConfigError, match="no aggregator yet"):
        Question(fleet, RequestAction.LIST, clock=time.time)
