"""What the aggregator answers to a reminder, and what it asks for."""

import dataclasses
from types import SimpleNamespace

import pytest

from aggregator.publisher import first_reminder_s
from aggregator.rounds.state import EngineState
from aggregator.strategies.base import RoundPlan
from aggregator.uploads.acknowledgements import Answers
from aggregator.uploads.retransmission import PAUSE_S, Asking
from shoal import limits
from shoal.protocol.chunking import ChunkKind, split, transfer_id
from shoal.protocol.messages import Action, Phase, Reminder
from shoal.protocol.reassembly import MAX_MISSING_LISTED, Reassembler
from tests.helpers.plans import run_plan

RUN = run_plan()
PAYLOAD = bytes(range(256)) * 12
CHUNKS = split(PAYLOAD, kind=ChunkKind.UPLOAD, round=7, chunk_bytes=1024)
TRANSFER, DIGEST = transfer_id(PAYLOAD), b"d" * 32
REMINDER = Reminder("demo", "dev-1", RUN.run_id, 7, TRANSFER, DIGEST, len(PAYLOAD), 1024, 5)
WHOLE = (0, 1, 2)
OPEN = EngineState((), None, RUN, plan=RoundPlan(7, {}, {}), round=7)


class Publisher:
    """Writes down what devices are told: (action or what is missing, transfer)."""

    def __init__(self):
        self.done = []

    def answer(self, _member, run, round_, transfer, action, reason=""):
        assert run == RUN
        assert round_ in (6, 7)
        self.done.append((action, transfer, reason) if reason else (action, transfer))

    def ask_again(self, member, run, round_, transfer, missing):
        assert run == RUN
        assert round_ >= 7
        self.done.append((member, transfer, missing))


class Landing:
    """At most one upload on its way to the disk."""

    queued = None

    def of(self, _device):
        return self.queued


class Scene:
    """An `Asking` between true chunks and answers, and doubles of what lies beyond."""

    def __init__(self):
        self.publisher, self.landing, self.chunks = Publisher(), Landing(), Reassembler()
        roster = SimpleNamespace(device=lambda name: None if name == "stranger" else name)
        membership = SimpleNamespace(roster=roster)
        self.answers = Answers(self.publisher, membership, RUN)
        self.asking = Asking(self.chunks, self.landing, self.answers, self.publisher, membership, RUN)

    def told(self):
        """Return what devices were told since the last call."""
        done, self.publisher.done = self.publisher.done, []
        return done

    def answer(self, action):
        """Answer the upload, once before."""
        self.answers.reply("dev-1", 7, TRANSFER, action)
        self.told()

    def remind(
        self, now_s=0.0, received=None, finished=False, closed=False, most_bytes=limits.MAX_TRANSFER_BYTES, **changes
    ):
        plan = None if closed or finished else RoundPlan(7, {}, {})
        state = EngineState((), None, RUN, plan=plan, round=7, received=received or {}, finished=finished)
        self.asking.remind(dataclasses.replace(REMINDER, **changes), state, now_s, most_bytes)
        return self.told()


@pytest.fixture
def scene():
    return Scene()


def test_an_upload_of_which_nothing_came_is_asked_for_whole(scene):
    assert scene.remind() == [("dev-1", TRANSFER, WHOLE)]


def test_of_an_upload_that_came_in_part_the_rest_is_asked_for_at_once(scene):
    scene.chunks.add("dev-1", CHUNKS[1], 0.0)
    assert scene.remind() == [("dev-1", TRANSFER, (0, 2))]


def test_an_answer_is_given_again(scene):
    for at, action in enumerate((Action.ACK, Action.REFUSED)):
        scene.answer(action)
        assert scene.remind(now_s=at) == [(action, TRANSFER)]


def test_an_upload_on_its_way_to_the_disk_is_neither_answered_nor_asked_for(scene):
    scene.landing.queued = SimpleNamespace(transfer=TRANSFER)
    assert scene.remind() == []
    scene.landing.queued = SimpleNamespace(transfer=bytes(16))
    assert scene.remind(now_s=1.0) == [("dev-1", TRANSFER, WHOLE)]


def test_an_upload_that_an_earlier_life_has_stored_is_acknowledged(scene):
    assert scene.remind(received={"dev-1": (Phase.TRAIN, DIGEST)}) == [(Action.ACK, TRANSFER)]
    assert scene.remind(now_s=1.0) == [(Action.ACK, TRANSFER)], "and this life knows that it did"


@pytest.mark.parametrize("stored", [{"dev-1": (Phase.TRAIN, bytes(32))}, {"dev-2": (Phase.TRAIN, DIGEST)}])
def test_another_upload_that_was_stored_acknowledges_nothing(scene, stored):
    assert scene.remind(received=stored) == [("dev-1", TRANSFER, WHOLE)]


def test_what_was_asked_for_is_not_asked_for_again_on_an_older_reminder(scene):
    """On a slow link several wait in the queue, and what they made us ask for comes behind the last of them."""
    assert scene.remind(now_s=10.0)
    assert scene.remind(now_s=12.0) == []
    assert scene.remind(now_s=13.0, turn=4) == []
    assert scene.remind(now_s=14.0, turn=6) == [("dev-1", TRANSFER, WHOLE)], "all of it was lost again"
    assert scene.remind(now_s=16.0, turn=6) == []
    assert scene.remind(now_s=14.0 + limits.REMIND_CAP_S, turn=6), "the question may be lost"


def test_a_lost_broker_may_have_lost_the_question(scene):
    assert scene.remind(now_s=10.0)
    assert scene.remind(now_s=11.0) == []
    scene.asking.forget()
    assert scene.remind(now_s=12.0)


def test_another_upload_of_the_device_is_asked_for_at_once(scene):
    assert scene.remind(now_s=10.0)
    other = bytes(16)
    assert scene.remind(now_s=11.0, transfer=other) == [("dev-1", other, WHOLE)]


def test_nobody_is_answered_faster_than_devices_remind(scene):
    """Whoever plays reminders again, or makes them up, has us sign as often."""
    scene.answer(Action.ACK)
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
def test_what_comes_too_late_need_not_travel(scene, changes, reason):
    assert scene.remind(**changes) == [(Action.REFUSED, TRANSFER, reason)]


def test_a_run_that_is_only_looked_back_to_refuses_nothing_of_another(scene):
    """It may be one that is held back: who was refused would not send again when it goes on."""
    assert scene.remind(run_id=b"x" * 16, finished=True) == []


def test_an_upload_for_a_round_that_we_have_yet_to_reach_is_not_given_up(scene):
    """The aggregator has been set back by a crash, and will get there again."""
    assert scene.remind(round=8) != []
    assert all(what[0] != Action.REFUSED for what in scene.remind(now_s=99.0, round=8))


def test_a_long_upload_is_asked_for_piece_by_piece(scene):
    ((_, _, missing),) = scene.remind(size=limits.MAX_TRANSFER_BYTES)
    assert missing == tuple(range(MAX_MISSING_LISTED))


def test_who_left_the_fleet_is_asked_for_nothing(scene):
    assert scene.remind(device="stranger") == []


def test_what_has_stalled_is_asked_for(scene):
    scene.chunks.add("dev-1", CHUNKS[2], 0.0)
    scene.asking.tick(OPEN, limits.REASSEMBLY_QUIET_S)
    assert scene.told() == [("dev-1", TRANSFER, (0, 1))]


def test_what_came_again_while_it_was_written_is_forgotten(scene):
    """Its answer is out: nobody would ever send the rest."""
    scene.chunks.add("dev-1", CHUNKS[2], 0.0)
    scene.answer(Action.ACK)
    scene.asking.tick(OPEN, limits.REASSEMBLY_QUIET_S)
    assert scene.told() == []
    assert len(scene.chunks) == 0


def test_what_comes_again_while_it_is_written_is_forgotten_too(scene):
    scene.chunks.add("dev-1", CHUNKS[2], 0.0)
    scene.landing.queued = SimpleNamespace(transfer=TRANSFER)
    scene.asking.tick(OPEN, limits.REASSEMBLY_QUIET_S)
    assert scene.told() == []
    assert len(scene.chunks) == 0


def test_the_first_pause_grows_with_the_round():
    """Each pause is longer than the round took where it was measured (2 cores; seconds a round in the table)."""
    small, logistic, mlp = first_reminder_s(10, 31_400), first_reminder_s(2000, 31_400), first_reminder_s(1000, 636_040)
    assert small < 1.1
    assert logistic > 8.6
    assert mlp > 7.2


def test_a_reminder_within_the_pause_is_known_before_it_is_opened(scene):
    assert not scene.asking.is_too_soon("dev-1", 0.0)
    scene.remind(now_s=0.0)
    assert scene.asking.is_too_soon("dev-1", PAUSE_S - 0.01)
    assert not scene.asking.is_too_soon("dev-2", PAUSE_S - 0.01)
    assert not scene.asking.is_too_soon("dev-1", PAUSE_S)


def test_in_a_large_round_more_time_passes_before_chunks_are_asked_for(scene):
    """Where a thousand devices upload at once, nothing may arrive for seconds though nothing was lost."""
    crowd = dataclasses.replace(OPEN, plan=RoundPlan(7, {}, {f"dev-{n}": None for n in range(1000)}))
    scene.chunks.add("dev-1", CHUNKS[1], 0.0)
    patience_s = first_reminder_s(1000, 4 * RUN.length)
    scene.asking.tick(crowd, patience_s - 0.1)
    assert scene.told() == []
    scene.asking.tick(crowd, patience_s)
    assert scene.told() == [("dev-1", TRANSFER, (0, 2))]


def test_an_upload_that_is_too_large_to_arrive_is_refused(scene):
    """Its chunks are refused, so to ask for them would never end."""
    ((action, transfer, reason),) = scene.remind(most_bytes=len(PAYLOAD) - 1)
    assert (action, transfer) == (Action.REFUSED, TRANSFER)
    assert f"{len(PAYLOAD)} bytes is above" in reason
    again = scene.remind(now_s=1.0, most_bytes=len(PAYLOAD))
    assert again == [(Action.REFUSED, TRANSFER, reason)], "the same answer again"
