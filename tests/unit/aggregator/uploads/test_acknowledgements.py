"""Answers to uploads: complete once the run's last round is answered."""

from aggregator.storage.store import UploadRef
from aggregator.uploads.retransmission import Answers
from aggregator.uploads.states import UploadEvent, UploadState, UploadTable
from shoal.protocol.reassembly import Reassembler
from tests.helpers.plans import run_plan
from tests.helpers.uploads import Membership, Recorder

LAST = 7


def refuse(answers, device, round_=LAST, transfer=bytes(16)):
    answers.answer(UploadRef(device, transfer), round_, UploadEvent.REJECTED, "the run is over")


def test_finished_run_answers_the_missing():
    """A finished run is answered for until every missing device asked."""
    answers = Answers(Reassembler(), Recorder(), Membership(), run_plan(), UploadTable())
    assert not answers.complete
    answers.end(LAST, ["dev-1", "dev-2"])
    refuse(answers, "dev-1")
    refuse(answers, "dev-2", LAST - 1)
    assert not answers.complete, "dev-2 will still ask about the final round"
    refuse(answers, "dev-2", transfer=b"2" * 16)
    assert answers.complete
    answers.end(LAST, [])
    assert answers.complete


def test_unlisted_device_is_sent_nothing():
    """Its committed upload is acknowledged all the same: it counts."""
    publisher, table = Recorder(), UploadTable()
    refuse(Answers(Reassembler(), publisher, Membership(), run_plan(), table), "stranger")
    assert publisher.take() == []
    assert table.state(UploadRef("stranger", bytes(16))) is UploadState.REFUSED
