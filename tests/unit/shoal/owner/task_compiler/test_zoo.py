"""Each model of the zoo compiles, has torch's gradient in float64, and learns on each executor that takes it."""

from __future__ import annotations

import copy
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from edge_client.learning.model import NumpyModel, OrtModel
from shoal.owner.task_compiler.compile import compile_task
from shoal.owner.task_compiler.flat import flatten
from shoal.owner.task_compiler.selfcheck import TOLERANCE, lite_model
from shoal.report import record
from tests.unit.shoal.owner.task_compiler.zoo import ZOO

pytestmark = pytest.mark.torch
RESULTS = Path(__file__).parents[5] / "results" / "zoo.jsonl"
USUAL = (
    "linear over time", "encoder layer", "multi-label", "frozen backbone", "lora", "autoencoder", "conv1d depthwise",
    "attention function causal",
)  # fmt: skip
"""Each is another way of torch to write a model; `make long` tries the whole zoo."""
DRAWS, COUNTING = 8, 5
HOUR_S = 3600


def plain_gradient(model, loss, names, x, y, dtype):
    """Return the flat gradient by torch's autograd on a copy of the module in ``dtype``."""
    model = copy.deepcopy(model).to(dtype)
    loss = copy.deepcopy(loss).to(dtype) if isinstance(loss, nn.Module) else loss
    x, y = (value.to(dtype) if value.is_floating_point() else value for value in (x, y))
    loss(model(x), y).backward()
    named = dict(model.named_parameters())
    return torch.cat([named[name].grad.reshape(-1) for name in names]).double().numpy()


def distance(a, b):
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def worst_gradient(model, loss, example, bundle, theta):
    """Return the largest distance of ONNX Runtime's gradient to float64 torch's in the five nearest draws, and how many count.

    A draw counts where torch's float32 agrees with its float64; ONNX Runtime may still be on another side of a kink there.
    """
    names, compiled = [p.name for p in bundle.manifest.parameters], OrtModel(bundle)
    found = []
    for _ in range(DRAWS):
        x, y = example(8)
        exact, single = (plain_gradient(model, loss, names, x, y, dtype) for dtype in (torch.float64, torch.float32))
        if distance(single, exact) <= TOLERANCE:
            found.append(distance(compiled.grad(theta, x.numpy(), y.numpy())[1].astype(np.float64), exact))
    return max(sorted(found)[:COUNTING], default=float("nan")), len(found)


def learns(executor, theta, x, y):
    """Return whether 15 steps along the gradient lower the loss, at one of three step sizes."""
    first, _ = executor.grad(theta, x, y)
    for step in (0.1, 0.01, 0.001):
        moved = theta
        for _ in range(15):
            gradient = executor.grad(moved, x, y)[1]
            moved = moved - np.float32(step) * gradient / np.float32(max(float(np.linalg.norm(gradient)), 1.0))
        if executor.grad(moved, x, y)[0] < first:
            return True
    return False


def measured(name):
    """Return the row of a model: coordinates, bytes of its gradient graph, CPU seconds to compile, gradient, executors."""
    torch.manual_seed(0)
    model, loss, example, kind = ZOO[name]()
    reference, own = copy.deepcopy(model), dict(model.named_parameters(remove_duplicate=False))
    begun = time.process_time()
    bundle = compile_task(model, loss, example, name="t", kind=kind)
    cpu_s = time.process_time() - begun
    assert all(value is own[place] for place, value in model.named_parameters(remove_duplicate=False))
    theta = flatten(reference, bundle.manifest.parameters).numpy()
    error, counted = worst_gradient(reference, loss, example, bundle, theta)
    light, (x, y) = lite_model(bundle), example(32)
    executors = {"onnxruntime": OrtModel(bundle)} | ({"numpy": light} if isinstance(light, NumpyModel) else {})
    return {
        "model": name, "coordinates": bundle.length, "graph_bytes": len(bundle.grad), "compile_cpu_s": round(cpu_s, 1),
        "gradient_error": float(f"{error:.1e}"), "draws": counted,
        "learns_on": [key for key, executor in executors.items() if learns(executor, theta, x.numpy(), y.numpy())],
        "executors": list(executors),
    }  # fmt: skip


def faults(row):
    return row["draws"] < COUNTING or not row["gradient_error"] <= TOLERANCE or row["learns_on"] != row["executors"]


@pytest.mark.slow
@pytest.mark.parametrize("name", USUAL)
def test_usual_models_compile_and_learn(name):
    row = measured(name)
    assert not faults(row), row


@pytest.mark.long
@pytest.mark.timeout(HOUR_S)
def test_the_whole_zoo_compiles_and_learns():
    rows = []
    for name in ZOO:
        rows.append(measured(name))
        record.save(RESULTS, {"models": rows}, command=["make", "long"], name="zoo")
    assert [row for row in rows if faults(row)] == []
