"""The norm of one step: devices refuse too long a mean and too high a limit, and never those of an honest aggregator."""

import dataclasses
import hashlib

import numpy as np
import pytest

from aggregator.rounds import held_models as announced
from aggregator.rounds.held_models import KeptMean
from edge_client.run import held_models as held
from edge_client.run.policy import LIMIT_RATIO, MEAN_RATIO
from edge_client.status import status_lines
from edge_client.storage.state import DeviceState
from shoal.protocol.recipe import LocalTraining
from tests.helpers.fleets import (
    FULL_BATCH,
    grouped_data,
    make_fleet,
    names,
    restart_device,
)

QUICK = LocalTraining(epochs=2, batch_size=10, lr=0.5)
CFL = {"algorithm": "cfl", "rounds": 10, "local": QUICK, "min_contributors": 3}
IFCA = {"algorithm": "ifca", "settings": {"k": "2", "restart_rounds": "2"}}
GROUPS = {"algorithm": "fedgroup", "settings": {"groups": "2", "alpha": "2"}, "pretrain": QUICK}
HONEST = {
    "fedavg": {},
    "fedavg, half drawn": {"participation": 0.5, "rounds": 10},
    "fedavg, norm noise": {"norm_noise": 0.2},
    "fedavg, falling learning rate": {"local": dataclasses.replace(FULL_BATCH, lr_decay=0.3), "rounds": 6},
    "fedprox": {"algorithm": "fedprox", "local": dataclasses.replace(QUICK, prox_mu=0.05)},
    "local": {"algorithm": "local", "local": QUICK},
    "cfl": CFL,
    "cfl, half drawn": {**CFL, "participation": 0.5},
    "ifca": IFCA,
    "ifca with restarts": {**IFCA, "settings": {**IFCA["settings"], "restarts": "2"}},
    "one-shot": {"algorithm": "one-shot", "settings": {"k": "2"}, "pretrain": QUICK, "rounds": 4},
    "fedgroup": GROUPS,
    "fedgroup that adds models": {**GROUPS, "settings": {**GROUPS["settings"], "eta_g": "0.5"}},
    "fesem": {"algorithm": "fesem", "settings": {"k": "2"}, "local": QUICK},
    **{f"fedavg with {rule}": {"robust": rule} for rule in ("multi-krum", "rfa", "centred-clipping", "nnm")},
}


def uneven_data(count, groups):
    """Return data in groups of which some devices have a tenth and some inputs of a tenth."""
    data = grouped_data(count, groups)
    for i, (name, batch) in enumerate(data.items()):
        kept = slice(None, 6 if i % 4 == 1 else None)
        data[name] = dataclasses.replace(batch, x=batch.x[kept] * np.float32(0.1 if i % 4 == 2 else 1), y=batch.y[kept])
    return data


@pytest.fixture
def steps(monkeypatch):
    """(norm of a mean, announced limit, norm that the device compares with) of each mean that a device has checked."""
    found, asked = [], []
    limit_of, check = held.mean_limit, held.check_mean

    def limit(announced, longest, model_norm, plan):
        asked.append((announced, max(longest, model_norm / MEAN_RATIO) if longest else 0.0))
        return limit_of(announced, longest, model_norm, plan)

    def checked(*arguments):
        found.append((arguments[4], *asked[-1]))
        check(*arguments)

    monkeypatch.setattr(held, "mean_limit", limit)
    monkeypatch.setattr(held, "check_mean", checked)
    return found


REPEATED = (
    *("fedprox", "fedavg, half drawn", "cfl, half drawn", "ifca", "fedgroup"),
    *(f"fedavg with {rule}" for rule in ("multi-krum", "rfa", "nnm")),
    *("fedavg", "local", "one-shot", "fesem"),
)
"""Runs like another one of HONEST: `make long` has them too."""


@pytest.mark.parametrize(
    "options",
    [
        pytest.param(options, id=name, marks=pytest.mark.long if name in REPEATED else ())
        for name, options in HONEST.items()
    ],
)
def test_no_honest_run_comes_near_a_limit(tmp_path, steps, options):
    with make_fleet(tmp_path / "fleet", uneven_data(8, 2), **{"rounds": 5, "quorum": 0.5, **options}) as fleet:
        records = fleet.run(300)
        assert not any(r["declined"] for r in records)
        scaled = fleet.plan.capabilities.scale
    assert steps, "devices have checked means"
    ratios = [(norm / own, limit / own) for norm, limit, own in steps if own]
    assert ratios, "they have updates to compare with"
    assert all(norm <= limit / 2 for norm, limit, _ in steps)
    assert scaled or max(norm for norm, _ in ratios) < MEAN_RATIO / 4
    assert scaled or max(limit for _, limit in ratios) < LIMIT_RATIO * MEAN_RATIO / 4


def longer(mean, factor):
    vector = mean.vector * np.float32(factor)
    return KeptMean(mean.model, mean.contributors, mean.key_id, vector, hashlib.sha256(vector.tobytes()).digest())


def crafting(monkeypatch, of_round, factor=1.0, limit=None):
    """Let the aggregator multiply the means of a round, and announce another limit."""
    true = announced._kept_step

    def crafted(round_, *arguments):
        kept = true(round_, *arguments)
        if round_ != of_round:
            return kept
        step = kept.step if limit is None else dataclasses.replace(kept.step, limit=limit)
        return announced.KeptStep(step, tuple(longer(mean, factor) for mean in kept.means))

    monkeypatch.setattr(announced, "_kept_step", crafted)


CRAFTED = {
    "a mean that is a hundred times as long": ({"factor": 100.0}, "is allowed for one step"),
    "a high limit": ({"limit": 1e6}, "a step with means of norm up to 1e+06"),
    "both": ({"factor": 100.0, "limit": 1e6}, "a step with means of norm up to 1e+06"),
    "all that the limit's check lets pass": ({"factor": 1000.0, "limit": 300.0}, "is allowed for one step"),
}


@pytest.mark.parametrize("case", CRAFTED)
def test_disproportionate_step_is_refused(tmp_path, monkeypatch, case):
    """Every device refuses a step out of proportion and says so."""
    crafted, expected = CRAFTED[case]
    crafting(monkeypatch, 2, **crafted)
    with make_fleet(tmp_path / "fleet", rounds=4, deadline_s=5, min_contributors=3, mode="rotation") as fleet:
        fleet.run_until(lambda: len(fleet.service.state.unable) == 3, 60)
        assert fleet.service.status() == "round 3: 0 of 3; refused by the device: dev-00, dev-01, dev-02"
        for _ in range(10):
            fleet.step()  # devices write their status after a second
        for name in names(3):
            status = DeviceState(fleet.stage.device_dir(name)).load_status()
            assert status["session"]["declined"] == "refused"
            (line,) = (line for line in status_lines(status) if line.startswith("skipped: "))
            assert line.startswith("skipped: round 3: ")
            assert expected in line
            states = fleet.devices[name].runtime._models.states.held
            assert max(states).round == 1, "the crafted step is not taken"


def test_late_devices_stay_in_step(tmp_path, monkeypatch):
    """Devices that come late and make tiny updates stay in step."""
    with make_fleet(tmp_path / "fleet", rounds=6) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 3, 20)
        monkeypatch.setattr(held.HeldModels, "trained", lambda models, _: setattr(models._store, "longest", 1e-6))
        assert not any(r["declined"] for r in fleet.run(20))


def test_refusing_alone_stops_nobody(tmp_path, monkeypatch):
    """A device that refuses alone stops nobody and keeps what it has."""
    odd = "dev-01"
    trained = held.HeldModels.trained
    with make_fleet(tmp_path / "fleet", count=4, rounds=6, deadline_s=5, min_contributors=3, quorum=0.5) as fleet:
        fleet.run_until(lambda: fleet.records(), 20)
        models = fleet.devices[odd].runtime._models
        monkeypatch.setattr(held, "mean_limit", lambda _, longest, *__: 0.0 if longest == 1.0 else 1e3)
        monkeypatch.setattr(
            held.HeldModels, "trained", lambda m, n: setattr(m._store, "longest", 1.0) if m is models else trained(m, n)
        )
        records = fleet.run(100)
        assert {odd: "refused"} in [r["declined"] for r in records]
        assert all(r["contributed"] >= 3 for r in records)
        assert fleet.devices[odd].runtime.session.summary()["declined"] == "refused"
        assert models.states.held, "its last model stays"


def test_longest_update_outlives_a_restart(tmp_path):
    """The longest update is known after a restart."""
    with make_fleet(tmp_path / "fleet", rounds=4) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 2, 60)
        restart_device(fleet, "dev-00")
        assert fleet.devices["dev-00"].runtime._models._store.longest > 0.01
        fleet.run(60)
