"""What the log says of a run: new things at once, the same ever more seldom, and clusters that learn nothing."""

import dataclasses
import logging

import pytest

from aggregator.rounds.standstill import MOVES_AGAIN, STANDS_STILL
from aggregator.rounds.state import DeadlinePassed, Order, Ordered, RoundRecord, WentOffline
from aggregator.run_log import BROKER_LOST, MOST_PAUSE_S, RunLog, declined_by, too_small, waiting_for
from tests.helpers.engines import give, opened
from tests.helpers.plans import run_plan


@pytest.fixture(autouse=True)
def everything(caplog):
    caplog.set_level(logging.INFO, "shoal.aggregator")


@pytest.fixture
def lines():
    return RunLog(run_plan())


def test_same_line_after_doubling_pauses(caplog):
    """The same line comes after pauses that double."""
    _, state = opened()
    lines, said = RunLog(run_plan()), []
    for tick in range(4 * 400):
        before = len(caplog.records)
        lines.waiting(state, tick / 4)
        if len(caplog.records) > before:
            said.append(tick / 4)
    assert said == [3, 6, 12, 24, 48, 96, 156, 216, 276, 336, 396]
    assert MOST_PAUSE_S == 60


def test_another_line_comes_at_once(caplog, lines):
    engine, state = opened()
    for second in range(100):
        lines.waiting(state, second)
    state, _ = give(engine, state, "dev-1")
    caplog.clear()
    for second in range(100, 104):
        lines.waiting(state, second)
    (record,) = caplog.records
    assert record.getMessage().startswith("round 1: 1 of 5")


def test_new_round_says_nothing_yet(caplog, lines):
    """A round that has just opened says nothing yet."""
    _, state = opened()
    for second in range(50):
        lines.opened(second)
        lines.waiting(state, second + 2.9)
    assert not caplog.records


def test_line_lasts_until_the_run_goes_on(lines):
    engine, state = opened()
    lines.opened(0)
    for second in range(100):
        lines.waiting(state, second)
    assert lines.line.startswith("round 1: 0 of 5")
    state, _ = give(engine, state, "dev-1")
    lines.waiting(state, 103)
    assert lines.line.startswith("round 1: 1 of 5")
    lines.opened(200)
    assert lines.line == ""


def closed(round_, clusters):
    return RoundRecord(round_, False, 5, 5, (), 1.0, 0, 0, {}, clusters, (), {})


def warned(caplog):
    return [r.kv for r in caplog.records if r.levelno == logging.WARNING]


def test_out_of_step_is_told_once(caplog, lines):
    """A device out of step is named when it falls out and not again while it stays."""
    for round_, apart in enumerate([{"dev-1": 0}, {"dev-1": 0}, {}, {"dev-1": 3, "dev-2": 0}], 1):
        lines.closed(dataclasses.replace(closed(round_, {}), out_of_step=apart), 1.0, 10)
    assert [w["devices"] for w in warned(caplog)] == ["dev-1 (model 0)", "dev-1 (model 3), dev-2 (model 0)"]


def test_waiting_for_a_checkpoint_is_told():
    """A device that waits for a checkpoint is named with its reason."""
    assert declined_by({"dev-1": "state"}) == "waits for a checkpoint: dev-1"


def test_standstill_is_a_warning(caplog, lines):
    """A cluster that stands still is a warning with reason and hint and its end is none."""
    begun = {"round": 3, "kind": STANDS_STILL, "cluster": 1, "reason": "it has 2 devices", "hint": "add devices"}
    ended = {"round": 5, "kind": MOVES_AGAIN, "cluster": 1, "rounds": 4}
    for round_, events in ((3, (begun,)), (4, ()), (5, (ended,))):
        lines.closed(dataclasses.replace(closed(round_, {}), events=events), 1.0, 10)
    (warning,) = warned(caplog)
    assert warning == {k: v for k, v in begun.items() if k != "kind"}
    assert [r.getMessage() for r in caplog.records].count(MOVES_AGAIN) == 1


@pytest.mark.parametrize(("least", "expected"), [(1, ()), (2, (7,)), (3, (1, 7)), (9, (0, 1, 7))])
def test_which_clusters_are_too_small(least, expected):
    assert too_small(dict(zip("abcdef", (0, 0, 0, 1, 1, 7), strict=True)), least) == expected


def test_nobody_answers_says_where_to_look():
    """Where nobody answers by the deadline the line says where to look."""
    engine, state = opened()
    state, _ = engine.handle(state, DeadlinePassed(1))
    assert waiting_for(state).startswith(
        "round 1: none of 5 has answered; a device that refuses a round logs the reason"
    )
    state, _ = give(engine, state, "dev-1")
    assert waiting_for(state).startswith("round 1: 1 of 5")


def test_each_limit_is_told_once(caplog, lines):
    """Each limit is told once for a device with what to do."""
    for round_ in range(1, 6):
        record = dataclasses.replace(closed(round_, {}), capped={"dev-1": 30.0}, refused_norm={"dev-2": 123.456})
        lines.closed(record, 1.0, 10)
    weights, norms = warned(caplog)
    assert weights["weights"] == "dev-1 (30)"
    assert "--weight-cap" in weights["hint"]
    assert norms["norms"] == "dev-2 (123)"
    assert "shoal-fleet revoke" in norms["hint"]
    lines.closed(dataclasses.replace(closed(6, {}), refused_norm={"dev-2": 9.0, "dev-3": 8.0}), 1.0, 10)
    assert warned(caplog)[2]["norms"] == "dev-3 (8)"


@pytest.mark.parametrize(
    ("facts", "name", "line", "hint"),
    [
        ({"rounds": 3, "robust": "filter"}, "devices", "dev-1", "check these devices' labels"),
        ({"cluster": 0, "margin": -5.0, "others": 0.0712}, "margins", "dev-1 (-5, the others 0.0712)", "revoke"),
    ],
    ids=["updates", "a margin against all others"],
)
def test_standing_apart_is_told(caplog, facts, name, line, hint):
    """A device that stands apart is told with what to do."""
    event = {"round": 3, "kind": "stands-apart", "device": "dev-1", **facts}
    RunLog(run_plan(robust="filter")).closed(dataclasses.replace(closed(3, {}), events=(event,)), 1.0, 10)
    (told,) = warned(caplog)
    assert (told[name], told["round"], told.get("robust")) == (line, 3, facts.get("robust"))
    assert hint in told["hint"]


def test_missing_since_it_went():
    """Rounds without it may close within seconds for hours, until one more device is missing."""
    clock = iter(range(1_000_000_000, 1_000_010_000, 100))
    engine, state = opened(min_contributors=5, quorum=1.0)
    lines = RunLog(run_plan(), clock=lambda: next(clock))
    lines.left("dev-5")  # 1_000_000_000 s
    lines.opened(0)
    state, _ = engine.handle(state, WentOffline("dev-5"))
    state, _ = give(engine, state, "dev-1", "dev-2", "dev-3")
    state, _ = engine.handle(state, DeadlinePassed(1))
    lines.waiting(state, 10)
    assert lines.figures["missing"] == [
        {"device": "dev-4", "since": "2001-09-09T01:48:20Z"},  # there, and silent since the round opened
        {"device": "dev-5", "since": "2001-09-09T01:46:40Z"},
    ]
    assert lines.figures["deadline_passed_at"] == "2001-09-09T01:50:00Z"
    assert (lines.figures["here"], lines.figures["needed"]) == (3, 5)
    lines.came("dev-5")
    lines.opened(20)
    assert lines.figures == {}


def test_lost_connection_waits_for_broker(lines):
    """It named the devices whose uploads could not arrive, and after the deadline said to start them again."""
    engine, state = opened()
    late, _ = engine.handle(state, DeadlinePassed(state.round))
    for second in range(10):
        lines.waiting(late, second, lost=True)
    assert (lines.line, lines.figures) == (BROKER_LOST, {})
    for second in range(10, 20):
        lines.waiting(late, second)
    assert "dev-1" in lines.line


def test_line_says_who_paused_the_run():
    """The line says who has paused or stopped the run."""
    engine, state = opened()
    state, _ = engine.handle(state, Ordered(Order.PAUSE))
    assert waiting_for(state).endswith("; paused by the owner after this round")
    state, _ = give(engine, state, *state.waiting)
    assert waiting_for(state) == "round 1: paused by the owner"
    state, _ = engine.handle(state, Ordered(Order.STOP))
    assert "owner" not in waiting_for(state)  # the final round is open
