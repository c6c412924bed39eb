"""Whole runs in every mask mode: the same clusters, the same models but for a rotation's rounding, and a mode that all state."""

import dataclasses
import hashlib
import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from crypto.mask.modes.registry import MODES
from edge_client.cli import app as edge
from shoal import limits
from shoal.owner.runs import plan
from shoal.protocol.precision.lengths import FEEDBACK, encoded_bytes
from shoal.protocol.recipe import LocalTraining
from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    Wiretap,
    grouped_data,
    make_fleet,
    open_upload,
    restart_aggregator,
    restart_device,
    same_partition,
    thetas,
    truth_of,
    uploads_of,
)
from tests.helpers.power_cuts import PowerCut
from tests.scenarios.round_fleets import held_states, relayed_steps, round_masks

QUICK = LocalTraining(epochs=2, batch_size=10, lr=0.5)
ALONE = LocalTraining(epochs=6, batch_size=10, lr=0.5)
FEDGROUP = {"algorithm": "fedgroup", "rounds": 5, "local": QUICK, "pretrain": ALONE}
RUNS = {
    "fedavg": {},
    "fedprox": {"algorithm": "fedprox", "local": dataclasses.replace(QUICK, prox_mu=0.05)},
    "local": {"algorithm": "local", "local": QUICK},
    "ifca": {"algorithm": "ifca", "rounds": 5, "settings": {"k": "2"}, "local": QUICK, "seed": 2},
    "cfl": {"algorithm": "cfl", "rounds": 8, "local": QUICK},
    "fedgroup": {**FEDGROUP, "settings": {"groups": "2", "alpha": "2"}},
    "madc": {**FEDGROUP, "settings": {"groups": "2", "alpha": "2", "measure": "madc"}},
    "one-shot": {"algorithm": "one-shot", "rounds": 4, "settings": {"k": "2"}, "local": QUICK, "pretrain": ALONE},
    "fesem": {
        "algorithm": "fesem",
        "rounds": 5,
        "settings": {"k": "2"},
        "local": dataclasses.replace(QUICK, epochs=30, lr=0.8),
        "seed": 3,
    },
    "fedgrouprox": {
        **FEDGROUP,
        "algorithm": "fedgrouprox",
        "settings": {"groups": "2", "alpha": "2"},
        "local": dataclasses.replace(QUICK, prox_mu=0.05),
    },
}


GROUPED = RUNS.keys() - {"fedavg", "fedprox", "local"}
EXACT = ("none", "permutation", "signed-permutation")
"""The modes that change no bit: they move values and turn signs, which commute with every mean."""
REPEATED = ("fedprox", "local", "madc", "one-shot", "fedgrouprox")
"""Runs whose means another one has, or that have none: `make long` has them too."""
CASES = [
    ("fedavg", tuple(MODES)),
    *(
        pytest.param(name, ("none", "permutation", "rotation"), marks=pytest.mark.long if name in REPEATED else ())
        for name in RUNS
        if name != "fedavg"
    ),
    *(pytest.param(name, ("none", "signed-permutation"), marks=pytest.mark.long) for name in RUNS if name != "fedavg"),
]


@pytest.mark.parametrize(("name", "modes"), CASES)
def test_modes_give_the_same_models(tmp_path, name, modes):
    """The hidden groups, if there are any, and every device's model: bit for bit, under a rotation to 1e-5 of the clear one."""
    ends = {}
    for mode in modes:
        with make_fleet(tmp_path / mode, grouped_data(6, 2), mode=mode, **RUNS[name]) as fleet:
            records = fleet.run(20)
            models = np.stack([fleet.model(name).theta for name in sorted(fleet.stage.devices)])
            ends[mode] = records[-1]["clusters"], models
    clusters, clear = ends["none"]
    assert name not in GROUPED or same_partition(clusters, truth_of(6, 2))
    for mode, (found, models) in ends.items():
        assert found == clusters, mode
        difference = np.linalg.norm(models.astype(np.float64) - clear)
        assert difference <= (0 if mode in EXACT else 1e-5 * np.linalg.norm(clear)), mode


@pytest.mark.parametrize("mode", MODES)
def test_plan_status_and_uploads_state_mode(tmp_path, mode, caplog, tap):
    """The owner signs it, a device's status shows it, every upload repeats it, and its key id is that of the round's mask."""
    caplog.set_level(logging.INFO)
    with make_fleet(tmp_path / "fleet", faults=tap, mode=mode) as fleet:
        fleet.run(10)
        assert fleet.plan.recipe.mode == mode
        assert {r.kv["mode"] for r in caplog.records if r.getMessage() == "following run"} == {mode}
        upload, _ = open_upload(fleet, "dev-00", uploads_of(fleet, tap, "dev-00")[0])
        assert (upload.mode, upload.key_id) == (mode, round_masks(fleet, 1)[""].key_id)
        directory = str(fleet.stage.device_dir("dev-00"))
    shown = CliRunner().invoke(edge, ["status", directory, "--json"])
    assert json.loads(shown.stdout)["data"]["mode"] == mode
    shown = CliRunner().invoke(edge, ["status", directory])
    assert f"mode: {mode}" in shown.stdout


def test_rotated_uploads_share_no_value(tmp_path):
    """The same fleet, the same round: a permutation preserves every value, a rotation none, and both preserve the norm."""
    bodies = {}
    for mode in MODES:
        tap = Wiretap()
        with make_fleet(tmp_path / mode, faults=tap, mode=mode) as fleet:
            fleet.run(10)
            _, body = open_upload(fleet, "dev-00", uploads_of(fleet, tap, "dev-00")[0])
            bodies[mode] = np.frombuffer(body, "<f4")
    clear = np.sort(np.abs(bodies["none"]))
    np.testing.assert_array_equal(np.sort(bodies["permutation"]), np.sort(bodies["none"]))
    np.testing.assert_array_equal(np.sort(np.abs(bodies["signed-permutation"])), clear)
    assert not np.intersect1d(np.abs(bodies["rotation"]), clear).size
    np.testing.assert_allclose(np.linalg.norm(bodies["rotation"]), np.linalg.norm(clear), rtol=1e-6)


# -- Whole runs in every precision: groups are found, all devices end with the same bits, and messages are as small as they say --


def both(precision):
    """Return options with one precision for both ways."""
    return {"precision_up": precision, "precision_down": precision}


GROUPS = {"settings": {"groups": "2", "alpha": "2"}, "local": QUICK, "pretrain": ALONE, "rounds": 5}
DIAGONAL = {
    "cfl, int8, rotation": {"algorithm": "cfl", "rounds": 8, "local": QUICK, "mode": "rotation", **both("int8")},
    "ifca, float16, permutation": {
        "algorithm": "ifca",
        "rounds": 5,
        "settings": {"k": "2"},
        "local": QUICK,
        "seed": 2,
        "mode": "permutation",
        **both("float16"),
    },
    "fedgroup, int8, signed": {"algorithm": "fedgroup", **GROUPS, "mode": "signed-permutation", **both("int8")},
    "one-shot, float16, none": {
        "algorithm": "one-shot",
        "rounds": 4,
        "settings": {"k": "2"},
        "local": QUICK,
        "pretrain": ALONE,
        "mode": "none",
        **both("float16"),
    },
    "fesem, int8, none": {
        "algorithm": "fesem",
        "rounds": 5,
        "settings": {"k": "2"},
        "local": dataclasses.replace(QUICK, epochs=30, lr=0.8),
        "seed": 3,
        "mode": "none",
        **both("int8"),
    },
}


@pytest.mark.parametrize("case", with_long(DIAGONAL, "cfl, int8, rotation"))
def test_groups_end_with_the_same_bits(tmp_path, case):
    """Groups are found and devices of a group end with the same bits."""
    with make_fleet(tmp_path / "fleet", grouped_data(8, 2), **DIAGONAL[case]) as fleet:
        records = fleet.run(30)
        assert same_partition(records[-1]["clusters"], truth_of(8, 2))
        assert records[-1]["correct"] / records[-1]["tested"] > 0.75
        assert same_partition({d: hash(m) for d, m in thetas(fleet).items()}, truth_of(8, 2))
        assert not any(r["declined"] for r in records)


@pytest.mark.parametrize("precision", limits.PRECISIONS)
def test_uploads_have_the_plans_precision(tmp_path, precision, tap):
    """Uploads and means have the plans precision."""
    with make_fleet(tmp_path / "fleet", faults=tap, **both(precision)) as fleet:
        fleet.run(20)
        length = fleet.plan.length
        found = [open_upload(fleet, "dev-00", sealed) for sealed in uploads_of(fleet, tap, "dev-00")]
        assert {(u.length, len(body) - u.attached, u.precision) for u, body in found if u.length} == {
            (length, encoded_bytes(length, precision), precision)
        }
        (mean,) = relayed_steps(fleet)[-1].means
        assert len(mean.wire) == encoded_bytes(length, precision)
        assert hashlib.sha256(mean.wire).digest() == mean.digest
        states = [held_states(fleet, name) for name in fleet.stage.devices]
        assert len({tuple((at, theta.tobytes()) for at, theta in sorted(s.items())) for s in states}) == 1


@pytest.mark.parametrize("precision", FEEDBACK)
def test_residuals_follow_one_model(tmp_path, precision):
    """Residuals follow the updates of one model."""
    with make_fleet(tmp_path / "fleet", rounds=4, precision_up=precision) as fleet:
        fleet.run_until(lambda: fleet.closed() == 2, 20)
        for device in fleet.devices.values():
            residual = device.runtime._uplink.residual
            assert residual.head.length == fleet.plan.length
            assert residual.vector().any()
        fleet.run(20)


def test_fed_back_errors_reach_float32(tmp_path, monkeypatch):
    """With 15 rounds of one model: the residual more than halves the distance."""
    ends = {}
    for name, precision, rounds in (("exact", "float32", 10), ("fed back", "int8", 10), ("dropped", "int8", 0)):
        monkeypatch.setattr("edge_client.learning.feedback.RESIDUAL_ROUNDS", rounds)
        with make_fleet(tmp_path / name.replace(" ", "-"), rounds=15, precision_up=precision) as fleet:
            fleet.run(60)
            ends[name] = fleet.model("dev-00").theta
    off = {name: float(np.linalg.norm(theta - ends["exact"])) for name, theta in ends.items()}
    assert off["fed back"] < off["dropped"] / 2, off


@pytest.fixture
def one_run_id(monkeypatch):
    """Give the runs of all fleets one id, so that their rounding draws the same numbers."""
    written = plan._written
    monkeypatch.setattr(plan, "_written", lambda *given: dataclasses.replace(written(*given), run_id=b"r" * 16))


def killing(monkeypatch, fleet, at):
    """Kill dev-00 at its ``at``-th write of a pending upload from round 3 on; return the list of those writes."""
    real, written = os.pwrite, []
    folder = str(fleet.stage.device_dir("dev-00"))

    def write(handle, data, place):
        if str(Path(f"/proc/self/fd/{handle}").readlink()).startswith(folder) and len(fleet.records()) >= 2:
            written.append(len(data))
            if len(written) == at:
                raise PowerCut
        return real(handle, data, place)

    monkeypatch.setattr(os, "pwrite", write)
    return written


def test_kill_at_any_write_changes_no_bit(tmp_path, monkeypatch, one_run_id):
    """It neither loses a residual nor adds it twice: the repeated job makes the same update."""
    options = {"rounds": 4, "mode": "none", "precision_up": "int8", "precision_down": "int8"}
    ends = []
    for at in range(6):
        with make_fleet(tmp_path / str(at), **options) as fleet, monkeypatch.context() as patch:
            written = killing(patch, fleet, at)
            try:
                fleet.run(30)
            except PowerCut:
                restart_device(fleet, "dev-00")
                fleet.run(30)
            assert len(written) >= max(at, 4)
            ends.append(thetas(fleet))
    assert all(end == ends[0] for end in ends)


def test_killed_aggregator_relays_same_means(tmp_path, one_run_id):
    """It stores means as encoded, and updates as decoded."""
    ends = []
    for kill in (False, True):
        with make_fleet(tmp_path / str(kill), rounds=4, mode="none", **both("int8")) as fleet:
            for round_ in range(1, 4) if kill else ():
                fleet.run_until(lambda round_=round_: fleet.closed() == round_, 30)
                restart_aggregator(fleet)
            fleet.run(60)
            ends.append(thetas(fleet))
    assert ends[0] == ends[1]
