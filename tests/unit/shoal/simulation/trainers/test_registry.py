"""Every trainer against the plain loop, and the loop against the code that real devices run."""

import dataclasses

import numpy as np
import pytest
import torch

from edge_client.learning.data import Dataset
from edge_client.learning.training import train
from shoal.errors import TaskError, UsageError
from shoal.protocol.documents import LocalSettings
from shoal.simulation.data import Shard, shards_of
from shoal.simulation.trainers.batched import Batched
from shoal.simulation.trainers.blocks import Shelf, batch_rows
from shoal.simulation.trainers.dual import Dual
from shoal.simulation.trainers.loop import Loop
from shoal.simulation.trainers.networks import Cnn, Linear, Lstm, OneHidden, Softmax, origins, sample_losses, unflatten
from shoal.simulation.trainers.registry import make_trainer
from shoal.task.manifest import LocalTraining

pytestmark = pytest.mark.torch
INPUTS, CLASSES = 12, 3
NETWORKS = {
    "linear": Linear(INPUTS),
    "linear with bias": Linear(INPUTS, bias=True),
    "softmax": Softmax(INPUTS, CLASSES),
    "one hidden": OneHidden(INPUTS, 7, CLASSES),
}
PLAIN = LocalSettings(epochs=0, steps=4, batch_size=0, lr=0.1, lr_decay=1.0, momentum=0.0, clip=0.0, prox_mu=0.0)
RECIPES = {
    "full batch": PLAIN,
    "full batch, decay": dataclasses.replace(PLAIN, lr_decay=0.5),
    "full batch, proximal, momentum": dataclasses.replace(PLAIN, prox_mu=0.7, momentum=0.9),
    "full batch, proximal": dataclasses.replace(PLAIN, prox_mu=0.7),
    "mini-batch": dataclasses.replace(PLAIN, epochs=3, batch_size=5, steps=0),
    "mini-batch by steps": dataclasses.replace(PLAIN, epochs=0, batch_size=5, steps=7),
    "mini-batch, proximal": dataclasses.replace(PLAIN, epochs=3, batch_size=4, prox_mu=0.5),
    "mini-batch, all of it": dataclasses.replace(PLAIN, epochs=3, batch_size=4, prox_mu=0.5, momentum=0.8),
    "batches larger than the data": dataclasses.replace(PLAIN, epochs=3, batch_size=64),
}
CLIPPED = dataclasses.replace(PLAIN, epochs=2, batch_size=5, clip=0.05, momentum=0.5, prox_mu=0.3)
SIZES = {"equal": (9, 9, 9, 9, 9), "unequal": (4, 11, 1, 9, 8)}


def shards(network, sizes, seed=0):
    rng = np.random.default_rng(seed)
    made = []
    for n in sizes:
        x = rng.standard_normal((n, INPUTS)).astype(np.float32)
        y = rng.standard_normal(n).astype(np.float32) if network.kind == "regression" else rng.integers(0, CLASSES, n)
        made.append(Shard(x, y))
    return made


def orders(count):
    return [np.random.default_rng([5, i]) for i in range(count)]


def trained(trainer, shelf, models, local, round_=3):
    count = len(shelf)
    start = np.arange(count) % len(models)
    with torch.no_grad():
        return trainer.train(models, start, shelf.block(np.arange(count)), orders(count), local, round_)


def assert_same(found, expected):
    rows = expected.rows()
    torch.testing.assert_close(found.rows(), rows, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(found.losses, expected.losses, rtol=1e-5)
    np.testing.assert_allclose(found.norms(), rows.norm(dim=1).numpy(), rtol=1e-4)
    weights = np.array([2.0, 0.5, 3.0], np.float32)
    for places in (np.array([0, 2, 4]), np.array([1, 2, 3])):
        for weight in (None, weights):
            total = torch.ones(rows.shape[1])
            found.add_to(total, places, weight)
            scale = torch.ones(3) if weight is None else torch.from_numpy(weight)
            torch.testing.assert_close(total, 1 + scale @ rows[places], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("sizes", SIZES.values(), ids=SIZES)
@pytest.mark.parametrize("local", RECIPES.values(), ids=RECIPES)
@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_batched_and_dual_train_as_the_loop_does(network, local, sizes):
    """Updates, losses, norms and weighted sums agree to 1e-5 for all networks, recipes and sizes."""
    shelf = Shelf(shards(network, sizes))
    models = torch.from_numpy(origins(network, 2, 1))
    expected = trained(Loop(network), shelf, models, local)
    assert float(expected.rows().abs().max()) > 1e-3
    assert_same(trained(Batched(network), shelf, models, local), expected)
    dual = Dual(network, shelf, always=True)
    assert_same(trained(dual, shelf, models, local), expected)
    assert_same(trained(dual, shelf, models, local), expected)  # from kept kernels


@pytest.mark.parametrize("network", NETWORKS.values(), ids=NETWORKS)
def test_batched_clips_as_the_loop_does(network):
    """Clipping by the global norm, after the proximal term and before momentum."""
    shelf = Shelf(shards(network, SIZES["unequal"]))
    models = torch.from_numpy(origins(network, 2, 1))
    expected = trained(Loop(network), shelf, models, CLIPPED)
    assert_same(trained(Batched(network), shelf, models, CLIPPED), expected)
    assert_same(trained(Dual(network, shelf), shelf, models, CLIPPED), expected)
    with pytest.raises(UsageError, match="clip"):
        trained(Dual(network, shelf, always=True), shelf, models, CLIPPED)


class TorchBackend:
    """A task's loss and gradient by autograd, in place of ONNX Runtime's."""

    def __init__(self, network):
        self.network = network

    def grad(self, theta, x, y):
        with torch.enable_grad():
            leaf = torch.from_numpy(theta.copy()).requires_grad_()
            outputs = self.network.forward(unflatten(self.network, leaf), torch.from_numpy(x))
            loss = sample_losses(self.network.kind, outputs, torch.from_numpy(y))[0].mean()
            (gradient,) = torch.autograd.grad(loss, leaf)
        return float(loss.detach()), gradient.numpy().copy()


@pytest.mark.parametrize("local", [*RECIPES.values(), CLIPPED], ids=[*RECIPES, "clipped"])
def test_the_loop_trains_as_a_real_device_does(local):
    """`training.train` with the same gradients gives the same update: decay, prox, clip, momentum, batches."""
    network = NETWORKS["one hidden"]
    data = shards(network, SIZES["unequal"])
    shelf = Shelf(data)
    models = torch.from_numpy(origins(network, 1, 1))
    expected = trained(Loop(network), shelf, models, local, round_=3)
    settings = LocalTraining(**{f.name: getattr(local, f.name) for f in dataclasses.fields(LocalSettings)})
    for i, shard in enumerate(data):
        device = train(
            models[0].numpy(),
            Dataset(shard.x, shard.y),
            settings,
            TorchBackend(network),
            orders(len(data))[i],
            2,
            lambda: False,
        )
        np.testing.assert_allclose(expected.rows()[i].numpy(), device.delta, rtol=1e-4, atol=1e-6)
        assert expected.losses[i] == pytest.approx(device.mean_loss, rel=1e-5)


def test_batches_follow_permutations_until_the_steps_are_used_up():
    """Seven steps of 4 on 10 samples: two passes of 3 batches and one batch more."""
    rng, same = np.random.default_rng(1), np.random.default_rng(1)
    local = dataclasses.replace(PLAIN, batch_size=4, steps=7)
    batches = batch_rows(10, local, rng)
    assert [len(b) for b in batches] == [4, 4, 2, 4, 4, 2, 4]
    np.testing.assert_array_equal(np.concatenate(batches[:3]), same.permutation(10))


def test_equal_shards_of_one_array_are_not_copied():
    """A stack of consecutive views is the array itself, and so is a block of consecutive devices."""
    x, y = np.zeros((4, 3, INPUTS), np.float32), np.zeros((4, 3), np.int64)
    block = Shelf(shards_of(x, y)).block(np.array([1, 2]))
    x[1, 0, 0] = 7.0
    assert float(block.x[0, 0, 0]) == 7.0


def test_parts_keep_padding_small_and_hold_every_device_once():
    """Blocks respect both limits, never mix sizes beyond the ratio, and together are all the devices asked for."""
    sizes = np.random.default_rng(0).integers(1, 400, 60)
    shelf = Shelf([Shard(np.zeros((n, 2), np.float32), np.zeros(n, np.int64)) for n in sizes])
    ids = np.arange(5, 60)
    parts = shelf.parts(ids, 7, 800)
    assert sorted(np.concatenate(parts)) == list(ids)
    for part in parts:
        assert len(part) <= 7
        assert len(part) * sizes[part].max() <= 800 or len(part) == 1
        assert sizes[part].max() <= 2 * max(sizes[part].min(), 8)


def test_a_step_size_that_diverges_is_an_error():
    """Losses that are no longer finite don't turn into updates."""
    network = NETWORKS["linear"]
    shelf = Shelf(shards(network, SIZES["equal"]))
    models = torch.from_numpy(origins(network, 1, 1))
    local = dataclasses.replace(PLAIN, steps=400, lr=1e4)
    for trainer in (Loop(network), Batched(network), Dual(network, shelf, always=True)):
        with pytest.raises(TaskError, match="diverged"):
            trained(trainer, shelf, models, local)


@pytest.mark.parametrize(
    "network",
    [
        *NETWORKS.values(),
        Cnn(side=16, filters=(2, 3), dense=(9,), kernel=3),
        Cnn(channels=2, side=8, filters=(3,), dense=(), kernel=5, same=True),
        Lstm(11, 4, 5, 2),
    ],
    ids=lambda n: type(n).__name__,
)
def test_networks_agree_with_their_modules(network):
    """Weights in the order of the module's parameters gives the module's own outputs; the seed decides the weights."""
    theta = network.init(3)
    assert theta.shape == (network.length,)
    assert theta.dtype == np.float32
    np.testing.assert_array_equal(theta, network.init(3))
    assert not np.array_equal(theta, network.init(4))
    torch.manual_seed(3)
    module = network.module()
    assert tuple(tuple(p.shape) for p in module.parameters()) == network.shapes
    generator = torch.Generator().manual_seed(0)
    if isinstance(network, Lstm):
        x = torch.randint(0, 11, (4, 6), generator=generator)
    elif isinstance(network, Cnn):
        x = torch.randn(4, network.channels * network.side**2, generator=generator)
    else:
        x = torch.randn(4, INPUTS, generator=generator)
    with torch.no_grad():
        torch.testing.assert_close(network.forward(unflatten(network, torch.from_numpy(theta)), x), module(x))


def test_origins_differ_from_each_other_and_follow_the_seed():
    """The k starting models for IFCA."""
    network = NETWORKS["softmax"]
    models = origins(network, 3, 5)
    np.testing.assert_array_equal(models, origins(network, 3, 5))
    assert len({m.tobytes() for m in models}) == 3


def test_trainers_by_name():
    """The dual form needs a dense network; auto finds a trainer for any."""
    cnn = Cnn(side=16)
    shelf = Shelf([Shard(np.zeros((2, 256), np.float32), np.zeros(2, np.int64))])
    assert make_trainer("auto", cnn, shelf).limits(1)
    with pytest.raises(UsageError, match="dual"):
        make_trainer("dual", cnn, shelf)
    with pytest.raises(UsageError, match="no trainer"):
        make_trainer("fast", cnn, shelf)
