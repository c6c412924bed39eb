"""A device's session: what it does with each message, whatever comes between, and what it tells about itself."""

import dataclasses
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from crypto.seal.replay import ReplayWatermark
from edge_client.protocol import round_state as rounds
from edge_client.protocol import session_io as io
from edge_client.protocol.round_state import RoundState, Stage
from edge_client.protocol.session import ANNOUNCED_WITHIN_S
from shoal import limits
from shoal.errors import UntrustedError
from shoal.protocol import channels
from shoal.protocol.messages import Action, Control, DeclineReason, Notice, RunOrder
from shoal.protocol.topics import TopicKind
from tests.helpers.plans import run_plan
from tests.helpers.sessions import NEXT_GROUP, Driver
from tests.unit.edge_client.protocol.test_round_state import announcement

PLAN = run_plan(max_models=3, origins=2, rounds=5)
TRANSFER = b"transfer-of-mine"
NOTICE = io.Resubscribe(TopicKind.NOTICE)
AGAIN = (io.Resubscribe(TopicKind.PLAN), io.Resubscribe(TopicKind.ROUND), NOTICE)
ANNOUNCED = announcement()


def control(action=Action.ACK, *, fleet="demo", device="dev-1", missing=()):
    """Return the aggregator's answer to the upload of round 1."""
    return Control(
        fleet=fleet, device=device, action=action, run=1, round=1, transfer=TRANSFER, missing=missing, reason="too long"
    )


def following(**changes):
    """Return the driver of a device that follows the plan."""
    driver = Driver(**changes)
    driver.tell(io.RunFollowed(PLAN, 1000))
    driver.take()
    return driver


def working(**changes):
    """Return the driver of a device that works on round 1, whose models were at the labels a and b."""
    driver = following(**changes)
    driver.hear(channels.ANNOUNCEMENT, ANNOUNCED)
    transfers = {"a": b"1" * 16, "b": b"2" * 16}
    driver.tell(rounds.Located(ANNOUNCED.nonce, transfers, {}))
    for label, transfer in transfers.items():
        driver.tell(rounds.ModelArrived(label, transfer))
    assert driver.session.round.stage is Stage.WORKING
    driver.take()
    return driver


def sending(**changes):
    """Return the driver of a device that has just sent its upload of round 1."""
    driver = working(**changes)
    driver.go(driver.session.happened(rounds.WorkDone(1, 1, ANNOUNCED.nonce, TRANSFER), driver.facts))
    assert driver.take() == [rounds.Send()]
    return driver


@pytest.fixture
def driver():
    return Driver()


# ------------------------------------------------------------------------------------------------------------ the run


def test_begins_with_the_run_of_before(driver):
    """It begins with subscriptions and the run of before."""
    done = driver.go(driver.session.started(driver.facts))
    kinds = [action.kind for action in done if isinstance(action, io.Subscribe)]
    assert kinds == [
        TopicKind.ROSTER_CHANGE,
        TopicKind.KEYS,
        TopicKind.PLAN,
        TopicKind.ROUND,
        TopicKind.NOTICE,
        TopicKind.CTL,
    ]
    assert done[-1] == io.ResumeRun()


def test_expired_roster_resumes_no_run():
    """A device whose roster has expired resumes no run until it is valid."""
    driver = Driver().at(roster={"expired": True})
    driver.go(driver.session.started(driver.facts))
    assert driver.take(io.ResumeRun) == []
    assert [kind for kind in TopicKind if driver.session.hears(kind)] == [
        kind for kind in TopicKind if kind in (TopicKind.ROSTER, TopicKind.ROSTER_CHANGE, TopicKind.KEYS, TopicKind.CTL)
    ]
    driver.at(roster={"expired": False})
    driver.go(driver.session.checked(driver.facts))
    done = driver.take()
    assert io.ResumeRun() in done
    assert io.PublishPresence() in done
    assert tuple(done[-3:]) == AGAIN


def test_announcement_waits_for_its_package(driver):
    """An announcement without its run waits for the package."""
    assert driver.hear(channels.ANNOUNCEMENT, ANNOUNCED) == ()
    assert driver.session.missing == (io.Resubscribe(TopicKind.PLAN),)
    driver.tick(0.0)
    assert driver.tick(6.0) == (io.Resubscribe(TopicKind.ROUND),)
    assert driver.hear(channels.ANNOUNCEMENT, ANNOUNCED) == (io.Resubscribe(TopicKind.PLAN),)
    driver.tell(io.RunFollowed(PLAN, 1000))
    driver.take()
    driver.tell(io.RunStored())
    (locate,) = driver.take(rounds.Locate)
    assert locate.announcement is ANNOUNCED
    assert driver.session.waiting is None


def test_larger_package_awaits_its_size(driver):
    """A package that is larger than expected is asked for once its size is announced."""
    large = dataclasses.replace(ANNOUNCED, package_bytes=limits.FIRST_PACKAGE_BYTES + 1)
    assert driver.hear(channels.ANNOUNCEMENT, large) == (io.Resubscribe(TopicKind.PLAN),)
    assert driver.session.sizes.most_package == limits.FIRST_PACKAGE_BYTES + 1


def test_refused_run_is_declined(driver):
    """A run that is refused is declined when it is announced."""
    driver.tell(io.RunRefused(PLAN.run_id, DeclineReason.DATA))
    assert driver.hear(channels.ANNOUNCEMENT, ANNOUNCED) == (io.SendDecline(ANNOUNCED, DeclineReason.DATA),)


def test_late_device_fetches_a_checkpoint(driver):
    """A device that begins late fetches a checkpoint, and declines while there is none yet."""
    driver.tell(io.RunNeedsCheckpoint(PLAN))
    assert driver.hear(channels.ANNOUNCEMENT, ANNOUNCED) == (io.LocateCheckpoint(ANNOUNCED),)
    driver.tell(io.CheckpointLocated(ANNOUNCED, ()))
    assert driver.take(io.SendDecline) == [io.SendDecline(ANNOUNCED, DeclineReason.STATE)]
    driver.tell(io.CheckpointLocated(ANNOUNCED, ("b", "a")))
    assert driver.take(io.Subscribe) == [io.Subscribe(TopicKind.MODEL, "a"), io.Subscribe(TopicKind.MODEL, "b")]
    model = io.ModelTransfer("a", b"1" * 16, memoryview(b""))
    assert driver.hear(channels.CHECKPOINT, model) == (io.BeginWithCheckpoint(model),)


# ---------------------------------------------------------------------------------------------------------- the round


def test_replaced_keys_decline_a_new_round():
    """A round under replaced keys is declined unless it was begun."""
    driver = following().at(keys_since=99)
    driver.hear(channels.ANNOUNCEMENT, ANNOUNCED)
    assert driver.take(io.SendDecline) == [io.SendDecline(ANNOUNCED, DeclineReason.KEYS)]
    assert driver.session.round.stage is Stage.IDLE
    driver = working().at(keys_since=99)
    driver.hear(channels.ANNOUNCEMENT, ANNOUNCED)
    assert driver.take(io.SendDecline) == []
    assert driver.session.round.stage is Stage.WORKING


@pytest.mark.parametrize(("round_", "declined"), [(3, True), (2, False), (1, False)], ids=["newer", "again", "older"])
def test_refused_announcement_is_declined(round_, declined):
    """A replayed one would otherwise make the device speak."""
    mark = ReplayWatermark(roster=3, run=1, round=2, nonce=b"m" * 16)
    driver = following(round=RoundState(0, mark))
    refused = dataclasses.replace(ANNOUNCED, round=round_, fleet="another")
    *sent, refusal = driver.hear(channels.ANNOUNCEMENT, refused)
    assert isinstance(refusal.error, UntrustedError)
    assert sent == ([io.SendDecline(refused, DeclineReason.REFUSED)] if declined else [])
    assert driver.session.round.mark == mark


def test_unneeded_models_are_dropped():
    """Models that are no longer needed are unsubscribed and dropped."""
    driver = working()
    following_round = announcement(2)
    driver.hear(channels.ANNOUNCEMENT, following_round)
    driver.tell(rounds.Located(following_round.nonce, {"b": b"3" * 16}, {}))
    done = driver.take()
    assert io.Unsubscribe(TopicKind.MODEL, "a") in done
    assert io.DropModel("a") in done
    assert [action for action in done if isinstance(action, io.Subscribe)] == []
    assert driver.session.labels == ("b",)
    assert driver.session.missing == (io.Resubscribe(TopicKind.MODEL, "b"),)


def test_only_followed_models_are_opened():
    """Only models that the device follows are opened."""
    driver = following()
    stray = io.ModelTransfer("zz", b"1" * 16, memoryview(b""))
    assert driver.hear(channels.MEAN, stray) == ()
    driver.hear(channels.ANNOUNCEMENT, ANNOUNCED)
    driver.tell(rounds.Located(ANNOUNCED.nonce, {"a": b"1" * 16}, {}))
    model = dataclasses.replace(stray, label="a")
    assert driver.hear(channels.MEAN, model) == (io.TakeModel(model),)


def test_skipped_round_is_declined():
    """A round that is skipped is declined and ends."""
    driver = working()
    driver.go(driver.session.happened(io.RoundSkipped(ANNOUNCED, DeclineReason.TASK), driver.facts))
    assert driver.take(io.SendDecline) == [io.SendDecline(ANNOUNCED, DeclineReason.TASK)]
    assert not driver.session.works_on(ANNOUNCED)
    assert driver.hear(channels.ANNOUNCEMENT, ANNOUNCED) == (io.SendDecline(ANNOUNCED, DeclineReason.TASK),)


@pytest.mark.parametrize("message", [control(device="dev-2"), control(fleet="atoll")])
def test_control_for_another_is_refused(message):
    """A control message for another device is refused."""
    driver = sending()
    driver.hear(channels.CONTROL, message)
    (refusal,) = driver.take()
    assert "a control message for" in str(refusal.error)
    assert driver.session.round.stage is Stage.SENDING


@pytest.mark.parametrize(("jitter", "share"), [(0.0, 0.5), (0.5, 0.75), (0.999, 0.9995)])
def test_reminder_is_due_within_the_pause(jitter, share):
    """A reminder is due between half and all of the pause."""
    driver = working().at(100.0, jitter=jitter)
    driver.go(driver.session.happened(rounds.WorkDone(1, 1, ANNOUNCED.nonce, TRANSFER), driver.facts))
    pause_s = (driver.session.remind_at_s - 100.0) / share
    assert pause_s == pytest.approx(2 * limits.REMIND_BASE_S)
    assert driver.tick(driver.session.remind_at_s - 0.001) == ()
    (reminder,) = driver.tick(driver.session.remind_at_s)
    assert reminder == io.SendReminder(PLAN.run_id, 0)
    assert driver.tick(driver.facts.now_s + 0.001) == ()


# ----------------------------------------------------------------------------------------------- uploads and reminders


def test_a_busy_link_puts_the_reminder_off():
    driver = sending().at(jitter=0.5)
    due_s = driver.session.remind_at_s
    assert driver.tick(due_s, busy=True) == ()
    assert driver.session.remind_at_s == due_s + 0.75 * limits.REMIND_BASE_S
    assert driver.tick(driver.session.remind_at_s, busy=False) == (io.SendReminder(PLAN.run_id, 0),)


@pytest.mark.parametrize(("answer", "logged"), [(Action.ACK, []), (Action.REFUSED, [("warning", "too long")])])
def test_answered_upload_is_not_reminded_of(answer, logged):
    driver = sending()
    driver.hear(channels.CONTROL, control(answer))
    assert driver.session.remind_at_s is None
    assert [(line.level, line.facts["reason"]) for line in driver.take(io.Log) if line.level == "warning"] == logged
    assert driver.tick(1e6) == ()


def test_reminders_count_retransmissions():
    """So that the aggregator does not request chunks again that it has requested since."""
    driver = sending(turn=7)
    for _ in range(2):
        driver.tick(driver.session.remind_at_s)
    driver.hear(channels.CONTROL, control(Action.NACK, missing=(1,)))
    driver.tick(driver.session.remind_at_s)
    driver.tell(io.Connected())
    assert [action.turn for action in driver.take(io.SendReminder)] == [7, 7, 8, 9]


def test_requested_chunks_need_no_answer():
    """The aggregator may be quicker than the broker's acknowledgement."""
    driver = sending()
    driver.tick(driver.session.remind_at_s)
    driver.take()
    driver.at(busy=True)
    for _ in range(2):
        driver.hear(channels.CONTROL, control(Action.NACK, missing=(1,)))
    assert driver.take(rounds.Send) == [rounds.Send((1,))], "and the second time it is on its way"


def test_slow_link_gets_one_transmission():
    """The requested chunks, or those that a reminder would be about, are still in flight to the broker."""
    driver = sending().at(busy=True)
    driver.hear(channels.CONTROL, control(Action.NACK, missing=(0, 1)))
    driver.tell(io.Connected())
    assert driver.take(rounds.Send | io.SendReminder) == []


def test_newer_keys_lead_to_a_second_look():
    """Newer keys are followed by receiving keys and a second look."""
    driver = following()
    driver.tell(io.KeysTaken())
    done = driver.take()
    assert done[0] == io.OfferReceivingKeys()
    assert done[-3:] == list(AGAIN)


# -------------------------------------------------------------------------------------------------- keys, roster, disk


def test_another_key_announces_presence():
    """Another broadcast key announces the presence under it."""
    driver = following().at(group=NEXT_GROUP)
    driver.go(driver.session.settled(driver.facts))
    done = driver.take()
    assert done[1:] == [io.PublishPresence(), io.Resubscribe(TopicKind.ROUND), NOTICE]
    driver.go(driver.session.settled(driver.facts))
    assert driver.take() == []


def test_revoked_device_hears_nothing():
    """A revoked device cancels its work and hears nothing."""
    driver = working().at(roster={"listed": False, "sequence": 9})
    assert driver.tell(io.RosterTaken()) == (rounds.CancelWork(),)
    assert not driver.session.works_on(ANNOUNCED)
    assert not any(driver.session.hears(kind) for kind in TopicKind)
    assert driver.tick(1e6) == ()


def test_failing_disk_stops_at_once():
    """A disk that fails while the device works declines and stops at once."""
    driver = working()
    driver.tell(io.DiskFailed())
    assert driver.take() == [rounds.CancelWork(), io.SendDecline(ANNOUNCED, DeclineReason.DISK), io.Stop()]


def test_failing_disk_waits_but_not_long():
    """A disk that fails between rounds waits for the next announcement but not long."""
    driver = following().at(50.0)
    driver.tell(io.DiskFailed())
    assert driver.take() == [rounds.CancelWork()]
    assert [kind for kind in TopicKind if driver.session.hears(kind)] == [TopicKind.ROUND]
    assert driver.tick(50.0 + ANNOUNCED_WITHIN_S - 0.1) == ()
    assert driver.tick(50.0 + ANNOUNCED_WITHIN_S) == (io.Stop(),)
    driver.hear(channels.ANNOUNCEMENT, ANNOUNCED)
    assert driver.take()[-2:] == [io.SendDecline(ANNOUNCED, DeclineReason.DISK), io.Stop()]


# --------------------------------------------------------------------------------------------------------- the summary


def test_summary_says_what_is_waited_for(driver):
    """The summary says what a stuck device waits for in plain values."""
    driver.hear(channels.ANNOUNCEMENT, ANNOUNCED)
    told = driver.session.summary()
    assert json.loads(json.dumps(told)) == told
    assert (told["stage"], told["run"], told["waits_for"]) == ("idle", None, ["plan"])
    assert told["announced"] == {"run": 1, "round": 1}
    told = sending().session.summary()
    assert (told["stage"], told["run"], told["round"], told["waits_for"]) == ("sending", 1, 1, [])


def test_summary_shows_no_secret():
    """No secret is in the summary or the representation."""
    driver = working()
    shown = repr(driver.session) + json.dumps(driver.session.summary())
    for group in (driver.facts.group, NEXT_GROUP):
        assert group.secret.hex() not in shown
        assert repr(group.secret)[2:-1] not in shown


# ------------------------------------------------------------------------------------------------------- interleavings

EVENTS = {
    "announcement": lambda d: d.hear(channels.ANNOUNCEMENT, ANNOUNCED),
    "next announcement": lambda d: d.hear(channels.ANNOUNCEMENT, announcement(2)),
    "run": lambda d: d.tell(io.RunFollowed(PLAN, 1000)),
    "run stored": lambda d: d.tell(io.RunStored()),
    "run refused": lambda d: d.tell(io.RunRefused(PLAN.run_id, DeclineReason.DATA)),
    "late": lambda d: d.tell(io.RunNeedsCheckpoint(PLAN)),
    "located": lambda d: d.tell(rounds.Located(d.session.round.mark.nonce, {"a": b"1" * 16}, {})),
    "model": lambda d: d.tell(rounds.ModelArrived("a", b"1" * 16)),
    "work": lambda d: d.tell(rounds.WorkDone(1, 1, ANNOUNCED.nonce, TRANSFER)),
    "skipped": lambda d: d.tell(io.RoundSkipped(ANNOUNCED, DeclineReason.TASK)),
    "answer": lambda d: d.hear(channels.CONTROL, control()),
    "request": lambda d: d.hear(channels.CONTROL, control(Action.NACK, missing=(1,))),
    "connection": lambda d: d.tell(io.Connected()),
    "keys": lambda d: d.at(keys_since=99).tell(io.KeysTaken()),
    "expiry": lambda d: d.at(roster={"expired": not d.facts.roster.expired}).tick(),
    "disk": lambda d: d.tell(io.DiskFailed()),
    "busy": lambda d: d.at(busy=not d.facts.busy),
    "second": lambda d: d.tick(d.facts.now_s + 1.0),
    "minute": lambda d: d.tick(d.facts.now_s + 60.0),
}


@given(st.lists(st.sampled_from(sorted(EVENTS)), max_size=40))
def test_any_interleaving_keeps_the_rules(names):
    """Nothing raises; subscriptions match; an upload is sent for work that was done; a stopped device starts none."""
    driver, followed, done_work = Driver(), set(), False
    for name in names:
        stopped = driver.session.stopped
        EVENTS[name](driver)
        done_work |= name == "work"
        for action in driver.take():
            match action:
                case io.Subscribe(TopicKind.MODEL, label):
                    assert label not in followed
                    followed.add(label)
                case io.Unsubscribe(TopicKind.MODEL, label):
                    followed.remove(label)
                case rounds.Send() | io.SendReminder():
                    assert done_work
                case rounds.Work():
                    assert not (stopped and name.endswith("announcement"))
        assert followed == set(driver.session.labels)
        assert json.dumps(driver.session.summary())
        if driver.session.remind_at_s is not None:
            assert driver.session.round.stage is Stage.SENDING


# ------------------------------------------------------------------------------------------------------------- notices


def notice(order=RunOrder.PAUSED, *, sequence=5, choice=b"", fleet="demo"):
    return Notice(fleet=fleet, sequence=sequence, sent_at_s=1000, run=1, run_id=b"r" * 16, order=order, choice=choice)


def test_order_is_known_until_another_comes():
    """A notice that the broker repeats, or one of another fleet, has no effect."""
    driver = following()
    assert driver.session.order == ""
    done = driver.hear(channels.NOTICE, notice())
    assert [a.text for a in done if isinstance(a, io.Log)] == ["run 1 is paused by the owner"]
    assert io.PublishStatus() in done
    assert driver.session.summary()["order"] == "run 1 is paused by the owner"
    driver.hear(channels.NOTICE, notice(RunOrder.NONE, sequence=6))
    assert driver.session.order == ""
    driver.hear(channels.NOTICE, notice(RunOrder.STOPPED, sequence=7))
    assert driver.hear(channels.NOTICE, notice()) == ()
    (refused,) = driver.hear(channels.NOTICE, notice(fleet="other", sequence=8))
    assert isinstance(refused.error, UntrustedError)
    assert driver.session.order == "run 1 is stopped by the owner"


def test_choice_is_taken_when_it_changes():
    """A choice of models is taken when it changes."""
    driver = following()
    assert io.TakeNotice(1000, b"first") in driver.hear(channels.NOTICE, notice(choice=b"first"))
    again = driver.hear(channels.NOTICE, notice(choice=b"first"))
    assert again == (io.TakeNotice(1000), io.PublishStatus()), "clocks are compared each time"
    assert io.TakeNotice(1000, b"second") in driver.hear(channels.NOTICE, notice(choice=b"second", sequence=6))
