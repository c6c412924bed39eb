"""Whom a run that has ended still owes an answer."""

import pytest

from aggregator import membership as aggregators
from aggregator.publisher import Publisher
from aggregator.uploads.acknowledgements import Answers
from shoal.protocol.messages import Action
from shoal.transport.loopback import LoopbackBroker, LoopbackTransport
from tests.helpers.crews import Crew

LAST = 7


@pytest.fixture
def answers(tmp_path):
    crew = Crew(tmp_path)
    server = aggregators.AggregatorMembership(tmp_path / "server")
    transport = LoopbackTransport(LoopbackBroker(), "aggregator", lambda _event: None)
    publisher = Publisher(server.identity, server.group, transport, tmp_path / "server" / "retained.json")
    return Answers(publisher, server, crew.plan)


def test_all_is_said_when_everybody_was_told_of_the_final_round(answers):
    assert not answers.all_given
    answers.end(LAST, ["dev-1", "dev-2"])
    answers.reply("dev-1", LAST, bytes(16), Action.REFUSED, "the run is over")
    assert not answers.all_given
    answers.reply("dev-2", LAST - 1, bytes(16), Action.REFUSED, "the round is not open")
    assert not answers.all_given  # it has yet to hear of the final round, and will ask
    answers.reply("dev-2", LAST, bytes(16), Action.REFUSED, "the run is over")
    assert answers.all_given


def test_a_run_without_stragglers_owes_nothing(answers):
    answers.end(LAST, [])
    assert answers.all_given


def test_a_refusal_that_is_repeated_says_again_why(answers, monkeypatch):
    """The second answer to the same upload once came without a reason."""
    said = []
    monkeypatch.setattr(answers._publisher, "answer", lambda *given: said.append(given[3:]))
    answers.reply("dev-1", LAST, bytes(16), Action.REFUSED, "the run is over")
    assert answers.again("dev-1", LAST, bytes(16))
    assert said == [(bytes(16), Action.REFUSED, "the run is over")] * 2
