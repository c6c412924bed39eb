"""A run goes through mask epochs: every so many rounds devices fold the models, sign the fold and take a new mask."""

import dataclasses

import numpy as np
import pytest

from crypto.mask.secret import MaskSecret
from edge_client.membership import DeviceMembership
from edge_client.run import rollover
from edge_client.storage.state import DeviceState
from shoal.errors import IntegrityError
from shoal.protocol.messages import Phase
from tests.helpers.fleets import (
    Wiretap,
    announcements,
    grouped_data,
    make_one_key_fleet,
    open_upload,
    same_partition,
    truth_of,
    uploads_of,
)

ROUNDS, EACH = 6, 2
IFCA = {"algorithm": "ifca", "settings": {"k": "2", "restarts": "2", "restart_rounds": "3"}, "rounds": 12}
CFL = {"algorithm": "cfl", "settings": {"validate": "off", "eps1": "0.9"}, "rounds": 12}
FEDGROUP = {"algorithm": "fedgroup", "settings": {"groups": "2", "alpha": "4"}, "rounds": 8}
ONE_SHOT = {"algorithm": "one-shot", "settings": {"k": "2"}, "rounds": 8}
LOCAL = {"algorithm": "local", "settings": {}, "rounds": 6}
EVERY = {"ifca": IFCA, "cfl": CFL, "fedgroup": FEDGROUP, "one-shot": ONE_SHOT, "local": LOCAL}


def events_of(records, kind="mask-epoch"):
    return [e for r in records for e in r["events"] if e["kind"] == kind]


def models_of(fleet):
    return {d: fleet.model(d).theta for d in fleet.stage.devices}


def close_to(some, others):
    """Whether models are equal but for the rounding of float32 sums: origin + (a + b) against (origin + a) + b."""
    assert some.keys() == others.keys()
    return all(np.abs(some[d] - others[d]).max() <= 2e-5 * np.abs(others[d]).max() for d in some)


@pytest.fixture(scope="module")
def undivided(tmp_path_factory):
    """Device -> model after six rounds under one mask."""
    with make_one_key_fleet(tmp_path_factory.mktemp("undivided") / "fleet", rounds=ROUNDS) as fleet:
        fleet.run(60)
        return models_of(fleet)


@pytest.mark.parametrize("mode", ["permutation", "signed-permutation", "rotation", "none"])
def test_a_run_under_three_masks_ends_with_the_models_of_a_run_under_one(tmp_path, mode, undivided):
    with make_one_key_fleet(tmp_path / "fleet", rounds=ROUNDS, epoch_rounds=EACH, mode=mode) as fleet:
        records = fleet.run(60)
        first = fleet.plan.epoch
        assert [e["epoch"] for e in events_of(records)] == [first + 1, first + 2]
        assert [e["signatures"] for e in events_of(records)] == [3, 3]
        assert close_to(models_of(fleet), undivided)


def test_every_epoch_has_a_key_of_its_own_and_the_old_one_is_erased(tmp_path):
    """Uploads of three epochs bear three key ids; secrets, vectors and updates of those before are nowhere any more."""
    tap = Wiretap()
    with make_one_key_fleet(tmp_path / "fleet", faults=tap, rounds=ROUNDS, epoch_rounds=EACH) as fleet:
        fleet.run(60)
        opened = [open_upload(fleet, "dev-00", u)[0] for u in uploads_of(fleet, tap, "dev-00")]
        keys = {u.key_id: u.epoch for u in opened if u.phase == Phase.TRAIN}
        first = fleet.plan.epoch
        assert sorted(keys.values()) == [first, first + 1, first + 2]
        membership = DeviceMembership(fleet.stage.device_dir("dev-00"))
        assert membership.grant.mask_epoch == first + 2
        assert membership.grant.mask_secret == fleet.stage.fleet.secret_at(first + 2).reveal()
        with pytest.raises(IntegrityError, match="can't be derived from it"):
            membership.secret_at(0, first)
        run = fleet.stage.aggregator_dir / "run-000001"
        for kind in ("updates", "vectors"):
            assert [p.name for p in (run / kind).iterdir()] == [f"epoch-{first + 2:06d}"]


def test_a_mask_for_every_round(tmp_path, undivided):
    """The shortest epoch: one round."""
    with make_one_key_fleet(tmp_path / "fleet", rounds=ROUNDS, epoch_rounds=1) as fleet:
        records = fleet.run(120)
        assert len(events_of(records)) == ROUNDS - 1
        assert close_to(models_of(fleet), undivided)


@pytest.mark.parametrize("name", EVERY)
def test_every_strategy_ends_with_the_same_models_and_clusters(tmp_path, name):
    """A strategy's other state from earlier epochs was carried through the rollover or was not needed."""
    data, options = grouped_data(6, groups=2), EVERY[name]
    ends = []
    for i, epoch_rounds in enumerate((0, 3)):
        with make_one_key_fleet(tmp_path / str(i), data, epoch_rounds=epoch_rounds, **options) as fleet:
            records = fleet.run(120)
            assert len(events_of(records)) == (0 if not epoch_rounds else (options["rounds"] - 1) // 3)
            ends.append((models_of(fleet), records[-1]["clusters"]))
    assert close_to(ends[0][0], ends[1][0])
    assert same_partition(ends[0][1], ends[1][1])
    if name not in ("local",):
        assert same_partition(ends[1][1], truth_of(6, 2))


def test_a_device_that_was_away_catches_up(tmp_path, undivided):
    """It returns two epochs later, with the secret of the first epoch."""
    with make_one_key_fleet(tmp_path / "fleet", rounds=ROUNDS, epoch_rounds=EACH, quorum=0.6, deadline_s=5.0) as fleet:
        fleet.run_until(lambda: len(fleet.records()) >= 1, 20)
        fleet.kill_device("dev-02")
        fleet.run_until(lambda: len(fleet.records()) >= 5, 60)
        first = fleet.plan.epoch
        assert DeviceMembership(fleet.stage.device_dir("dev-02")).grant.mask_epoch == first
        fleet.revive_device("dev-02")
        records = fleet.run(60)
        assert "dev-02" in records[-1]["clusters"]
        assert DeviceMembership(fleet.stage.device_dir("dev-02")).grant.mask_epoch == first + 2
        one, other = fleet.model("dev-00").theta, fleet.model("dev-02").theta
        assert one.tobytes() == other.tobytes()


def test_a_newcomer_of_a_later_epoch_takes_part_and_cannot_read_the_past(tmp_path):
    """The owner has seen the epoch's certificate: the grant holds no older secret."""
    from tests.scenarios.revocation.test_revocation import publish

    with make_one_key_fleet(tmp_path / "fleet", rounds=ROUNDS, epoch_rounds=EACH) as fleet:
        fleet.run_until(lambda: len(fleet.records()) >= 3, 20)
        owner, first = fleet.stage.fleet, fleet.plan.epoch
        publish(fleet)
        assert owner.secrets.mask_epoch == first + 1
        fleet.add_device("dev-03", grouped_data(4)["dev-03"])
        granted = DeviceMembership(fleet.stage.device_dir("dev-03")).grant
        assert granted.mask_epoch >= first + 1
        with pytest.raises(IntegrityError):
            MaskSecret.from_bytes(granted.mask_secret).at(first, granted.mask_epoch)
        records = fleet.run(60)
        assert "dev-03" in records[-2]["norms"]
        assert fleet.model("dev-03").theta.tobytes() == fleet.model("dev-00").theta.tobytes()


@pytest.mark.parametrize("victim", ["aggregator", "folder", "signer", "everybody"])
@pytest.mark.parametrize("phase", [Phase.CHECKPOINT, Phase.ENDORSE], ids=lambda p: p.name)
def test_a_crash_at_any_step_leaves_a_fleet_that_finishes(tmp_path, victim, phase, undivided):
    """Power cut while the step is open, and again right after the next epoch has begun."""
    with make_one_key_fleet(tmp_path / "fleet", rounds=ROUNDS, epoch_rounds=EACH, deadline_s=5.0) as fleet:

        def at_step():
            plan = fleet.service.state.plan
            return plan is not None and any(o.phase == phase for o in plan.assignments.values())

        fleet.run_until(at_step, 20)
        folder = fleet.service.state.rollover.folder
        crash(fleet, victim, folder)
        epoch = fleet.plan.epoch + 1
        fleet.run_until(lambda: fleet.service.state.run.epoch == epoch, 60)
        crash(fleet, victim, folder)
        records = fleet.run(120)
        assert len(events_of(records)) == 2
        assert close_to(models_of(fleet), undivided)


def crash(fleet, victim, folder):
    devices = {
        "folder": [folder],
        "signer": [d for d in fleet.stage.devices if d != folder][:1],
        "everybody": list(fleet.stage.devices),
    }.get(victim, [])
    if victim in ("aggregator", "everybody"):
        fleet.kill_aggregator()
    for device in devices:
        fleet.kill_device(device)
    if victim in ("aggregator", "everybody"):
        fleet.revive_aggregator()
    for device in devices:
        fleet.revive_device(device)


def test_a_power_cut_between_the_epoch_and_its_secret_heals(tmp_path, monkeypatch, undivided):
    """The file that the next epoch begins with is there, the old secret still in force."""
    with make_one_key_fleet(tmp_path / "fleet", rounds=ROUNDS, epoch_rounds=EACH, deadline_s=5.0) as fleet:
        kept = DeviceState.save_epoch

        def cut(self, epoch):
            kept(self, epoch)
            if self.directory.name == "dev-01":
                raise KeyboardInterrupt

        monkeypatch.setattr(DeviceState, "save_epoch", cut)
        with pytest.raises(KeyboardInterrupt):
            fleet.run(60)
        monkeypatch.undo()
        fleet.kill_device("dev-01")
        assert DeviceMembership(fleet.stage.device_dir("dev-01")).grant.mask_epoch == fleet.plan.epoch
        fleet.revive_device("dev-01")
        assert DeviceMembership(fleet.stage.device_dir("dev-01")).grant.mask_epoch == fleet.plan.epoch + 1
        fleet.run(120)
        assert close_to(models_of(fleet), undivided)


def test_a_wrong_fold_is_signed_by_nobody_and_another_device_folds(tmp_path, monkeypatch, undivided):
    """The device that folds first is compromised: the old epoch stays until an honest one has folded."""
    with make_one_key_fleet(tmp_path / "fleet", rounds=ROUNDS, epoch_rounds=ROUNDS // 2) as fleet:
        honest = rollover.folded
        tampered = []

        def fold(shop, *args):
            if not tampered:
                tampered.append(shop.identity.name)
                monkeypatch.setattr(rollover, "folded", lambda models: honest(models) * np.float32(1.001))
                try:
                    return original(shop, *args)
                finally:
                    monkeypatch.setattr(rollover, "folded", honest)
            return original(shop, *args)

        original = rollover.fold
        monkeypatch.setattr(rollover, "fold", fold)
        records = fleet.run(120)
        (failed,) = events_of(records, "rollover-failed")
        assert "0 of 3 devices signed" in failed["reason"] or "1 of 3 devices signed" in failed["reason"]
        assert tampered[0] in failed["reason"]
        assert len(events_of(records)) == 1
        assert close_to(models_of(fleet), undivided)


def test_without_half_of_the_roster_the_old_epoch_stays(tmp_path):
    """Two of three are offline: nothing happens in ten deadlines; the run continues once one is back."""
    with make_one_key_fleet(tmp_path / "fleet", rounds=4, epoch_rounds=2, quorum=0.3, deadline_s=2.0) as fleet:
        fleet.run_until(lambda: len(fleet.records()) >= 1, 20)
        for device in ("dev-01", "dev-02"):
            fleet.kill_device(device)
        fleet.run_until(lambda: "more than half" in fleet.service.status() or fleet.now_s > 60, 80)
        end_s = fleet.now_s + 20
        fleet.run_until(lambda: fleet.now_s >= end_s, 40)
        assert fleet.service.state.run.epoch == fleet.plan.epoch
        assert len(fleet.records()) <= 2
        fleet.revive_device("dev-01")
        records = fleet.run(60)
        (event,) = events_of(records)
        assert event["signatures"] == 2


def test_rounds_and_rollovers_are_announced_with_the_plans_mode(tmp_path):
    tap = Wiretap()
    with make_one_key_fleet(tmp_path / "fleet", faults=tap, rounds=4, epoch_rounds=2, mode="rotation") as fleet:
        fleet.run(60)
        seen = announcements(fleet, tap)
        assert {a.mode for a in seen} == {"rotation"}
        places = [(a.round, a.step) for a in seen]
        assert places == sorted(places)
        assert [(r, s) for r, s in places if s] == [(2, 1), (2, 2)]


def test_a_plan_signed_for_another_length_is_held_to(tmp_path):
    """A device refuses a round beyond the epoch's length: an aggregator that won't roll over gets no more updates."""
    from edge_client.run.policy import check_announcement
    from shoal.errors import UntrustedError

    tap = Wiretap()
    with make_one_key_fleet(tmp_path / "fleet", faults=tap, rounds=4, epoch_rounds=2) as fleet:
        fleet.run(60)
        second = next(a for a in announcements(fleet, tap) if a.round == 2)
        late = dataclasses.replace(second, round=3)
        check_announcement(second, fleet.plan)
        with pytest.raises(UntrustedError, match="a mask of 2 rounds"):
            check_announcement(late, fleet.plan)
        check_announcement(dataclasses.replace(second, round=3, epoch=fleet.plan.epoch), fleet.plan, since=2)
