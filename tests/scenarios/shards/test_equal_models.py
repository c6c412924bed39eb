"""An aggregator with workers ends with the models and the clusters of one without."""

import numpy as np
import pytest

from shoal.protocol.recipe import LocalTraining
from shoal.task.manifest import Parameter
from tests.helpers.cases import with_long
from tests.helpers.fleets import grouped_data, make_fleet
from tests.helpers.tasks import logistic_bundle

INPUTS, CLASSES, DEVICES, ROUNDS = 40, 4, 6, 3
PROXIMAL = LocalTraining(epochs=0, steps=4, batch_size=0, lr=0.8, prox_mu=0.1)
STRATEGIES = {
    "fedavg": {"algorithm": "fedavg", "settings": {"discrepancy": "true"}},
    "fedavg, weights by rule rfa": {"algorithm": "fedavg", "robust": "rfa"},
    "fedavg, nnm in mode none": {"algorithm": "fedavg", "robust": "nnm", "mode": "none"},
    "fedavg under a signed permutation": {"algorithm": "fedavg", "mode": "signed-permutation"},
    "fedavg under a permutation": {"algorithm": "fedavg", "mode": "permutation"},
    "fedprox": {"algorithm": "fedprox", "local": PROXIMAL},
    "local": {"algorithm": "local"},
    "ifca": {"algorithm": "ifca", "settings": {"k": "2"}},
    "ifca that finds k": {"algorithm": "ifca", "rounds": 7},
    "fesem": {"algorithm": "fesem", "settings": {"k": "2", "discrepancy": "true"}},
    "one-shot": {"algorithm": "one-shot", "settings": {"k": "2"}},
    "cfl, alg. 5": {"algorithm": "cfl", "settings": {"validate": "false", "eps1": "5", "trace": "true"}},
    "cfl with trials": {"algorithm": "cfl", "settings": {"eps1": "5", "trial_rounds": "1"}, "rounds": 5},
    "fedgroup by edc": {"algorithm": "fedgroup", "settings": {"groups": "2"}},
    "fedgroup by madc": {"algorithm": "fedgroup", "settings": {"groups": "2", "measure": "madc", "start": "origin"}},
    "fedgroup by rcc": {"algorithm": "fedgroup", "settings": {"groups": "2", "rcc": "true"}},
    "fedgroup between groups": {"algorithm": "fedgroup", "settings": {"groups": "2", "eta_g": "0.1"}},
    "fedgroup that finds the groups": {"algorithm": "fedgroup", "rounds": 7},
    "fedgrouprox": {"algorithm": "fedgrouprox", "settings": {"groups": "2"}, "local": PROXIMAL},
}
REPEATED = (
    *("fedavg under a permutation", "fedavg under a signed permutation", "fedprox", "local", "ifca"),
    *("cfl, alg. 5", "fedgroup by edc", "fedgroup between groups", "fedgrouprox"),
    *("fedavg, weights by rule rfa", "fedgroup by rcc", "fedgroup by madc", "fedgroup that finds the groups"),
)
"""Rounds like those of another one: `make long` has them too."""
SPLITTING = ("cfl, alg. 5", "fedgroup by edc", "fedgroup by madc", "one-shot")


def outcome(root, shards, bundle=None, **options):
    data = grouped_data(DEVICES, groups=2, inputs=INPUTS, classes=CLASSES)
    with make_fleet(
        root, data, bundle=bundle or logistic_bundle(INPUTS, CLASSES), shards=shards, **{"rounds": ROUNDS, **options}
    ) as fleet:
        records = fleet.run(60)
        return {name: fleet.model(name).theta for name in fleet.stage.devices}, records


def alike(root, shards, bundle=None, **options):
    """Check that an aggregator with workers ends with the models and clusters of one without; return both runs' records."""
    models, records = outcome(root / "one", 1, bundle, **options)
    parted, found = outcome(root / "many", shards, bundle, **options)
    for device, theta in models.items():
        np.testing.assert_allclose(parted[device], theta, rtol=0, atol=1e-6)
    assert [r["clusters"] for r in found] == [r["clusters"] for r in records]
    return found, records


@pytest.mark.parametrize("shards", [pytest.param(2, marks=pytest.mark.long), 3])
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.long if name in REPEATED else ()) for name in STRATEGIES]
)
def test_every_strategy_ends_alike(tmp_path, name, shards):
    found, records = alike(tmp_path, shards, **STRATEGIES[name])
    assert [[e["kind"] for e in r["events"]] for r in found] == [[e["kind"] for e in r["events"]] for r in records]
    if name in SPLITTING:
        assert len(set(records[-1]["clusters"].values())) == 2


@pytest.mark.parametrize("algorithm", with_long(["ifca", "fedavg"], "ifca"))
def test_task_with_shared_segment_ends_alike(tmp_path, algorithm):
    """IFCA shares its weights between clusters; FedAvg, the baseline to that on the same task, has whole models."""
    layout = (Parameter("weight", (INPUTS, CLASSES), "shared"), Parameter("bias", (CLASSES,), "cluster"))
    bundle = logistic_bundle(INPUTS, CLASSES, parameters=layout)
    alike(tmp_path, 3, bundle, algorithm=algorithm, settings={"k": "2"} if algorithm == "ifca" else {})


@pytest.mark.parametrize("precision", ["float16", "int8"])
def test_vectors_of_few_bits_travel_in_parts(tmp_path, precision):
    options = {"algorithm": "fedavg", "precision_up": precision, "precision_down": precision}
    parted, records = outcome(tmp_path, 3, **options)
    assert len({theta.tobytes() for theta in parted.values()}) == 1
    assert [len(r["clusters"]) for r in records] == [DEVICES] * (ROUNDS + 1)
