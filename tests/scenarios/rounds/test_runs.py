"""Whole runs on the loopback fleet: every algorithm from the owner's signature to the devices' models."""

import numpy as np
import pytest
from shoal_lab.loopback.fleet import draw_origins

from aggregator.strategies.cfl.state import CflSettings
from edge_client.learning.data import split
from edge_client.learning.model import OrtModel
from edge_client.learning.training import train
from edge_client.models.recipes import weighted_sum
from shoal.errors import ConfigError
from shoal.protocol.messages import Action
from shoal.protocol.recipe import LocalTraining
from shoal.protocol.states import StateId
from tests.helpers.fleets import (
    CLASSES,
    FULL_BATCH,
    INPUTS,
    announcements,
    answers,
    events,
    grouped_data,
    make_fleet,
    same_partition,
    thetas,
    truth_of,
)
from tests.helpers.tasks import logistic_bundle
from tests.scenarios.round_fleets import clear_means, held_states, relayed_steps

QUICK = LocalTraining(epochs=2, batch_size=10, lr=0.5)
IFCA = {"algorithm": "ifca", "rounds": 5, "settings": {"k": "2"}, "local": QUICK}
CFL = {"algorithm": "cfl", "rounds": 8, "local": QUICK}


def test_fedavg_runs_to_the_end(tmp_path):
    """Every round has all devices, the loss falls, and everybody ends with the same model."""
    with make_fleet(tmp_path / "fleet", count=4, rounds=4, evaluate_every=2) as fleet:
        records = fleet.run(10)
        assert [r["tested"] > 0 for r in records] == [False, True, False, True, True]
        assert [r["round"] for r in records] == [1, 2, 3, 4, 5]
        assert [r["final"] for r in records] == [False] * 4 + [True]
        assert all(r["contributed"] == r["ordered"] == 4 and not r["missing"] for r in records)
        assert records[3]["loss"] < records[0]["loss"]
        assert records[-1]["tested"] == 4 * 12
        assert len(set(thetas(fleet).values())) == 1
        assert fleet.model("dev-00").round == 5


def test_ifca_finds_the_groups(tmp_path):
    settings = {"k": "2", "restarts": "4", "restart_rounds": "2"}
    with make_fleet(tmp_path / "fleet", grouped_data(6, 2), **{**IFCA, "rounds": 12, "settings": settings}) as fleet:
        records = fleet.run(10)
        assert same_partition(records[-1]["clusters"], truth_of(6, 2))
        assert records[-1]["correct"] / records[-1]["tested"] > 0.75
        models = thetas(fleet)
        assert same_partition({d: hash(m) for d, m in models.items()}, truth_of(6, 2))
        ended, (kept,) = events(records, "start-ended"), events(records, "start-kept")
        assert [e["start"] for e in ended] == [0, 1, 2, 3]
        best = min(ended, key=lambda e: e["loss"])
        assert (kept["start"], kept["loss"]) == (best["start"], best["loss"])
        assert {c // 2 for c in records[-1]["clusters"].values()} == {kept["start"]}


def test_next_round_comes_before_answers(tmp_path, tap):
    """Devices wait for the announcement only: acknowledging each of them first would delay the whole fleet."""
    with make_fleet(tmp_path / "fleet", faults=tap, count=4, rounds=2) as fleet:
        fleet.run(10)
        told = [p.topic.rsplit("/", 1)[-1] for p in tap.sent(client=fleet.client_id("aggregator"))]
        spoken = [leaf for leaf in told if leaf in ("round", "ctl")]
        announced = [i for i, leaf in enumerate(spoken) if leaf == "round"]
        before = [spoken[:i].count("ctl") for i in announced]
        assert [a.round for a in announcements(fleet, tap)] == [1, 2, 3, 3], "the last adds the final checkpoints"
        assert before[0] == 0
        assert before[1] < 4
        assert before[2] < 8
        assert before[3] < 12
        # A device that gets the last announcement before its answer asks for the answer again.
        assert 12 <= spoken.count("ctl") <= 16
        for name in fleet.stage.devices:
            assert {a.action for a in answers(fleet, tap, name)} == {Action.ACK}
            assert {a.round for a in answers(fleet, tap, name)} == {1, 2, 3}


def test_protocol_computes_plain_fedavg(tmp_path):
    """Masks, seals, files and messages leave no trace in the model: a short loop in the clear gives the same bits.

    Under the permutation: a rotation rounds each mean.
    """
    data = grouped_data(3)
    data["dev-01"] = type(data["dev-01"])(data["dev-01"].x[:25], data["dev-01"].y[:25])
    bundle = logistic_bundle(INPUTS, CLASSES)
    origin = draw_origins(bundle.manifest, 1, 1)[0]
    with make_fleet(tmp_path / "fleet", data, rounds=3, mode="permutation") as fleet:
        fleet.run(10)
        reached = fleet.model("dev-02").theta
    backend, theta = OrtModel(bundle), origin
    shares = [split(data[name], f"demo/{name}".encode()).train for name in sorted(data)]
    for round_ in range(3):
        total = np.zeros_like(origin)
        for share in shares:
            step = train(theta, share, FULL_BATCH, backend, np.random.default_rng(0), round_, lambda: False)
            total += step.delta * np.float32(len(share))
        theta = weighted_sum([(1.0, theta), (1.0, total / np.float32(sum(map(len, shares))))])
    assert reached.tobytes() == theta.tobytes()


def test_cfl_splits_no_equal_devices(tmp_path):
    """The norm test is made to fire as early and as often as it can; split validation rejects every split."""
    settings = {"eps1": "5", "refused_cool_down": "0", "trial_rounds": "1"}
    options = {**CFL, "rounds": 10, "settings": settings}
    with make_fleet(tmp_path / "fleet", grouped_data(6, 1, n=100), **options) as fleet:
        records = fleet.run(10)
        assert len(events(records, "split-refused")) >= 2
        assert not events(records, "split")
        assert set(records[-1]["clusters"].values()) == {0}


def test_trial_at_the_end_leaves_halfs_model(tmp_path, monkeypatch):
    """A trial that never convinces goes on to the end; in between the control trains by itself, as one model for all."""
    monkeypatch.setattr(CflSettings, "convinces", lambda *_: False)
    monkeypatch.setattr(CflSettings, "clear", lambda *_: False)
    monkeypatch.setattr("aggregator.strategies.cfl.strategy.MAX_EXTENSIONS", 99)
    with make_fleet(tmp_path / "fleet", grouped_data(8, 2), **CFL | {"rounds": 14}) as fleet:
        records = fleet.run(10)
        assert not events(records, "split") + events(records, "split-refused")
        assert len(set(records[-2]["clusters"].values())) == 1
        assert same_partition({name: hash(theta) for name, theta in thetas(fleet).items()}, truth_of(8, 2))
        assert records[-1]["correct"] / records[-1]["tested"] > 0.75


def test_newcomer_finds_group_among_leaves(tmp_path):
    """A device that joins after the split follows the edge of its direction, and ends with the model of its group."""
    data = grouped_data(10, 2)
    late = data.pop("dev-09")
    with make_fleet(tmp_path / "fleet", data, **CFL) as fleet:
        fleet.run_until(lambda: bool(events(fleet.records(), "split")), 10)
        fleet.add_device("dev-09", late)
        records = fleet.run(100)
        (cut,), (placed,) = events(records, "split"), events(records, "newcomer")
        assert min(cut["prefer"]) > 0.75
        assert max(cut["p_value"]) < 0.01
        assert records[-1]["correct"] / records[-1]["tested"] > 0.75
        assert (placed["device"], placed["by"]) == ("dev-09", "direction")
        assert same_partition(records[-1]["clusters"], truth_of(10, 2))
        models = thetas(fleet)
        assert models["dev-09"] == models["dev-07"] != models["dev-08"]


@pytest.mark.parametrize("mode", ["permutation", "rotation"])
def test_aggregator_holds_two_rounds_means(tmp_path, mode):
    """No vector in its files is an update, a mean or a model in clear, and only the means of rounds 2 and 3 are left of all."""
    with make_fleet(tmp_path / "fleet", mode=mode) as fleet:
        fleet.run_until(lambda: fleet.closed() == 1, 10)
        before = held_states(fleet, "dev-00")[StateId(0, 1)]
        fleet.run(10)
        steps = relayed_steps(fleet)
        assert [kept.step.round for kept in steps] == [2, 3]
        means = [clear_means(fleet, kept)[0] for kept in steps]
        model = fleet.model("dev-00").theta
        after = weighted_sum([(1.0, before), (1.0, means[0])])
        assert weighted_sum([(1.0, after), (1.0, means[1])]).tobytes() == model.tobytes()
        held = [np.fromfile(p, "<f4") for p in (fleet.stage.aggregator_dir / "run-000001").glob("*/*.f32")]
        assert len(held) == 2
        clear = [np.sort(np.abs(vector)) for vector in (*means, before, after, model)]
        for vector in held:
            assert not any(np.allclose(vector, other, atol=1e-5) for other in (*means, before, after, model))
            same_values = [np.array_equal(np.sort(np.abs(vector)), other) for other in clear]
            assert sum(same_values) == (1 if mode == "permutation" else 0)


@pytest.mark.parametrize(
    ("options", "words", "hint"),
    [
        ({**IFCA, "settings": {"k": "2", "restarts": "2", "restart_rounds": "5"}, "rounds": 10}, "leave none", ""),
        ({"algorithm": "fedgrouprox", "local": QUICK}, "prox_mu is 0", ""),
        ({"mode": "householder"}, "'householder'", "signed-permutation"),
        (
            {"algorithm": "fedgroup", "settings": {"groups": "2", "eta_g": "0.1"}, "norm_noise": 0.01},
            "hides nothing",
            "",
        ),
        ({**IFCA, "settings": {"normalise": "samples"}, "weighting": "uniform"}, "no sample counts", ""),
    ],
    ids=["settings", "no proximal term", "unknown mode", "norms that show", "counts that show"],
)
def test_owner_signs_no_void_plan(tmp_path, options, words, hint):
    """Nor one that gives away what it promises to hide."""
    with pytest.raises(ConfigError, match=words) as caught:
        make_fleet(tmp_path, **options)
    assert hint in caught.value.hint
