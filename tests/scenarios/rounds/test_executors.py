"""Devices with ONNX Runtime and devices with numpy alone in one fleet."""

import numpy as np
import pytest

from edge_client.learning.model import NumpyModel
from edge_client.storage.state import DeviceState
from shoal.task.bundle import TaskBundle
from tests.helpers.fleets import (
    CLASSES,
    INPUTS,
    grouped_data,
    make_exact_fleet,
    make_fleet,
    names,
    same_partition,
    thetas,
    truth_of,
)
from tests.helpers.tasks import logistic_models, manifest

COUNT = 4
HALF = dict.fromkeys(names(COUNT)[::2], "numpy") | dict.fromkeys(names(COUNT)[1::2], "onnxruntime")


@pytest.mark.parametrize("mode", ["rotation", "permutation"])
def test_any_executor_ends_with_same_bits(tmp_path, mode):
    """All devices end with the same bits whatever computes them."""
    with make_fleet(tmp_path / "fleet", count=COUNT, rounds=4, mode=mode, executors=HALF) as fleet:
        made = [fleet.devices[name].runtime._jobs._make_backend(fleet.bundle, 1) for name in names(COUNT)]
        assert [isinstance(each, NumpyModel) for each in made] == [True, False] * 2
        records = fleet.run(10)
        assert all(r["contributed"] == COUNT and not r["missing"] for r in records)
        assert records[3]["loss"] < records[0]["loss"]
        assert len(set(thetas(fleet).values())) == 1


def test_executors_agree_within_round_off(tmp_path):
    """The executors reach one model within round off."""
    reached = []
    for place, executor in enumerate(("numpy", "onnxruntime")):
        chosen = dict.fromkeys(names(COUNT), executor)
        with make_exact_fleet(tmp_path / str(place), count=COUNT, rounds=4, executors=chosen) as fleet:
            fleet.run(10)
            reached.append(fleet.model("dev-00").theta)
    np.testing.assert_allclose(*reached, rtol=1e-4, atol=1e-6)


def test_any_executor_finds_the_groups(tmp_path):
    """Groups are found whatever computes the updates."""
    settings = {"algorithm": "ifca", "rounds": 8, "settings": {"k": "2", "restarts": "3", "restart_rounds": "2"}}
    with make_fleet(tmp_path / "fleet", grouped_data(COUNT, 2), executors=HALF, **settings) as fleet:
        records = fleet.run(20)
        assert same_partition(records[-1]["clusters"], truth_of(COUNT, 2))


def with_an_operator_that_numpy_lacks():
    """A logistic task whose gradient graph has Erf, to no effect."""
    score, grad, predict = logistic_models(INPUTS, CLASSES)
    grad.graph.node.add(op_type="Erf", input=["theta"], output=["unused"])
    return TaskBundle.seal_digests(manifest(INPUTS, CLASSES), *(m.SerializeToString() for m in (score, grad, predict)))


def test_missing_operator_is_told_in_advance(tmp_path, caplog):
    """A device that lacks an operator says so before it trains and the others go on."""
    bundle, lacking = with_an_operator_that_numpy_lacks(), names(COUNT)[0]
    chosen = dict.fromkeys(names(COUNT), "onnxruntime") | {lacking: "numpy"}
    with make_fleet(
        tmp_path / "fleet", bundle=bundle, count=COUNT, executors=chosen, quorum=0.5, deadline_s=60.0
    ) as fleet:
        records = fleet.run(60)
        assert all((r["contributed"], r["declined"]) == (COUNT - 1, {lacking: "task"}) for r in records)
        assert fleet.devices[lacking].runtime.following is None
        assert DeviceState(fleet.stage.device_dir(lacking)).load_run() is None
    (said, *_) = [str(r.kv) for r in caplog.records if r.name == "shoal.edge"]
    assert "the numpy executor does not have the operator 'Erf'" in said
    assert "pip install 'shoal[edge]'" in said
