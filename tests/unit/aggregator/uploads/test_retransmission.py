"""Answers to reminders, and requests for missing chunks."""

import dataclasses

import pytest

from aggregator.publisher import first_reminder_s
from aggregator.rounds.held_models import HeldModels
from aggregator.rounds.state import EngineState
from aggregator.storage.store import UploadRef
from aggregator.strategies.base import RoundPlan
from aggregator.uploads.retransmission import PAUSE_S, Answers
from aggregator.uploads.states import UploadEvent, UploadTable
from shoal import limits
from shoal.protocol.chunking import ChunkKind, split, transfer_id
from shoal.protocol.messages import Action, Phase, Reminder
from shoal.protocol.reassembly import MAX_MISSING_LISTED, Reassembler
from tests.helpers.plans import KEY_VERSION, run_plan
from tests.helpers.uploads import STRANGER, Membership, Recorder

RUN = run_plan()
PAYLOAD = bytes(range(256)) * 12
CHUNKS = split(PAYLOAD, kind=ChunkKind.UPLOAD, round=7, chunk_bytes=1024)
TRANSFER, DIGEST = transfer_id(PAYLOAD), b"d" * 32
REMINDER = Reminder(
    fleet="demo",
    device="dev-1",
    run_id=RUN.run_id,
    round=7,
    transfer=TRANSFER,
    digest=DIGEST,
    size=len(PAYLOAD),
    chunk_bytes=1024,
    turn=5,
)
WHOLE = (0, 1, 2)
OPEN = EngineState((), None, RUN, HeldModels.none(KEY_VERSION), plan=RoundPlan(7, {}, {}), round=7)


class Scene:
    """`Answers` with real chunks and states, and doubles of its neighbours."""

    def __init__(self):
        self.publisher, self.table, self.chunks = Recorder(), UploadTable(), Reassembler()
        self.answers = Answers(self.chunks, self.publisher, Membership(), RUN, self.table)

    def told(self):
        """Return the messages to devices since the last call: (device, transfer, chunks) or (action, transfer[, reason])."""
        return [
            (m.device, m.transfer, m.missing)
            if m.action is Action.NACK
            else ((m.action, m.transfer, m.reason) if m.reason else (m.action, m.transfer))
            for m in self.publisher.take()
        ]

    def answer(self, event, transfer=TRANSFER):
        """Answer an upload, without looking at the message."""
        self.answers.answer(UploadRef("dev-1", transfer), 7, event)
        self.told()

    def queue(self, transfer=TRANSFER):
        """Put an upload on its way to the disk."""
        self.table.move(UploadRef("dev-1", transfer), UploadEvent.COMPLETE)
        self.table.move(UploadRef("dev-1", transfer), UploadEvent.VALIDATED)

    def remind(
        self, now_s=0.0, received=None, finished=False, closed=False, most_bytes=limits.MAX_TRANSFER_BYTES, **changes
    ):
        plan = None if closed or finished else RoundPlan(7, {}, {})
        state = dataclasses.replace(OPEN, plan=plan, received=received or {}, finished=finished)
        self.answers.on_reminder(dataclasses.replace(REMINDER, **changes), state, now_s, most_bytes)
        return self.told()


@pytest.fixture
def scene():
    return Scene()


def test_missing_chunks_are_wanted_at_once(scene):
    """The missing chunks of an upload are requested at once, all of them if none arrived."""
    scene.chunks.add("dev-1", CHUNKS[1], 0.0)
    assert scene.remind() == [("dev-1", TRANSFER, (0, 2))]
    assert Scene().remind() == [("dev-1", TRANSFER, WHOLE)]


@pytest.mark.parametrize(
    ("event", "action"), [(UploadEvent.FOUND_STORED, Action.ACK), (UploadEvent.REJECTED, Action.REFUSED)]
)
def test_an_answer_is_repeated(scene, event, action):
    scene.answer(event)
    assert scene.remind() == [(action, TRANSFER)]


def test_upload_on_its_way_is_left_alone(scene):
    """An upload on its way to the disk is neither answered nor requested."""
    scene.queue(bytes(16))
    assert scene.remind() == [("dev-1", TRANSFER, WHOLE)]
    scene.queue()
    assert scene.remind(now_s=1.0, turn=6) == []
    scene.table.move(UploadRef("dev-1", TRANSFER), UploadEvent.COMMIT_STARTED)
    assert scene.remind(now_s=2.0, turn=7) == []


def test_upload_before_a_restart_is_answered(scene):
    """An upload stored before a restart is acknowledged."""
    assert scene.remind(received={"dev-1": (Phase.TRAIN, DIGEST)}) == [(Action.ACK, TRANSFER)]
    assert scene.remind(now_s=1.0) == [(Action.ACK, TRANSFER)], "the answer is repeated"


@pytest.mark.parametrize("stored", [{"dev-1": (Phase.TRAIN, bytes(32))}, {"dev-2": (Phase.TRAIN, DIGEST)}])
def test_another_upload_acknowledges_nothing(scene, stored):
    """Another stored upload acknowledges nothing."""
    assert scene.remind(received=stored) == [("dev-1", TRANSFER, WHOLE)]


def test_older_reminder_requests_nothing(scene):
    """On a slow link several reminders wait in the queue, and the requested chunks arrive after the last of them."""
    assert scene.remind(now_s=10.0)
    assert (scene.remind(now_s=12.0), scene.remind(now_s=13.0, turn=4)) == ([], [])
    assert scene.remind(now_s=14.0, turn=6) == [("dev-1", TRANSFER, WHOLE)], (
        "the device reminds again after its retransmission"
    )
    assert scene.remind(now_s=16.0, turn=6) == []
    assert scene.remind(now_s=14.0 + limits.REMIND_CAP_S, turn=6), "the request may be lost"


def test_lost_broker_may_have_lost_request(scene):
    assert scene.remind(now_s=10.0)
    assert scene.remind(now_s=11.0) == []
    scene.answers.on_disconnect()
    assert scene.remind(now_s=12.0)


def test_other_upload_is_requested_at_once(scene):
    """Another upload of the device is requested at once."""
    assert scene.remind(now_s=10.0)
    other = bytes(16)
    assert scene.remind(now_s=11.0, transfer=other) == [("dev-1", other, WHOLE)]


def test_fast_reminders_are_ignored(scene):
    """Each answer costs a signature, and replayed reminders could cause any number of them."""
    scene.answer(UploadEvent.FOUND_STORED)
    assert scene.remind(now_s=10.0)
    assert scene.remind(now_s=10.0 + PAUSE_S - 0.01) == []
    assert scene.remind(now_s=10.5, device="dev-2")
    assert scene.remind(now_s=10.0 + PAUSE_S)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"run_id": b"x" * 16}, "of another run"),
        ({"round": 6}, "the round is not open"),
        ({"closed": True}, "the round is not open"),
        ({"finished": True}, "the run is over"),
    ],
)
def test_late_upload_is_refused_unsent(scene, changes, reason):
    """An upload that is too late is refused before it is sent."""
    assert scene.remind(**changes) == [(Action.REFUSED, TRANSFER, reason)]


def test_other_runs_upload_is_not_refused(scene):
    """The other run may be stopped: a refused device would not offer its upload when that run continues."""
    assert scene.remind(run_id=b"x" * 16, finished=True) == []


def test_later_rounds_upload_is_not_refused(scene):
    """A crash has set the aggregator back; it will reach that round again."""
    assert scene.remind(round=8) != []
    assert all(what[0] != Action.REFUSED for what in scene.remind(now_s=99.0, round=8))


def test_a_long_upload_is_requested_in_parts(scene):
    ((_, _, missing),) = scene.remind(size=limits.MAX_TRANSFER_BYTES)
    assert missing == tuple(range(MAX_MISSING_LISTED))


def test_unlisted_device_is_asked_nothing(scene):
    """A device outside the roster is asked for nothing."""
    assert scene.remind(device=STRANGER) == []


def test_stalled_chunks_are_requested(scene):
    """The missing chunks of a stalled upload are requested."""
    scene.chunks.add("dev-1", CHUNKS[2], 0.0)
    scene.answers.tick(OPEN, limits.REASSEMBLY_QUIET_S)
    assert scene.told() == [("dev-1", TRANSFER, (0, 1))]


@pytest.mark.parametrize("before", [lambda scene: scene.answer(UploadEvent.FOUND_STORED), Scene.queue])
def test_copy_of_another_is_dropped(scene, before):
    """Of one that was answered or is on its way to the disk: the device would never send the rest."""
    scene.chunks.add("dev-1", CHUNKS[2], 0.0)
    before(scene)
    scene.answers.tick(OPEN, limits.REASSEMBLY_QUIET_S)
    assert (scene.told(), len(scene.chunks)) == ([], 0)


def test_first_pause_grows_with_the_round():
    """Each pause is longer than the round took where it was measured (2 cores; seconds a round in the table)."""
    small, logistic, mlp = first_reminder_s(10, 31_400), first_reminder_s(2000, 31_400), first_reminder_s(1000, 636_040)
    assert small < 1.1
    assert logistic > 8.6
    assert mlp > 7.2


def test_reminder_in_the_pause_is_unopened(scene):
    """A reminder within the pause can be dropped unopened."""
    assert not scene.answers.is_too_soon("dev-1", 0.0)
    scene.remind(now_s=0.0)
    assert scene.answers.is_too_soon("dev-1", PAUSE_S - 0.01)
    assert not scene.answers.is_too_soon("dev-2", PAUSE_S - 0.01)
    assert not scene.answers.is_too_soon("dev-1", PAUSE_S)


def test_large_round_requests_later(scene):
    """If a thousand devices upload at once, a transfer may get no chunk for seconds although none was lost."""
    crowd = dataclasses.replace(OPEN, plan=RoundPlan(7, {}, {f"dev-{n}": None for n in range(1000)}))
    scene.chunks.add("dev-1", CHUNKS[1], 0.0)
    patience_s = first_reminder_s(1000, 4 * RUN.length)
    scene.answers.tick(crowd, patience_s - 0.1)
    assert scene.told() == []
    scene.answers.tick(crowd, patience_s)
    assert scene.told() == [("dev-1", TRANSFER, (0, 2))]


def test_too_large_upload_is_refused(scene):
    """Its chunks are refused, so requests for them would never end."""
    ((action, transfer, reason),) = scene.remind(most_bytes=len(PAYLOAD) - 1)
    assert (action, transfer) == (Action.REFUSED, TRANSFER)
    assert f"{len(PAYLOAD)} bytes is above" in reason
    again = scene.remind(now_s=1.0, most_bytes=len(PAYLOAD))
    assert again == [(Action.REFUSED, TRANSFER, reason)], "the first answer is repeated"
