"""Mask epochs under everything else: weight sharing, partial participation, newcomers, answers, a next run, and memory."""

import functools
import gc
import types

import numpy as np
import pytest

from aggregator.membership import AggregatorMembership
from crypto.mask.derivation import MaskKey
from crypto.mask.secret import MaskSecret
from edge_client import inference as answers
from edge_client.membership import DeviceMembership
from shoal.owner.runs.plan import RunOptions
from shoal.protocol.messages import Phase
from shoal.simulation.loopback_fleet import draw_origins
from shoal.transport.loopback import LoopbackBroker, LoopbackTransport
from tests.helpers.fleets import (
    FULL_BATCH,
    ONE_KEY,
    Wiretap,
    grouped_data,
    make_one_key_fleet,
    same_partition,
    truth_of,
    uploads_of,
)
from tests.helpers.takeovers import open_round, open_step, stop_at
from tests.scenarios.revocation.test_revocation import publish
from tests.scenarios.rollover.test_rollover import EVERY, close_to, events_of, models_of
from tests.scenarios.rounds.test_weight_sharing import sharing_fleet


def ends(fleet):
    records = fleet.run(100)
    return models_of(fleet), records[-1]["clusters"], records


# ---------------------------------------------------------------------------------------------------- strategies


def test_weight_sharing_goes_through_a_rollover(tmp_path):
    """One shared segment and two small ones become two whole origins whose shared coordinates are the same."""
    found = []
    for i, epoch_rounds in enumerate((0, 3)):
        settings = {"k": "2", "restarts": "1"}
        with sharing_fleet(
            tmp_path / str(i), quorum=1.0, rounds=8, epoch_rounds=epoch_rounds, settings=settings, **ONE_KEY
        ) as fleet:
            found.append(ends(fleet))
    assert len(events_of(found[1][2])) == 2
    assert {e["folded"] for e in events_of(found[1][2])} == {2}
    assert close_to(found[0][0], found[1][0])
    assert found[0][1] == found[1][1]


def test_partial_participation_draws_the_same_devices(tmp_path):
    """The whole roster signs, not only the devices drawn; the rounds after a rollover are as without it."""
    found = []
    for i, epoch_rounds in enumerate((0, 2)):
        with make_one_key_fleet(
            tmp_path / str(i), count=6, participation=0.5, rounds=5, epoch_rounds=epoch_rounds
        ) as fleet:
            found.append(ends(fleet))
    drawn = [[sorted(r["norms"]) for r in records] for _, _, records in found]
    assert drawn[0] == drawn[1]
    assert [e["signatures"] for e in events_of(found[1][2])] == [6, 6]
    assert close_to(found[0][0], found[1][0])


def features(tmp_path, name="dev-00", count=8):
    path = tmp_path / "x.npz"
    np.savez(path, x=grouped_data(count, 2)[name].x)
    return path


@pytest.mark.parametrize("validate", ["on", "off"])
def test_a_newcomer_is_placed_by_updates_that_were_masked_anew(tmp_path, validate):
    """CFL's edges hold updates of an earlier epoch under the newest key: Alg. 4 compares, no device scores; paths stay."""
    data = grouped_data(8, groups=2)
    late = data.pop("dev-07")
    settings = {"validate": validate, "eps1": "0.9", "path": "on"}
    with make_one_key_fleet(
        tmp_path / "fleet", data, algorithm="cfl", rounds=10, epoch_rounds=3, settings=settings
    ) as fleet:
        stop_at(fleet, lambda: fleet.service.state.strategy.tree and fleet.service.state.since >= 3)
        key_id = fleet.service.state.run.key_id
        edges = [c for n in fleet.service.state.strategy.tree.values() for e in n.edges for c in e]
        assert len(edges) == 7
        assert {c.key_id for c in edges} == {key_id} != {fleet.plan.key_id}
        fleet.add_device("dev-07", late)
        records = fleet.run(100)
        (event,) = events_of(records, "newcomer")
        assert (event["device"], event.get("by")) == ("dev-07", None)
        assert same_partition(records[-1]["clusters"], truth_of(8, 2))
        assert [e["renewed"] for e in events_of(records)] == [7, 7, 7]
        folder = fleet.stage.device_dir("dev-07")
        source = features(tmp_path, "dev-07")
        own, root = answers.predict(folder, source), answers.predict(folder, source, node=0)
        assert len(own) == len(root) == len(answers.predict(folder, source, ensemble=True))
        assert (own == late.y).mean() > (root == late.y).mean()


def test_a_newcomer_takes_the_group_of_the_nearest_renewed_direction(tmp_path):
    """FedGroup's Eq. 9, across a rollover."""
    data = grouped_data(7, groups=2)
    late = data.pop("dev-06")
    options = {"algorithm": "fedgroup", "settings": {"groups": "2", "alpha": "4"}, "rounds": 7, "epoch_rounds": 3}
    with make_one_key_fleet(tmp_path / "fleet", data, **options) as fleet:
        stop_at(fleet, lambda: fleet.service.state.since >= 3)
        fleet.add_device("dev-06", late)
        records = fleet.run(100)
        (event,) = events_of(records, "newcomers")
        assert event["groups"] == {"dev-06": records[-1]["clusters"]["dev-00"]}
        assert "by" not in event
        assert events_of(records)[-1]["carried"] == 2


# ---------------------------------------------------------------------------------------------------- answers


def test_a_device_answers_in_every_epoch_and_after_a_revocation(tmp_path):
    """`shoal-edge predict` opens the task that came with the epoch, also if the owner has replaced its keys since."""
    source = features(tmp_path)
    with make_one_key_fleet(tmp_path / "fleet", rounds=4, epoch_rounds=2) as fleet:
        fleet.run(60)
        folder = fleet.stage.device_dir("dev-00")
        first = answers.predict(folder, source)
        assert (first == grouped_data(8, 2)["dev-00"].y).mean() > 0.6
        fleet.stage.fleet.revoke("dev-02")
        publish(fleet)
        fleet.settle()
        assert DeviceMembership(folder).next is not None
        assert np.array_equal(answers.predict(folder, source), first)
        answers.export(folder, tmp_path / "model.onnx")
        fleet.kill_device("dev-00")
        fleet.revive_device("dev-00")
        assert fleet.devices["dev-00"].runtime.following == fleet.plan.run


def test_a_device_answers_after_the_fleet_has_rolled_over_to_fresh_secrets(tmp_path):
    """The old content key is erased; the task was sealed with the checkpoint."""
    source = features(tmp_path)
    with make_one_key_fleet(tmp_path / "fleet", rounds=4, quorum=0.6) as fleet:
        open_round(fleet, 2)
        fleet.stage.fleet.revoke("dev-02")
        publish(fleet)
        fleet.run(60)
        folder = fleet.stage.device_dir("dev-00")
        assert (answers.predict(folder, source) == grouped_data(8, 2)["dev-00"].y).mean() > 0.6


# ---------------------------------------------------------------------------------------------------- the next run


@pytest.mark.parametrize("change", ["none", "rotated in between", "rotated in the run"])
def test_the_owners_next_run_is_followed(tmp_path, change):
    """Mask epochs go on counting; every device, also after a restart, is in the new run's."""
    with make_one_key_fleet(tmp_path / "fleet", rounds=3, epoch_rounds=1, quorum=1.0) as fleet:
        if change == "rotated in the run":
            open_round(fleet, 2)
            fleet.stage.fleet.rotate()
            publish(fleet)
        used = [fleet.plan.epoch, *(e["epoch"] for e in events_of(fleet.run(60)))]
        if change == "rotated in between":
            fleet.stage.fleet.rotate()
        publish(fleet)
        fleet.settle()
        options = RunOptions(
            "fedavg", rounds=3, epoch_rounds=1, min_contributors=1, seed=1, local=FULL_BATCH, **ONE_KEY
        )
        plan = fleet.stage.add_run(fleet.bundle, draw_origins(fleet.bundle.manifest, 1, 0), options)
        fleet.kill_aggregator()
        first, fleet.plan = fleet.plan, plan
        server = fleet.stage.aggregator_dir
        assert AggregatorMembership(server).reason(plan) == ""
        fleet.revive_aggregator()
        records = fleet.run(60)
        later = [plan.epoch, *(e["epoch"] for e in events_of(records))]
        assert used == sorted(set(used))
        assert later == [plan.epoch, plan.epoch + 1, plan.epoch + 2]
        assert min(later) > max(used)
        assert records[-1]["contributed"] == 3
        assert plan.run == first.run + 1
        for device in fleet.stage.devices:
            fleet.kill_device(device)
            fleet.revive_device(device)
            assert fleet.devices[device].runtime.following == plan.run
            assert DeviceMembership(fleet.stage.device_dir(device)).grant.mask_epoch == later[-1]


# ---------------------------------------------------------------------------------------------------- when


@pytest.mark.parametrize("name", ["fedavg", *EVERY])
def test_somebody_is_revoked_before_the_first_round(tmp_path, name):
    """The rollover follows round 0 and carries the algorithm's starting models over."""
    data, options = grouped_data(6, groups=2), EVERY.get(name, {"rounds": 2})
    options = {**options, "rounds": min(options["rounds"], 7 if name == "ifca" else 3)}
    with make_one_key_fleet(tmp_path / "fleet", data, quorum=0.6, deadline_s=5.0, **options) as fleet:
        fleet.kill_aggregator()
        fleet.stage.fleet.revoke("dev-05")
        publish(fleet)
        fleet.revive_aggregator()
        records = fleet.run(100)
        (event,) = events_of(records)
        assert (event["round"], event["devices"], event["signatures"]) == (0, 5, 5)
        assert all("dev-05" not in r["norms"] for r in records)
        assert records[-1]["contributed"] == 5


def test_a_revocation_in_the_final_round_changes_nothing_any_more(tmp_path):
    """No device trains; the new secrets are in force from the next run on."""
    tap = Wiretap()
    with make_one_key_fleet(tmp_path / "fleet", faults=tap, rounds=2, quorum=0.6, deadline_s=5.0) as fleet:
        stop_at(fleet, lambda: fleet.service.state.plan is not None and fleet.service.state.plan.final)
        fleet.stage.fleet.revoke("dev-02")
        publish(fleet)
        records = fleet.run(60)
        assert events_of(records) == []
        assert records[-1]["final"]
        assert len(uploads_of(fleet, tap, "dev-00")) == 3


def test_a_revocation_after_the_last_round_comes_before_the_final_one(tmp_path):
    """The final models are announced under the new keys."""
    with make_one_key_fleet(tmp_path / "fleet", rounds=2, quorum=0.6, deadline_s=5.0) as fleet:
        open_round(fleet, 2)
        fleet.stage.fleet.revoke("dev-02")
        publish(fleet)
        records = fleet.run(60)
        (event,) = events_of(records)
        assert (event["round"], records[-1]["round"]) == (2, 3)
        assert records[-1]["contributed"] == 2


# ---------------------------------------------------------------------------------------------------- memory


def reachable(*roots):
    """Return every object that long-lived objects hold, but for the network, classes, modules and the globals of functions."""
    skipped = (type, types.ModuleType, LoopbackBroker, LoopbackTransport, types.FrameType)
    seen, todo = {}, list(roots)
    while todo:
        value = todo.pop()
        if id(value) in seen or isinstance(value, skipped):
            continue
        seen[id(value)] = value
        if isinstance(value, types.FunctionType):
            todo.extend((value.__closure__ or (), value.__defaults__ or ()))
        elif isinstance(value, functools.partial):
            todo.extend((value.func, value.args, value.keywords))
        else:
            todo.extend(gc.get_referents(value))
    return list(seen.values())


def holding(objects, secrets):
    """Return the objects whose bytes contain one of ``secrets``."""
    found = []
    for value in objects:
        if isinstance(value, MaskSecret):
            value = value.reveal()
        if isinstance(value, np.ndarray):
            value = value.tobytes()
        if isinstance(value, bytes | bytearray | memoryview):
            raw = bytes(value)
            found += [value for secret in secrets if secret in raw]
    return found


def masks_of(objects):
    return {o.key_id for o in objects if isinstance(o, MaskKey)}


def secrets_of(device):
    """Return the secrets that must be erased: the epoch's mask secret, and the arrays that make its masks."""
    run = device.runtime._run
    tables = [a for a in reachable(run.key) if isinstance(a, np.ndarray) and a.nbytes >= 16]
    assert tables
    return [device.runtime._membership.grant.mask_secret, *(t.tobytes() for t in tables)]


@pytest.mark.parametrize("mode", ["permutation", "rotation"])
@pytest.mark.parametrize("change", ["scheduled", "rotated"])
def test_no_device_holds_on_to_the_epoch_before(tmp_path, mode, change):
    """Neither its mask nor its secret is referred to by anything that lives on; after a rotation no older key is, either."""
    with make_one_key_fleet(
        tmp_path / "fleet", rounds=4, epoch_rounds=2 if change == "scheduled" else 0, mode=mode
    ) as fleet:
        open_round(fleet, 2)
        device = fleet.devices["dev-00"]
        old_key, old = device.runtime._run.key.key_id, secrets_of(device)
        assert masks_of(reachable(device)) == {old_key}
        assert holding(reachable(device), old), "the search finds what is there"
        if change == "rotated":
            grant = device.runtime._membership.grant
            old += [grant.content_key, grant.broadcast_key]
            fleet.stage.fleet.rotate()
            publish(fleet)
        stop_at(fleet, lambda: device.runtime._run.key.key_id != old_key)
        gc.collect()
        assert masks_of(reachable(device)) == {device.runtime._run.key.key_id}
        assert holding(reachable(device), old) == []
        assert device.runtime._workplace.proposal == (b"", b""), "nor what was folded: it is as large as all models"
        files = [p for p in fleet.stage.device_dir("dev-00").iterdir() if p.is_file()]
        assert [p.name for p in files if any(secret in p.read_bytes() for secret in old)] == []


@pytest.mark.parametrize("algorithm", ["fedavg", "cfl", "fedgroup", "ifca"])
def test_the_aggregator_holds_on_to_no_vector_of_the_epoch_before(tmp_path, algorithm):
    """Not in memory, and not on the disk."""
    settings = {
        "cfl": {"validate": "off", "eps1": "0.9"},
        "fedgroup": {"groups": "2", "alpha": "4"},
        "ifca": {"k": "2"},
    }
    options = {"algorithm": algorithm, "settings": settings.get(algorithm, {}), "rounds": 6, "epoch_rounds": 4}
    with make_one_key_fleet(tmp_path / "fleet", grouped_data(4, 2), **options) as fleet:
        open_step(fleet, Phase.ENDORSE)
        state = fleet.service.state
        arrays = [
            a for a in reachable(state.strategy) if isinstance(a, np.ndarray) and a.dtype == np.float32 and a.any()
        ]
        old = {a.tobytes() for a in arrays}
        assert old
        assert holding(reachable(fleet.service), old), "the search finds what is there"
        stop_at(fleet, lambda: fleet.service.state.since == 4)
        gc.collect()
        assert holding(reachable(fleet.service), old) == []
        run = fleet.stage.aggregator_dir / "run-000001"
        assert [p for p in run.rglob("*") if p.is_file() and any(v in p.read_bytes() for v in old)] == []


def test_the_broker_holds_on_to_no_model_of_the_epoch_before(tmp_path):
    """Also before the next round opens: one device is offline, and the plan requires all."""
    with make_one_key_fleet(tmp_path / "fleet", rounds=4, epoch_rounds=2, quorum=1.0) as fleet:
        open_step(fleet, Phase.ENDORSE)
        fleet.broker.pump()
        assert [t for t in fleet.broker.retained if "/s/model/" in t]
        fleet.kill_device(next(d for d in fleet.stage.devices if d != fleet.service.state.rollover.folder))
        fleet.settle()
        assert (fleet.service.state.since, fleet.service.state.plan) == (2, None)
        assert [t for t in fleet.broker.retained if "/s/model/" in t] == []
