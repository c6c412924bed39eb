"""A run on the real service: the models that devices hold stay the same on all, through any restart."""

from contextlib import ExitStack

import numpy as np
import pytest

from aggregator.rounds import missing_states
from shoal.protocol.documents import SegmentSpec
from shoal.protocol.states import StateId
from tests.unit.aggregator.round_devices import RoundFleet


@pytest.fixture
def begun(tmp_path):
    """Return a function that makes a fleet, whose devices are online unless ``here`` names some."""
    with ExitStack() as stack:

        def begin(count, root=tmp_path, here=(), **plan):
            fleet = RoundFleet(root, count, **plan)
            stack.callback(lambda: fleet.service.close())
            fleet.come(*(here or fleet.devices))
            return fleet

        yield begin


@pytest.fixture
def fleet(begun):
    """Five devices, all of them online."""
    return begun(5)


def finished(fleet, *names):
    """Finish the run and return its records; all devices, or those of these names, hold the same models then."""
    fleet.finish()
    held = {tuple(sorted(fleet.devices[n].states.digests().items())) for n in names or fleet.devices}
    assert len(held) == 1
    return fleet.records()


def steps_of(announcement):
    return [kept.step for kept in announcement.held.steps]


def test_all_hold_the_same_model(fleet):
    """All devices hold the same model to the last bit."""
    records = finished(fleet)
    (state,) = fleet.devices["dev-1"].states.held.values()
    assert (state.id.model, state.id.round) == (0, 6)
    assert [r["contributed"] for r in records] == [5] * 7
    mean = np.mean([d.target for d in fleet.devices.values()], axis=0)
    theta = fleet.origins[0]
    for _ in range(6):
        theta = theta + 0.2 * (mean - theta)
    np.testing.assert_allclose(state.theta, theta, atol=1e-5)


@pytest.mark.slow
def test_restarts_change_no_announcement(begun, tmp_path):
    """The aggregator is killed with uploads that came and are not durable, then when some of them are."""
    plain, killed = (begun(3, tmp_path / name) for name in ("plain", "killed"))
    while not plain.service.finished:
        plain.round()
        announcement = killed.announcement
        killed.devices["dev-1"].answer(announcement)
        killed.kill()
        assert killed.announcement.held.offers == announcement.held.offers
        assert steps_of(killed.announcement) == steps_of(announcement)
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
    theta = [{i: s.theta.tobytes() for i, s in f.devices["dev-1"].states.held.items()} for f in (plain, killed)]
    assert theta[0] == theta[1]
    assert [r["contributed"] for r in finished(killed)] == [3] * 7


def test_another_bit_leads_to_a_checkpoint(fleet):
    """A device with another bit is left out recorded and takes a checkpoint."""
    fleet.round()
    fleet.round()
    fleet.answer("dev-1", "dev-2", "dev-4", "dev-5")
    fleet.devices["dev-3"].follow(fleet.announcement)
    fleet.devices["dev-3"].damage()
    fleet.answer("dev-3")
    assert fleet.records()[2]["out_of_step"] == {"dev-3": 0}
    records = finished(fleet)
    assert (records[-1]["out_of_step"], records[-1]["contributed"]) == ({}, 5)


@pytest.mark.parametrize("rounds", [1, 2, 3, 5])
def test_away_device_comes_back(begun, rounds):
    """A device that was away comes back through means or a checkpoint."""
    fleet = begun(4, rounds=10)
    fleet.round()
    fleet.leave("dev-2")
    for _ in range(rounds):
        fleet.round()
    fleet.come("dev-2")
    records = finished(fleet)
    away = [r["round"] for r in records if "dev-2" not in r["norms"]]
    # The round that is open when it comes back, and, after more than two missed ones, the round that orders a checkpoint.
    assert away[:rounds] == list(range(2, 2 + rounds))
    assert len(away) <= rounds + 2
    assert records[-1]["contributed"] == 4
    assert not fleet.devices["dev-2"].declined


def test_drawn_devices_get_their_model(begun):
    """With participation every drawn device gets its model."""
    fleet = begun(5, participation=0.4, rounds=12)
    records = finished(fleet)
    assert [r["contributed"] for r in records] == [2] * 12 + [5]
    assert [r["declined"] for r in records] == [{}] * 13
    assert all(r["out_of_step"] == {} for r in records)


def test_newer_version_at_next_announcement(fleet):
    """A newer key version takes effect with the next announcement."""
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
    records = finished(fleet)
    assert [r["contributed"] for r in records] == [5] * 7


def two_groups(fleet):
    """Give dev-1 to dev-3 one target and the others its opposite."""
    for name, device in fleet.devices.items():
        device.target = fleet.origins[0] if name < "dev-4" else fleet.origins[1]


def test_clusters_devices_hold_its_model(begun):
    """Devices of two clusters hold the same models."""
    fleet = begun(5, origins=2, algorithm="ifca", settings={"k": 2})
    two_groups(fleet)
    records = finished(fleet)
    assert records[-1]["clusters"] == dict.fromkeys(("dev-1", "dev-2", "dev-3"), 0) | {"dev-4": 1, "dev-5": 1}
    assert all(r["out_of_step"] == {} for r in records)


@pytest.mark.slow
def test_missed_last_mean_is_made_up_for(begun, monkeypatch):
    """A cluster whose devices missed its last mean makes up for it however late."""
    monkeypatch.setattr(missing_states, "CHECKPOINT_EVERY", 1)
    settings = {"k": 2, "stable_rounds": 1, "probe_every": 1000}
    fleet = begun(5, origins=2, algorithm="ifca", settings=settings, rounds=14)
    two_groups(fleet)
    for _ in range(4):
        fleet.round()
    assert fleet.service.state.round == 5
    fleet.answer("dev-4", "dev-5")
    fleet.leave("dev-4", "dev-5")
    for _ in range(4):
        fleet.round()
    fleet.come("dev-4", "dev-5")
    fleet.kill()
    records = finished(fleet, "dev-4", "dev-5")
    assert not [e for r in records for e in r["events"] if e["kind"] == "model_went_back"]
    assert records[-1]["contributed"] == 5
    assert fleet.devices["dev-4"].declined == []


def test_newcomer_trains_from_a_checkpoint(begun):
    """Its presence comes after the first round, so it has no origin; the owner has drawn a version for it."""
    fleet = begun(4, rounds=8, here=("dev-1", "dev-2", "dev-3"))
    late = fleet.devices["dev-4"]
    late.states = late.states.keep(())
    fleet.now_s += 30
    fleet.service.tick(fleet.now_s)
    fleet.round()
    fleet.round()
    fleet.come("dev-4")
    records = finished(fleet)
    # The aggregator can't know that it never had the origin: it declines once, and gets a checkpoint sealed after that.
    assert len(late.declined) <= 1
    assert records[-1]["contributed"] == 4


def test_final_checkpoints_stay(fleet):
    """The final checkpoints stay on the broker and on disk."""
    fleet.finish()
    (checkpoint,) = fleet.announcement.held.checkpoints
    assert (checkpoint.state, checkpoint.round) == (StateId(0, 6), 7)
    assert fleet.at(checkpoint.label) is not None
    assert fleet.announcement.finished
    assert len(fleet.announcement.held.statements) == 2
    directory = fleet.parties.server.directory / "run-000001"
    assert len(list(directory.glob("vectors/*.sealed"))) == 3
    fleet.kill()
    assert fleet.service.finished
    assert fleet.at(fleet.announcement.held.checkpoints[0].label) is not None


class Crash(Exception):  # noqa: N818 - stands for the end of the process
    """The process ends here."""


def end(*_args, **_options):
    raise Crash


@pytest.mark.parametrize("at", ["snapshot", "after the snapshot"])
def test_crash_around_the_next_snapshot(fleet, monkeypatch, at):
    """After a complete round the next one is announced before its snapshot is durable."""
    for round_ in (1, 2, 3):
        fleet.answer("dev-1", "dev-2", "dev-3", "dev-4")
        real = fleet.service._store.snapshot

        def crash(*args, real=real, **options):
            if at != "snapshot":
                real(*args, **options)
            raise Crash

        monkeypatch.setattr(fleet.service._store, "snapshot", crash)
        with pytest.raises(Crash):
            fleet.answer("dev-5")
        announced = fleet.announcement
        assert announced.round == round_ + 1
        fleet.kill()
        assert (fleet.announcement.round, fleet.announcement.nonce) == (announced.round, announced.nonce)
        assert fleet.announcement.held.offers == announced.held.offers
        assert steps_of(fleet.announcement) == steps_of(announced)
    records = finished(fleet)
    assert [r["contributed"] for r in records] == [5] * 7


def test_crash_before_the_final_record(fleet, monkeypatch):
    """A crash between the final announcement and its record loses no checkpoint."""
    for _ in range(6):
        fleet.round()
    fleet.answer("dev-1", "dev-2", "dev-3", "dev-4")

    monkeypatch.setattr(fleet.service._store, "snapshot", end)
    with pytest.raises(Crash):
        fleet.answer("dev-5")
    fleet.kill()
    assert fleet.service.finished
    (checkpoint,) = fleet.announcement.held.checkpoints
    assert (checkpoint.state, checkpoint.round) == (StateId(0, 6), 7)
    assert fleet.records()[-1]["contributed"] == 5


def test_crash_after_the_keys_have_turned(fleet, monkeypatch):
    """A crash after the keys have turned leaves the round under the newer version."""
    fleet.round()
    fleet.answer("dev-1", "dev-2", "dev-3", "dev-4")
    version = fleet.rotate()

    monkeypatch.setattr(fleet.service._publisher, "open_round", end)
    with pytest.raises(Crash):
        fleet.answer("dev-5")
    fleet.kill()
    assert (fleet.announcement.round, fleet.announcement.held.key_version) == (3, version)
    finished(fleet)


def test_round_waits_for_the_rosters_keys(fleet):
    """A round waits for the keys that the newest roster names."""
    fleet.round()
    fleet.rotate(deliver=False)
    fleet.answer()
    assert fleet.service.state.plan is None
    assert "the newer ones have not arrived yet" in fleet.service.status()
    fleet.now_s += 100
    fleet.service.tick(fleet.now_s)
    assert fleet.service.state.plan is None
    fleet.deliver()
    assert fleet.service.state.round == 3
    finished(fleet)


def test_revoked_device_certifies_nothing(fleet):
    """A revoked device is not in the next round and certifies nothing."""
    fleet.round()
    fleet.here.discard("dev-5")
    fleet.rotate("dev-5")
    records = finished(fleet, "dev-1", "dev-2", "dev-3", "dev-4")
    assert [r["contributed"] for r in records][2:] == [4] * 5
    assert "dev-5" not in fleet.service.state.devices


SHARING = {"segments": (SegmentSpec("shared", 4), SegmentSpec("cluster", 2)), "origins": 2}
SPLITS = {"form": "absolute", "eps1": 0.05, "eps2": 0.2, "cool_down": 0}
ROUNDS, AWAY, BACK = 14, 8, 11
"""Of a run of every algorithm, and the rounds after which a device leaves and comes back."""
RUNS = {
    "ifca restarts": ("ifca", {"k": 2, "restarts": 2, "restart_rounds": 3}, {"origins": 4, "follows": range(4)}),
    "ifca sharing": ("ifca", {"k": 2}, SHARING),
    "fedgroup": ("fedgroup", {"groups": 2, "alpha": 2}, {}),
    "fesem": ("fesem", {"k": 2}, {}),
    # Each group's model is a sum of all groups' models.
    "fedgroup adding": ("fedgroup", {"groups": 2, "alpha": 2, "eta_g": 0.1}, {}),
    "cfl": ("cfl", {**SPLITS, "validate": "off"}, {}),
    "cfl looking": ("cfl", {**SPLITS, "validate": "off", "look_every": 4}, {}),
    "cfl validating": ("cfl", {**SPLITS, "p_value": 0.5, "margin": 0.01, "merge_every": 4}, {}),
}


RESTARTED = ("ifca sharing", "fedgroup adding", "cfl validating")


def two_targets(fleet):
    """Give every other device the opposite target; return the fleet."""
    for place, device in enumerate(fleet.devices.values()):
        device.target = np.full(6, 2.0 if place % 2 else -2.0, np.float32)
    return fleet


def begun_run(begun, name, **options):
    algorithm, settings, changes = RUNS[name]
    plan = {"algorithm": algorithm, "settings": settings, "rounds": ROUNDS, "norm_limit": 1e6, **changes}
    return two_targets(begun(6, **options, **plan))


@pytest.mark.slow
@pytest.mark.parametrize("name", RESTARTED)
def test_restarts_change_nothing_in_records(begun, tmp_path, name):
    found = []
    for kills in (False, True):
        fleet = begun_run(begun, name, root=tmp_path / str(kills))
        fleet.finish(fleet.kill if kills else lambda: None)
        found.append([(r["clusters"], r["events"], r["loss"], r["norms"]) for r in fleet.records()])
    assert found[0] == found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in RESTARTED else ()) for name in RUNS]
)
def test_restart_in_each_round(begun, name):
    """Devices follow only the models of their last assignment, so others' models reach them through checkpoints."""
    fleet = begun_run(begun, name)
    for round_ in range(ROUNDS):
        if round_ == AWAY:
            fleet.leave("dev-6")
        if round_ == BACK:
            fleet.come("dev-6")
        fleet.round()
        fleet.kill()
        updates = fleet.parties.server.directory / "run-000001" / "updates"
        assert [path.name for path in updates.glob("0*.f32")] in ([], [f"{round_ + 1:06d}.f32"])
    fleet.finish()
    records = fleet.records()
    assert records[-1]["contributed"] == 6
    assert all(r["out_of_step"] == {} for r in records)
    assert [r["declined"] for r in records if r["declined"]] == []
    for model in {state.model for d in fleet.devices.values() for state in d.states.held}:
        found = {d.states.newest(model).held for d in fleet.devices.values() if d.states.newest(model)}
        newest = max(held.round for held in found)
        assert len({held.digest for held in found if held.round == newest}) == 1


def test_unplaced_device_gets_global_model(begun):
    """FedGroup's auxiliary model is the mean of its groups' models, which no device trains."""
    settings = {"groups": 2, "alpha": 2, "discrepancy": False}
    here = ("dev-1", "dev-2", "dev-3", "dev-4")
    plan = {"algorithm": "fedgroup", "settings": settings, "rounds": 5, "quorum": 0.5}
    fleet = two_targets(begun(5, here=here, **plan))
    fleet.now_s += 30
    fleet.service.tick(fleet.now_s)
    for _ in range(4):
        fleet.round()
    fleet.answer("dev-1", "dev-2", "dev-3")
    fleet.come("dev-5")
    fleet.answer("dev-4")
    assert fleet.service.state.plan.final
    fleet.finish()
    assert fleet.records()[-1]["contributed"] == 5
    late = fleet.devices["dev-5"]
    clusters = fleet.records()[-1]["clusters"]
    groups = [fleet.devices[d].states.newest(clusters[d]).theta for d in ("dev-1", "dev-2")]
    auxiliary = next(s for s in late.states.held.values() if s.id.model in late.follows and s.id.round == 5)
    np.testing.assert_allclose(auxiliary.theta, np.mean(groups, axis=0), atol=1e-5)
