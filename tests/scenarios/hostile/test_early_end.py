"""An aggregator that ends a run without the owner's order: the run has fewer rounds, and nothing follows it."""

import dataclasses

import pytest

from edge_client.storage.finished_models import FinishedModels
from shoal.protocol.requests import RequestAction
from tests.helpers.cases import with_long
from tests.helpers.fleets import announce, announcements, make_exact_fleet, reasons, thetas, uploads_of

ROUNDS = 6


@pytest.fixture
def ended(tmp_path, tap, caplog):
    """A fleet whose run was ended after two rounds, and whose aggregator is now an attacker."""
    with make_exact_fleet(tmp_path, faults=tap, rounds=ROUNDS) as fleet:
        fleet.run_until(lambda: fleet.closed() == 2, 60)
        fleet.ask(RequestAction.STOP, 1)
        fleet.run(60)
        fleet.kill_aggregator()
        caplog.clear()
        yield fleet


def standing(fleet, tap):
    """Return the models of all devices, and how many uploads each has sent."""
    finished = {n: FinishedModels(fleet.stage.device_dir(n)).standing().models for n in fleet.stage.devices}
    return thetas(fleet), finished, [len(uploads_of(fleet, tap, n)) for n in fleet.stage.devices]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"round": 3, "finished": False}, "announced after run 1 round 7"),
        ({"round": ROUNDS, "finished": False}, "announced after run 1 round 7"),
        ({"round": ROUNDS + 1}, "announced twice, differently"),
        ({"round": ROUNDS + 2}, f"round {ROUNDS + 2} of a run of {ROUNDS}"),
        ({"round": ROUNDS + 2, "finished": False}, f"round {ROUNDS + 2} of a run of {ROUNDS}"),
    ],
)
@pytest.mark.parametrize("restarted", with_long([False, True], True))
def test_nothing_follows_the_final_round(ended, tap, caplog, changes, reason, restarted):
    last = announcements(ended, tap)[-1]
    assert (last.finished, last.round) == (True, ROUNDS + 1)
    before = standing(ended, tap)
    if restarted:
        for name in ended.stage.devices:
            ended.kill_device(name)
            ended.revive_device(name)
        ended.settle()
    # A round of training as the attacker would announce it: the first one of this run, under another number.
    base = last if changes.get("finished", True) else announcements(ended, tap)[0]
    announce(ended, dataclasses.replace(base, nonce=b"\7" * 16, **changes))
    ended.settle()
    assert standing(ended, tap) == before
    assert any(reason in told for told in reasons(caplog)), reasons(caplog)


@pytest.mark.parametrize("round_", [1, 3, ROUNDS])
def test_no_other_round_is_a_final_one(tmp_path, tap, caplog, round_):
    """A round with another number than the plan's last and one more is refused as a final round."""
    with make_exact_fleet(tmp_path, faults=tap, rounds=ROUNDS) as fleet:
        fleet.run_until(lambda: fleet.closed() == 1, 60)
        fleet.kill_aggregator()
        caplog.clear()
        announce(fleet, dataclasses.replace(announcements(fleet, tap)[-1], round=round_, finished=True))
        fleet.settle()
        assert all(not FinishedModels(fleet.stage.device_dir(n)).standing().models for n in fleet.stage.devices)
        assert reasons(caplog)
