"""A device that is online and never answers costs a few deadlines, and not one in each round."""

import pytest
from shoal_lab.loopback.transport import Hop

from aggregator.rounds.state import NOT_WAITED_FOR, SILENT_ROUNDS
from tests.helpers.fleets import (
    make_fleet,
    names,
    restart_aggregator,
)

DEADLINE_S = 60


@pytest.mark.parametrize("place", [0, pytest.param(5, marks=pytest.mark.long), pytest.param(9, marks=pytest.mark.long)])
def test_one_of_ten_is_silent_for_ever(tmp_path, place, caplog, tap):
    """Ten devices of which one is silent for ever."""
    silent = names(10)[place]
    with make_fleet(tmp_path, count=10, rounds=10, min_contributors=3, faults=tap, deadline_s=DEADLINE_S) as fleet:
        tap.lose(client=fleet.client_id(silent), ending="/up")
        records = fleet.run(2000)
        assert fleet.now_s < (SILENT_ROUNDS + 1) * DEADLINE_S
    assert len(records) == 11
    events = [e for r in records for e in r["events"] if e["kind"] == NOT_WAITED_FOR]
    assert [(e["round"], e["device"]) for e in events] == [(SILENT_ROUNDS, silent)]
    assert NOT_WAITED_FOR in caplog.text


def test_device_that_answers_is_waited_for(tmp_path, tap):
    """A device that answers again is waited for again also after a restart."""
    silent = "dev-04"
    with make_fleet(tmp_path, count=5, rounds=9, min_contributors=3, faults=tap, deadline_s=DEADLINE_S) as fleet:
        rule = tap.lose(client=fleet.client_id(silent), ending="/up")
        fleet.run_until(lambda: fleet.closed() >= SILENT_ROUNDS + 1, 1000)
        before = fleet.service.state.silent
        assert list(before) == [silent]
        assert before[silent] >= SILENT_ROUNDS
        restart_aggregator(fleet)
        assert fleet.service.state.silent == before
        tap.forgive(rule)
        records = fleet.run(2000)
        assert fleet.service.state.silent == {}
        assert silent in records[-1]["device_accuracy"]


@pytest.mark.parametrize(
    ("count", "least", "mute"),
    [(3, 2, 1), pytest.param(4, 3, 1, marks=pytest.mark.long), pytest.param(7, 3, 4, marks=pytest.mark.long)],
)
def test_small_fleet_silent_from_round_1(tmp_path, count, least, mute, tap):
    """The quorum needs them, so no round closes before its third deadline; later rounds don't wait."""
    silent = names(count)[-mute:]
    with make_fleet(
        tmp_path, count=count, rounds=4, quorum=0.8, min_contributors=least, faults=tap, deadline_s=DEADLINE_S
    ) as fleet:
        for name in silent:
            tap.lose(client=fleet.client_id(name), ending="/up")
        fleet.run_until(lambda: fleet.now_s > (SILENT_ROUNDS - 1) * DEADLINE_S, 1000)
        assert fleet.closed() == 0
        fleet.run_until(lambda: fleet.closed() >= 1, 1000)
        assert fleet.service.facts().not_waited_for == tuple(silent)
        records = fleet.run(1000)
        assert fleet.now_s < (SILENT_ROUNDS + 1) * DEADLINE_S
    assert [r["contributed"] for r in records] == [count - mute] * 5
    events = [e for r in records for e in r["events"] if e["kind"] == NOT_WAITED_FOR]
    assert [(e["round"], e["device"]) for e in events] == [(1, name) for name in silent]


def test_needed_silent_device_is_waited_for(tmp_path, tap):
    """No round goes on without a silent device that a mean needs."""
    silent = "dev-01"
    with make_fleet(tmp_path, count=3, rounds=3, min_contributors=3, faults=tap, deadline_s=DEADLINE_S) as fleet:
        rule = tap.lose(client=fleet.client_id(silent), ending="/up")
        fleet.run_until(lambda: fleet.now_s > 10 * DEADLINE_S, 1000)
        assert fleet.closed() == 0
        assert fleet.service.facts().waiting == (silent,)
        tap.forgive(rule)
        assert fleet.run(1000)[-1]["contributed"] == 3


def test_slow_devices_are_not_silent(tmp_path, tap):
    """Each upload takes four deadlines: none has answered by then, so none is left behind."""
    tap.delay(4.5 * DEADLINE_S, hop=Hop.UP, ending="/up")
    with make_fleet(tmp_path, count=5, rounds=2, min_contributors=2, faults=tap, deadline_s=DEADLINE_S) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 1, 4000)
        assert fleet.service.state.silent == {}
        assert fleet.run(8000)[-1]["contributed"] >= 4
