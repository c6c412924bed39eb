"""Simulated runs on sums only: the same models, no figure of a single device, and the choices that a keeper refuses."""

from __future__ import annotations

import numpy as np
import pytest
from torch import nn

import shoal
from shoal.errors import ConfigError, WireError


def partitions(devices, groups=1, seed=0):
    rng = np.random.default_rng(seed)
    concept, found = rng.normal(size=(10, 4)) * 2, []
    for i in range(devices):
        x = rng.normal(size=(60, 10)).astype(np.float32)
        y = ((x @ concept).argmax(1) + i % groups) % 4
        found.append({"train": (x[:40], y[:40]), "test": (x[40:], y[40:])})
    return found


def run(devices=8, groups=1, **options):
    chosen = {"strategy": "fedavg", "rounds": 4, "weighting": "uniform", "robust": "off", **options}
    return shoal.simulate(lambda: nn.Linear(10, 4), partitions(devices, groups), **chosen)


def test_models_are_those_of_a_clear_run():
    for name, value in run(secure=True).models[0].state_dict().items():
        assert (value - run().models[0].state_dict()[name]).abs().max() < 1e-4


def test_short_numbers_cost_nothing():
    whole, short = run(secure=True), run(secure=True, precision="float16")
    for name, value in short.models[0].state_dict().items():
        assert 0 < (value - whole.models[0].state_dict()[name]).abs().max() < 1e-2


@pytest.mark.parametrize("precision", ["float32", "float16"])
def test_ifca_finds_its_groups(precision):
    found = run(12, 2, strategy="ifca", settings={"k": 2}, rounds=15, secure=True, precision=precision)
    assert [int(c) for c in found.clusters[::2]] == [int(found.clusters[0])] * 6
    assert len(set(map(int, found.clusters))) == 2


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"strategy": "cfl", "settings": {"validate": "off"}}, ConfigError, "compares single updates"),
        ({"strategy": "ifca", "settings": {"k": "auto"}}, ConfigError, "compares single updates"),
        ({"robust": "rfa"}, WireError, "robust=off"),
        ({"mask": "permutation"}, WireError, "mode=rotation"),
        ({"precision": "int8"}, WireError, "float32 or float16, not int8"),
        ({"min_contributors": 2}, WireError, "min_contributors"),
    ],
)
def test_what_a_keeper_refuses(options, error, match):
    with pytest.raises(error, match=match):
        run(secure=True, **options)
