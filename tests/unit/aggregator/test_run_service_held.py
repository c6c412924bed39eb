"""A run under round keys on the real service: the models that devices hold stay the same on all, through any restart."""

import numpy as np
import pytest

from aggregator.rounds import held_models
from shoal.protocol.states import StateId
from tests.helpers.round_devices import RoundFleet


@pytest.fixture
def fleet(tmp_path):
    made = RoundFleet(tmp_path, 5)
    yield made
    made.service.close()


def digests(fleet, *names):
    """Return the sets of state digests that the devices hold: one if all hold the same."""
    return {tuple(sorted(fleet.devices[n].states.digests().items())) for n in names or fleet.devices}


def test_all_devices_hold_the_same_model_to_the_last_bit(fleet):
    fleet.come(*fleet.devices)
    fleet.finish()
    assert len(digests(fleet)) == 1
    (state,) = fleet.devices["dev-1"].states.held.values()
    assert (state.id.model, state.id.round) == (0, 6)
    records = fleet.records()
    assert [r["contributed"] for r in records] == [5] * 7
    mean = np.mean([d.target for d in fleet.devices.values()], axis=0)
    theta = fleet.origins[0]
    for _ in range(6):
        theta = theta + 0.2 * (mean - theta)
    np.testing.assert_allclose(state.theta, theta, atol=1e-5)


def test_the_announcements_and_digests_are_the_same_with_a_restart_before_every_commit_and_after_it(tmp_path):
    """The aggregator is killed with uploads that came and are not durable, then when some of them are."""
    plain, killed = RoundFleet(tmp_path / "plain", 3), RoundFleet(tmp_path / "killed", 3)
    plain.come(*plain.devices)
    killed.come(*killed.devices)
    while not plain.service.finished:
        plain.round()
        announcement = killed.announcement
        killed.devices["dev-1"].answer(announcement)
        killed.kill()
        assert killed.announcement.held.offers == announcement.held.offers
        assert [s.step for s in killed.announcement.held.steps] == [s.step for s in announcement.held.steps]
        assert killed.announcement.held.statements == announcement.held.statements
        assert [c.state for c in killed.announcement.held.checkpoints] == [
            c.state for c in announcement.held.checkpoints
        ]
        assert killed.announcement.assignments == announcement.assignments
        killed.devices["dev-1"].uploaded.remove(announcement.round)  # it was never acknowledged
        for name in ("dev-1", "dev-2"):
            killed.answer(name)
            killed.kill()
        killed.answer("dev-3")
        if not killed.service.finished:
            killed.kill()
    theta = {name: fleet.devices["dev-1"].states.held for name, fleet in (("plain", plain), ("killed", killed))}
    assert {i: s.theta.tobytes() for i, s in theta["plain"].items()} == {
        i: s.theta.tobytes() for i, s in theta["killed"].items()
    }
    assert len(digests(killed)) == 1
    assert [r["contributed"] for r in killed.records()] == [3] * 7
    for fleet in (plain, killed):
        fleet.service.close()


def test_a_device_with_another_bit_is_left_out_recorded_and_takes_a_checkpoint(fleet):
    fleet.come(*fleet.devices)
    fleet.round()
    fleet.round()
    fleet.answer("dev-1", "dev-2", "dev-4", "dev-5")
    fleet.devices["dev-3"].follow(fleet.announcement)
    fleet.devices["dev-3"].damage()
    fleet.answer("dev-3")
    assert fleet.records()[2]["out_of_step"] == {"dev-3": 0}
    fleet.finish()
    assert fleet.records()[-1]["out_of_step"] == {}
    assert fleet.records()[-1]["contributed"] == 5
    assert len(digests(fleet)) == 1


@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
def test_a_device_that_was_away_comes_back_through_means_or_a_checkpoint(tmp_path, rounds):
    fleet = RoundFleet(tmp_path, 4, rounds=10)
    fleet.come(*fleet.devices)
    fleet.round()
    fleet.leave("dev-2")
    for _ in range(rounds):
        fleet.round()
    fleet.come("dev-2")
    fleet.finish()
    away = [r["round"] for r in fleet.records() if "dev-2" not in r["norms"]]
    # The round that is open when it comes back, and, after more than two missed ones, the round that orders a checkpoint.
    assert away[:rounds] == list(range(2, 2 + rounds))
    assert len(away) <= rounds + 2
    assert fleet.records()[-1]["contributed"] == 4
    assert not fleet.devices["dev-2"].declined
    assert len(digests(fleet)) == 1
    fleet.service.close()


def test_with_participation_every_drawn_device_gets_its_model(tmp_path):
    fleet = RoundFleet(tmp_path, 5, participation=0.4, rounds=12)
    fleet.come(*fleet.devices)
    fleet.finish()
    assert [r["contributed"] for r in fleet.records()] == [2] * 12 + [5]
    assert [r["declined"] for r in fleet.records()] == [{}] * 13
    assert all(r["out_of_step"] == {} for r in fleet.records())
    assert len(digests(fleet)) == 1
    fleet.service.close()


def test_a_newer_key_version_takes_effect_with_the_next_announcement(fleet):
    fleet.come(*fleet.devices)
    fleet.round()
    first = fleet.plan.key_version
    fleet.answer("dev-1", "dev-2")
    version = fleet.rotate()
    # The open round goes on under its own version.
    assert fleet.service.state.round == 2
    assert fleet.service.state.held.key_version == first
    fleet.answer("dev-3", "dev-4", "dev-5")
    assert fleet.announcement.held.key_version == version
    assert fleet.records()[1]["contributed"] == 5
    fleet.kill()
    assert fleet.announcement.held.key_version == version
    fleet.finish()
    assert [r["contributed"] for r in fleet.records()] == [5] * 7
    assert len(digests(fleet)) == 1


def two_groups(fleet):
    """Give dev-1 to dev-3 one target and the others its opposite."""
    for name, device in fleet.devices.items():
        device.target = fleet.origins[0] if name < "dev-4" else fleet.origins[1]


def test_devices_of_two_clusters_hold_the_same_models(tmp_path):
    fleet = RoundFleet(tmp_path, 5, origins=2, algorithm="ifca", settings={"k": 2})
    two_groups(fleet)
    fleet.come(*fleet.devices)
    fleet.finish()
    assert fleet.records()[-1]["clusters"] == dict.fromkeys(("dev-1", "dev-2", "dev-3"), 0) | {"dev-4": 1, "dev-5": 1}
    assert len(digests(fleet)) == 1
    assert all(r["out_of_step"] == {} for r in fleet.records())
    fleet.service.close()


def test_a_cluster_whose_devices_missed_the_last_mean_goes_back_to_its_checkpoint(tmp_path, monkeypatch):
    monkeypatch.setattr(held_models, "CHECKPOINT_EVERY", 1)
    settings = {"k": 2, "stable_rounds": 1, "probe_every": 1000}
    fleet = RoundFleet(tmp_path, 5, origins=2, algorithm="ifca", settings=settings, rounds=14)
    two_groups(fleet)
    fleet.come(*fleet.devices)
    for _ in range(4):
        fleet.round()
    assert fleet.service.state.round == 5
    fleet.answer("dev-4", "dev-5")
    fleet.leave("dev-4", "dev-5")
    for _ in range(4):
        fleet.round()
    fleet.come("dev-4", "dev-5")
    fleet.kill()
    fleet.finish()
    records = fleet.records()
    found = [e for r in records for e in r["events"] if e["kind"] == "model_went_back"]
    assert [(e["model"], e["to"]) for e in found] == [(1, 4)]
    assert records[-1]["contributed"] == 5
    assert len(digests(fleet, "dev-4", "dev-5")) == 1
    assert fleet.devices["dev-4"].declined == []
    fleet.service.close()


def test_a_newcomer_takes_a_checkpoint_and_trains(tmp_path):
    """Its presence comes after the first round, so it has no origin; the owner has drawn a version for it."""
    fleet = RoundFleet(tmp_path, 4, rounds=8)
    late = fleet.devices["dev-4"]
    late.states = late.states.keep(())
    fleet.come("dev-1", "dev-2", "dev-3")
    fleet.now_s += 30
    fleet.service.tick(fleet.now_s)
    fleet.round()
    fleet.round()
    fleet.come("dev-4")
    fleet.finish()
    # The aggregator can't know that it never had the origin: it declines once, and gets a checkpoint sealed after that.
    assert len(late.declined) <= 1
    assert fleet.records()[-1]["contributed"] == 4
    assert len(digests(fleet)) == 1
    fleet.service.close()


def test_the_final_checkpoints_stay_on_the_broker_and_on_disk(fleet):
    fleet.come(*fleet.devices)
    fleet.finish()
    (checkpoint,) = fleet.announcement.held.checkpoints
    assert (checkpoint.state, checkpoint.round) == (StateId(0, 6), 7)
    assert fleet.at(checkpoint.label) is not None
    assert fleet.announcement.finished
    assert len(fleet.announcement.held.statements) == 2
    directory = fleet.parties.server.directory / "run-000001"
    assert len(list(directory.glob("vectors/*/*.sealed"))) == 1
    fleet.kill()
    assert fleet.service.finished
    assert fleet.at(fleet.announcement.held.checkpoints[0].label) is not None
