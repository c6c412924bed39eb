"""A run that is resumed from its checkpoint gives the bits of an uninterrupted one."""

import dataclasses

import numpy as np
import pytest

from shoal.errors import IntegrityError
from shoal.protocol.recipe import LocalTraining
from shoal.simulation.data import Population, Shard
from shoal.simulation.engine import checkpoint
from shoal.simulation.engine.fleet import sim_options
from shoal.simulation.engine.simulate import simulate
from shoal.simulation.trainers.networks import Softmax

RECIPE = LocalTraining(epochs=2, batch_size=5, lr=0.3)
CASES = {
    "fedavg": {},
    "ifca": {"k": "2", "restarts": "2", "restart_rounds": "3"},
    "cfl": {"validate": "off", "eps1": "0.9", "cool_down": "1"},
    "fedgroup": {"groups": "2", "alpha": "2"},
    "fesem": {"k": "2"},
}


def population(seed=3):
    """Return eight devices of two groups with opposite labels."""
    rng = np.random.default_rng(seed)

    def shards(n):
        shards = []
        for device in range(8):
            x = rng.normal(size=(n, 4)).astype(np.float32)
            y = (x[:, 0] > 0).astype(np.int64)
            shards.append(Shard(x, 1 - y if device % 2 else y))
        return tuple(shards)

    return Population(shards(20), shards(6), shards(6), tuple(d % 2 for d in range(8)))


def run(algorithm, rounds, path=None, seen=None, mask="permutation"):
    options = sim_options(
        rounds=rounds, local=RECIPE, seed=5, mode=mask, participation=0.8, checkpoint=path, deferred=False
    )
    return simulate(algorithm, CASES[algorithm], population(), Softmax(4, 2), options, watch=seen)


class StoppedError(Exception):
    """Simulates the end of the process."""


@pytest.fixture
def path(tmp_path, monkeypatch):
    """The place of a checkpoint that is written in every round."""
    monkeypatch.setattr(checkpoint, "SAVE_EVERY_S", 0.0)
    return tmp_path / "run.npz"


@pytest.mark.parametrize(("algorithm", "mask"), [(a, mask) for a in CASES for mask in ("none", "permutation")])
def test_stopped_run_goes_on_to_same_bits(algorithm, mask, path):
    whole = run(algorithm, 8, mask=mask)
    seen = []

    def stop(observation):
        seen.append(observation)
        if len(seen) == 6:
            raise StoppedError

    with pytest.raises(StoppedError):
        run(algorithm, 8, path, stop, mask=mask)
    again = run(algorithm, 8, path, mask=mask)
    untimed = [dataclasses.replace(r, seconds_cpu=0.0) for r in whole.history]
    assert [dataclasses.replace(r, seconds_cpu=0.0) for r in again.history] == untimed
    assert again.clusters == whole.clusters
    assert again.events == whole.events
    assert (again.all_rounds, again.restart_rounds) == (whole.all_rounds, whole.restart_rounds)
    assert again.thetas.keys() == whole.thetas.keys()
    for model, theta in whole.thetas.items():
        assert theta.tobytes() == again.thetas[model].tobytes()


def test_another_runs_checkpoint_is_refused(path):
    """Also of the same plan and names: only the samples tell the two apart."""
    options = sim_options(rounds=3, local=RECIPE, seed=5, checkpoint=path)
    simulate("fedavg", {}, population(), Softmax(4, 2), options)
    for other, data in ((dataclasses.replace(options.recipe, rounds=4), population()), (options.recipe, population(4))):
        with pytest.raises(IntegrityError, match="another run"):
            simulate("fedavg", {}, data, Softmax(4, 2), dataclasses.replace(options, recipe=other))
    simulate("fedavg", {}, population(), Softmax(4, 2), options)


@pytest.mark.parametrize("harm", ["cut", "text", "empty"])
def test_a_damaged_checkpoint_is_named(harm, path):
    run("fedavg", 3, path)
    data = path.read_bytes()
    path.write_bytes({"cut": data[: len(data) // 2], "text": b"hello", "empty": b""}[harm])
    with pytest.raises(IntegrityError, match="damaged"):
        run("fedavg", 3, path)
