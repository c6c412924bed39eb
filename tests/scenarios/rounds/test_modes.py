"""Whole runs in every mask mode: the same clusters, the same models but for a rotation's rounding, and a mode that all state."""

import dataclasses
import json
import logging

import numpy as np
import pytest
from typer.testing import CliRunner

from crypto.mask.modes.registry import MODES
from edge_client.cli import app as edge
from shoal.errors import ConfigError
from shoal.protocol.recipe import LocalTraining
from tests.helpers.fleets import (
    Wiretap,
    grouped_data,
    make_fleet,
    open_upload,
    same_partition,
    truth_of,
    uploads_of,
)
from tests.helpers.round_fleets import round_masks

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


def test_owner_signs_no_unknown_mode(tmp_path):
    """The owner can't sign a mode that does not exist."""
    with pytest.raises(ConfigError, match="'householder'") as caught:
        make_fleet(tmp_path, mode="householder")
    assert "signed-permutation" in caught.value.hint
