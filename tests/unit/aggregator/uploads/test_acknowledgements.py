"""Answers to uploads: sent, repeated, and complete once the run's last round is answered."""

import pytest

from aggregator.storage.upload import UploadRef
from aggregator.uploads.acknowledgements import Acknowledgements
from aggregator.uploads.states import TransitionError, UploadEvent, UploadState, UploadTable
from shoal.protocol.messages import Action
from tests.helpers.plans import run_plan
from tests.helpers.uploads import Membership, Recorder, Sent

LAST = 7
TRANSFER = bytes(16)
LATE = "the run is over"


@pytest.fixture
def table():
    return UploadTable()


@pytest.fixture
def publisher():
    return Recorder()


@pytest.fixture
def answers(publisher, table):
    return Acknowledgements(publisher, Membership(), run_plan(), table)


def refuse(answers, device, round_=LAST, transfer=TRANSFER, reason=LATE):
    answers.answer(UploadRef(device, transfer), round_, UploadEvent.REJECTED, reason)


def test_answers_are_complete_when_every_missing_device_was_answered_for_the_final_round(answers):
    assert not answers.complete
    answers.end(LAST, ["dev-1", "dev-2"])
    refuse(answers, "dev-1")
    assert not answers.complete
    refuse(answers, "dev-2", LAST - 1, reason="the round is not open")
    assert not answers.complete  # dev-2 will still ask about the final round
    refuse(answers, "dev-2", transfer=b"2" * 16)
    assert answers.complete


def test_a_run_without_missing_devices_is_complete_at_its_end(answers):
    answers.end(LAST, [])
    assert answers.complete


def test_an_answer_moves_the_upload_and_is_sent(answers, table, publisher):
    refuse(answers, "dev-1")
    answers.answer(UploadRef("dev-2", TRANSFER), LAST, UploadEvent.FOUND_STORED)
    assert table.state(UploadRef("dev-1", TRANSFER)) is UploadState.REFUSED
    assert table.state(UploadRef("dev-2", TRANSFER)) is UploadState.ACKNOWLEDGED
    assert publisher.take() == [Sent("dev-1", TRANSFER, Action.REFUSED, LATE), Sent("dev-2", TRANSFER, Action.ACK)]


def test_a_repeated_refusal_repeats_its_reason(answers, publisher):
    """The second answer to the same upload once came without a reason."""
    refuse(answers, "dev-1")
    answers.repeat(UploadRef("dev-1", TRANSFER), LAST)
    assert publisher.take() == [Sent("dev-1", TRANSFER, Action.REFUSED, LATE)] * 2


def test_an_upload_is_answered_once(answers, publisher):
    refuse(answers, "dev-1")
    with pytest.raises(TransitionError):
        answers.answer(UploadRef("dev-1", TRANSFER), LAST, UploadEvent.FOUND_STORED)
    assert publisher.take() == [Sent("dev-1", TRANSFER, Action.REFUSED, LATE)]


def test_a_device_outside_the_roster_is_sent_nothing(answers, table, publisher):
    """Its committed upload is acknowledged all the same: it counts."""
    refuse(answers, "stranger")
    assert publisher.take() == []
    assert table.state(UploadRef("stranger", TRANSFER)) is UploadState.REFUSED
