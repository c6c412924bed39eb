"""Runs by `shoal.simulate`: groups found under every mask, every kind of model and task, and the refusals of bad input."""

import re
import sys

import numpy as np
import pytest
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.preprocessing import StandardScaler
from torch import nn

import shoal
from aggregator.strategies.registry import STRATEGIES
from crypto.mask.modes.registry import MODES
from shoal.errors import ConfigError, DataError, TaskError, UsageError
from shoal.simulation.engine.metrics import adjusted_rand
from tests.helpers.cases import with_long

pytestmark = pytest.mark.torch
TRUTH = [0] * 5 + [1] * 5


def cancer(seed=0):
    """Ten devices with scikit-learn's breast cancer data, standardised; the first five have their labels flipped."""
    x, y = load_breast_cancer(return_X_y=True)
    partitions = shoal.split(StandardScaler().fit_transform(x), y, "iid", devices=10, seed=seed)
    for partition in partitions[:5]:
        for share, (inputs, labels) in partition.items():
            partition[share] = (inputs, 1 - labels)
    return partitions


def plain(devices=4, samples=20, shape=(6,), classes=3, seed=0):
    """Devices with one concept: the label is the largest of the first values."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((devices * samples, *shape)).astype(np.float32)
    y = x.reshape(len(x), -1)[:, :classes].argmax(1)
    return shoal.split(x, y, "iid", devices=devices, seed=seed)


def stripes(devices=4, samples=40):
    """Noisy images of 8x8 with horizontal stripes, vertical ones or none."""
    rng = np.random.default_rng(0)
    y = np.arange(devices * samples) % 3
    x = rng.standard_normal((len(y), 1, 8, 8)) / 2
    x[y == 0, 0, ::2] += 1
    x[y == 1, 0, :, ::2] += 1
    return shoal.split(x, y, "iid", devices=devices)


def targets(devices=4, seed=0, shape=()):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((devices * 40, 5)).astype(np.float32)
    y = (x @ rng.standard_normal((5, *shape))).astype(np.float32) + 1
    return shoal.split(x, y, "iid", devices=devices)


def hidden_regression():
    return nn.Sequential(nn.Linear(5, 16), nn.ReLU(), nn.Linear(16, 1))


def shifted(seed=0):
    """Ten devices with one concept; on half of them each label is called by the next one's name."""
    rng = np.random.default_rng(seed)
    weights, x = rng.standard_normal((8, 4)), rng.standard_normal((1200, 8)).astype(np.float32)
    partitions = shoal.split(x, (x @ weights).argmax(1), "iid", devices=10, seed=seed)
    for partition in partitions[5:]:
        for share, (inputs, labels) in partition.items():
            partition[share] = (inputs, (labels + 1) % 4)
    return partitions


def softmax():
    return nn.Linear(6, 3)


@pytest.mark.parametrize("strategy", ["ifca", "cfl"])
def test_mask_modes_give_the_same_clusters(strategy):
    def run(mode):
        settings = {"k": 2} if strategy == "ifca" else {}
        return shoal.simulate(
            lambda: nn.Linear(30, 2), cancer(), strategy=strategy, settings=settings, rounds=14, mask=mode
        )

    clear = run("none")
    assert adjusted_rand(clear.clusters.tolist(), TRUTH) == 1.0
    for mode in ("default", *MODES):
        np.testing.assert_array_equal(run(mode).clusters, clear.clusters)


def test_cfl_defaults_find_flipped_labels():
    result = shoal.simulate(lambda: nn.Linear(30, 2), cancer(), rounds=20)
    assert adjusted_rand(result.clusters.tolist(), TRUTH) == 1.0
    assert result.accuracy.shape == result.loss.shape == result.clusters.shape == (10,)
    assert result.accuracy.mean() > 0.9
    assert [e.kind for e in result.events] == ["trial-opened", "split"]
    assert [r.round for r in result.history] == list(range(1, 21))
    assert result.history[-1].clusters == 2
    assert result.history[-1].sizes == (5, 5)


@pytest.mark.parametrize("seed", [0, 1])
def test_cfl_finds_quickly_learned_groups(seed):
    """After training, the model of either half and the undivided one are alike: their margins are noise."""
    local = {"epochs": 40, "batch_size": 10, "lr": 1.0}
    found = shoal.simulate(nn.Linear(8, 4), shifted(seed), rounds=6, seed=seed, local=local)
    assert adjusted_rand(found.clusters, TRUTH) == 1.0


@pytest.mark.parametrize(
    ("sides", "seed"),
    [((3, 2), 3), *(pytest.param(s, n, marks=pytest.mark.long) for s in ((3, 2), (3, 3), (2, 2)) for n in (0, 2, 4))],
)
def test_cfl_splits_few_devices_if_allowed(sides, seed):
    """A boundary that is no plane, with 24 validation samples a device: one margin of two is easily twice the other."""
    rng = np.random.default_rng(seed + 77)
    x = rng.uniform(-2, 2, (120 * sum(sides), 2)).astype(np.float32)
    parts = shoal.split(x, (np.sin(2 * x[:, 0]) > x[:, 1]).astype(int), "iid", devices=sum(sides), seed=seed)
    for part in parts[sides[0] :]:
        part |= {share: (x, 1 - y) for share, (x, y) in part.items()}
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    found = shoal.simulate(network, parts, strategy="cfl", rounds=40, seed=seed, min_contributors=2)
    assert adjusted_rand(found.clusters.tolist(), [0] * sides[0] + [1] * sides[1]) == 1.0


def test_the_default_mask_is_the_fleets(monkeypatch):
    """`default` follows Recipe, not a constant of its own."""
    seen = []
    build = shoal.FedAvg.__init__

    def spy(self, run, *rest):
        seen.append(
            (
                run.recipe.mode,
                run.recipe.min_contributors,
                run.recipe.norm_limit,
                run.recipe.weight_cap,
                run.recipe.robust,
            )
        )
        build(self, run, *rest)

    monkeypatch.setattr(shoal.FedAvg, "__init__", spy)
    shoal.simulate(softmax(), plain(), strategy="fedavg", rounds=1)
    assert set(seen) == {("rotation", 3, 1000.0, 3.0, "filter")}


def test_rule_and_precisions_are_the_callers():
    ways = ({}, {"precision": "int8"}, {"precision_down": "int8"}, {"robust": "rfa"})
    runs = [shoal.simulate(softmax, plain(), strategy="fedavg", rounds=3, **way) for way in ways]
    assert len({run.loss.tobytes() for run in runs}) == 4
    assert np.allclose(runs[1].loss, runs[0].loss, rtol=0.05)


def test_equal_seeds_give_equal_results():
    one, same, other = (
        shoal.simulate(softmax, plain(), strategy="fedavg", rounds=3, seed=s, participation=0.8) for s in (1, 1, 2)
    )
    assert one.history == same.history
    assert one.history != other.history


def test_instance_starts_and_stays_as_it_is():
    """An instance starts with its own weights and is left alone."""
    model = softmax()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    result = shoal.simulate(model, plain(), strategy="fedavg", rounds=1, local={"lr": 1e-7})
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    for name, value in result.models[0].state_dict().items():
        torch.testing.assert_close(value, before[name], rtol=0, atol=1e-5)


def test_models_are_those_measured():
    """Each device's model, from `models`, gives its accuracy and loss."""
    partitions = cancer()
    result = shoal.simulate(nn.Linear(30, 2), partitions, strategy="ifca", settings={"k": 2}, rounds=10)
    assert sorted(result.models) == [0, 1]
    for i, partition in enumerate(partitions):
        x, y = partition["test"]
        with torch.no_grad():
            outputs = result.models[result.clusters[i]](torch.from_numpy(x.astype(np.float32)))
        assert result.accuracy[i] == pytest.approx((outputs.argmax(1).numpy() == y).mean())
        loss = nn.functional.cross_entropy(outputs, torch.from_numpy(y))
        assert result.loss[i] == pytest.approx(float(loss), abs=1e-4)


def cnn():
    return nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(36, 8), nn.ReLU(), nn.Linear(8, 3)
    )


class Residual(nn.Module):
    """Nothing that the simulator has a network of its own for: a scalar parameter, a norm and a depthwise convolution."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.0))
        self.mix = nn.Conv2d(2, 2, 3, padding=1, groups=2)
        self.norm = nn.GroupNorm(1, 2)
        self.out = nn.Linear(2 * 16, 3)

    def forward(self, x):
        return self.out((x + self.scale * self.norm(self.mix(x))).flatten(1))


class Words(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.lstm = nn.LSTM(4, 6, batch_first=True)
        self.out = nn.Linear(6, 7)

    def forward(self, x):
        return self.out(self.lstm(self.embedding(x))[0])


def counting():
    """Devices whose next symbol is one more."""
    text = (np.random.default_rng(0).integers(0, 7, (120, 1)) + np.arange(9)) % 7
    return shoal.split(text[:, :-1], text[:, 1:], "iid", devices=3)


@pytest.mark.parametrize(
    ("model", "partitions", "options", "least"),
    [
        (cnn, stripes(), {"rounds": 10, "local": {"epochs": 5}}, 0.9),
        (Residual, plain(samples=60, shape=(2, 4, 4)), {"rounds": 15}, 0.7),
        (Words, counting(), {"rounds": 15, "task": "sequence", "local": {"lr": 1}}, 0.9),
    ],
    ids=["convolutions", "any other module", "a sequence"],
)
def test_modules_learn(model, partitions, options, least):
    result = shoal.simulate(model, partitions, strategy="fedavg", **options)
    assert result.accuracy.mean() > least
    assert type(result.models[0]) is type(model())


@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (lambda: nn.Linear(5, 1), ()),
        (lambda: nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 1)), ()),
        (lambda: nn.Linear(5, 2), (2,)),
    ],
    ids=["one layer", "two layers", "two targets"],
)
def test_regression_has_loss_and_no_accuracy(model, shape):
    result = shoal.simulate(
        model, targets(shape=shape), strategy="fedavg", rounds=40, task="regression", local={"lr": 0.05}
    )
    assert result.accuracy is None
    assert result.loss.shape == (4,)
    assert result.loss.max() < 0.3
    assert result.history[-1].accuracy is None
    assert result.history[-1].test_loss == pytest.approx(result.loss.mean())


FILE = """
import torch
from torch import nn

def make():
    def loss(outputs, y):
        return (outputs - y).abs().mean()
    def example(n):
        return torch.randn(n, 5), torch.randn(n, 1)
    return nn.Linear(5, 1), loss, example, "regression", {"lr": 0.05}
"""


def test_task_file_brings_task_and_loss(tmp_path):
    """The kind, the local training and an absolute error come from the file."""
    (tmp_path / "model.py").write_text(FILE)
    partitions = targets(shape=(1,))
    result = shoal.simulate(f"{tmp_path}/model.py:make", partitions, strategy="fedavg", rounds=5)
    assert result.accuracy is None
    x, y = partitions[0]["test"]
    with torch.no_grad():
        errors = (result.models[0](torch.from_numpy(x)).numpy() - y).__abs__()
    assert result.loss[0] == pytest.approx(errors.mean(), abs=1e-4)


@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_every_strategy_runs(strategy):
    local = {"prox_mu": 0.1} if "prox" in strategy else {}
    result = shoal.simulate(softmax, plain(devices=9), strategy=strategy, rounds=3, local=local)
    assert set(result.clusters.tolist()) <= set(result.models)
    assert len(result.history) == 3


class CoordinateMedian(shoal.FedAvg):
    """Looks at single coordinates, which a rotation mixes."""

    name = "coordinate-median"
    modes = frozenset({"none", "permutation", "signed-permutation"})

    def mean(self, contributions, _weighting, _cap=0.0):
        return np.median([c.row for c in contributions], axis=0).astype(np.float32)


def test_an_own_strategy_is_used():
    """One poisoned device of five moves a mean, and not a median."""
    partitions = plain(devices=5, samples=60)
    x, y = partitions[0]["train"]
    partitions[0]["train"] = (x, (y + 1) % 3)
    local = {"epochs": 5}
    robust = shoal.simulate(softmax, partitions, strategy=CoordinateMedian, mask="permutation", rounds=5, local=local)
    mean = shoal.simulate(softmax, partitions, strategy=shoal.FedAvg, rounds=5, local=local)
    assert robust.loss[1:].mean() < mean.loss[1:].mean()


def test_regressions_finish_is_a_loss():
    """The finish of a regression is the loss of the model that each device chose."""
    partitions = targets(6)
    for mirrored in partitions[3:]:
        for share in ("train", "validation", "test"):
            mirrored[share] = mirrored[share][0], -mirrored[share][1]
    del partitions[1]["test"]
    result = shoal.simulate(nn.Linear(5, 1), partitions, strategy="fedavg", rounds=20, task="regression")
    assert np.isnan(result.personal).tolist() == [False, True, *[False] * 4]
    assert np.nanmax(result.personal) < np.nanmin(result.loss) / 2, "one model can't predict both signs"


def test_no_test_share_no_accuracy():
    """Devices without a test share have no accuracy; the finish needs no share, and leaves torch's threads."""
    threads, partitions = torch.get_num_threads(), plain()
    del partitions[1]["test"], partitions[2]["validation"]
    result = shoal.simulate(softmax, partitions, strategy="fedavg", rounds=2)
    for figures in (result.accuracy, result.loss, result.personal):
        assert np.isnan(figures).tolist() == [False, True, False, False]
    assert result.personal[2] == result.accuracy[2]
    assert torch.get_num_threads() == threads
    untested = shoal.simulate(softmax, [{"train": p["train"]} for p in partitions], strategy="fedavg", rounds=1)
    assert np.isnan(untested.accuracy).all()
    assert untested.history[0].accuracy is None


def test_unfit_devices_finish_with_their_own():
    """FedAvg on two opposite halves is right half of the time; with the finish devices are mostly right.

    A weight adds Ditto's model and a senseless one is refused.
    """
    model = nn.Linear(30, 2)
    result, pulled = (
        shoal.simulate(model, cancer(), strategy="fedavg", rounds=3, **more) for more in ({}, {"personal": 0.1})
    )
    assert result.accuracy.mean() < 0.7
    assert result.personal.shape == (10,)
    assert result.personal.mean() > 0.85
    np.testing.assert_array_equal(result.accuracy, pulled.accuracy)
    assert pulled.personal.mean() > pulled.accuracy.mean() + 0.1
    for weight in (-1, float("nan"), "much", 2e6):
        with pytest.raises(UsageError, match="personal is a weight from 0"):
            shoal.simulate(model, cancer(), strategy="fedavg", rounds=3, personal=weight)


@pytest.mark.parametrize("settings", [{"precision": "int8"}, *with_long([{"strategy": "cfl"}, {"strategy": "local"}])])
def test_diverging_device_ends_no_run(settings):
    """A device whose training diverges is named and ends no run."""
    partitions = targets(7)
    x, y = partitions[3]["train"]
    partitions[3]["train"] = x * np.float32(1e6), y
    chosen = {"strategy": "fedavg", "rounds": 12, "task": "regression", **settings}
    result = shoal.simulate(nn.Linear(5, 1), partitions, **chosen)
    found = [(event.round, event.detail) for event in result.events if event.kind == "training-diverged"]
    assert found == [(1, {"device": "dev-0003"})]
    others = [0, 1, 2, 4, 5, 6]
    alone = shoal.simulate(
        nn.Linear(5, 1), [partitions[i] for i in others], strategy="fedavg", rounds=1, task="regression"
    )
    assert (result.loss[others] < alone.loss).all(), "the others go on training"
    assert np.isfinite(result.personal).all()


def two_relations(unit=1.0):
    """Eight devices; on half of them the targets have the other sign."""
    partitions = targets(8, seed=3)
    for i, partition in enumerate(partitions):
        for share, (x, y) in partition.items():
            partition[share] = x, np.float32(unit) * (y if i < 4 else 2 - y)
    return partitions


def test_the_owner_may_allow_means_of_two():
    result = shoal.simulate(softmax, plain()[:2], strategy="fedavg", rounds=1, min_contributors=2)
    assert result.clusters.tolist() == [0, 0]


def test_any_other_module_finishes_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3))
    result = shoal.simulate(model, plain(), strategy="fedavg", rounds=1, local={"lr": 0.5})
    assert result.personal.mean() >= result.accuracy.mean()


@pytest.mark.parametrize(
    "make",
    [
        pytest.param(lambda: nn.Linear(5, 1), id="linear"),
        pytest.param(hidden_regression, id="hidden layer", marks=pytest.mark.long),
    ],
)
def test_unit_of_targets_changes_nothing(make):
    """The unit of targets changes neither groups nor relative errors."""
    found = []
    for unit in (0.01, 100.0):
        partitions = two_relations(unit)
        result = shoal.simulate(make, partitions, rounds=15, task="regression", local={"lr": 0.03})
        (x, y), model = partitions[0]["test"], result.models[int(result.clusters[0])]
        error = np.square(model(torch.from_numpy(x)).detach().numpy().ravel() - y).mean()
        assert error == pytest.approx(result.loss[0], rel=1e-3), "models predict in the data's unit"
        assert result.history[-1].test_loss == pytest.approx(result.loss.mean())
        found.append((result.clusters.tolist(), result.loss / unit**2, result.personal / unit**2))
    for clusters, loss, personal in found:
        assert clusters == found[0][0]
        np.testing.assert_allclose(loss, found[0][1], rtol=0.02)
        np.testing.assert_allclose(personal, found[0][2], rtol=0.02)
    assert len(set(found[0][0][:4])) == len(set(found[0][0][4:])) == 1
    assert found[0][0][0] != found[0][0][4]


def test_result_is_trained_on_in_its_unit():
    """A result is trained further in its unit."""
    partitions = two_relations(100.0)[:4]
    first = shoal.simulate(nn.Linear(5, 1), partitions, strategy="fedavg", rounds=20, task="regression")
    (cluster,) = set(first.clusters.tolist())
    again = shoal.simulate(first.models[cluster], partitions, strategy="fedavg", rounds=1, task="regression")
    assert again.loss.max() < 1.1 * first.loss.max()
    raw = shoal.simulate(
        first.models[cluster].inner, partitions, strategy="fedavg", rounds=1, task="regression", target=(-2, 2)
    )
    assert raw.loss.max() > 10 * first.loss.max(), "targets as they are"


@pytest.mark.parametrize("strategy", ["cfl", "ifca"])
def test_false_targets_harm_nobody_else(strategy):
    """A device with false targets is named and harms no other."""
    partitions = two_relations()
    for share, (x, y) in partitions[0].items():
        partitions[0][share] = x, y * np.float32(1e6)
    chosen = {"strategy": strategy, "rounds": 15, "task": "regression", "local": {"lr": 0.03}}
    result = shoal.simulate(hidden_regression, partitions, **chosen)
    without = shoal.simulate(hidden_regression, partitions[1:], **chosen)
    named = {
        event.detail["device"] for event in result.events if event.kind in ("training-diverged", "update-left-out")
    }
    assert named == {"dev-0000"}
    assert len(set(result.clusters[1:4].tolist())) == len(set(result.clusters[4:].tolist())) == 1
    assert result.clusters[1] != result.clusters[4]
    assert (result.loss[1:] < 1.5 * without.loss).all()


def test_progress_is_a_line_a_round(capsys):
    shoal.simulate(softmax, plain(), strategy="fedavg", rounds=2, progress=True)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(":")[0] for line in lines] == ["round 1 of 2", "round 2 of 2"]


def test_torchs_state_is_left_as_it_was():
    model = softmax()
    state, threads = torch.random.get_rng_state(), torch.get_num_threads()
    shoal.simulate(model, plain(6), strategy="ifca", settings={"k": 2}, rounds=1)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.get_num_threads() == threads


def test_too_small_clusters_are_warned_of():
    """Clusters that may be too small are warned of."""
    with pytest.warns(UserWarning, match="CFL can't split 4 devices"):
        shoal.simulate(softmax, plain(), rounds=1)


class Unfinished:
    name = "unfinished"


class NoReset(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(6, 3))

    def forward(self, x):
        return x @ self.w


def permuted(devices=8, groups=4, samples=150, seed=0):
    """Devices with one concept, whose labels group g rotates by g."""
    partitions = plain(devices, samples, classes=4, seed=seed)
    for i, partition in enumerate(partitions):
        for share, (x, y) in partition.items():
            partition[share] = (x, (y + i % groups) % 4)
    return partitions


def body_and_head():
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 4))


HEADS = {"model": body_and_head, "partitions": permuted()}
BAD = {
    "no partitions": ({"partitions": []}, UsageError, "at least one mapping"),
    "label": ({"partitions": plain(6, classes=4)}, DataError, "label 3 is out of range"),
    "no validation": (
        {"partitions": [{"train": p["train"]} for p in plain()], "strategy": "cfl"},
        DataError,
        "validation shares, and partition 0 has none",
    ),
    "strategy": ({"strategy": "ifka"}, ConfigError, "no algorithm 'ifka'"),
    "instance": ({"strategy": Unfinished()}, UsageError, "strategy is a Unfinished"),
    "unfinished": ({"strategy": Unfinished}, UsageError, "Unfinished has no 'settings_type'"),
    "setting": ({"settings": {"kk": 2}}, ConfigError, "no setting 'kk'"),
    "setting's type": ({"settings": {"discrepancy": 3}}, ConfigError, "discrepancy is on or off"),
    "setting's value": ({"settings": {"k": None}}, UsageError, "settings: 'k' is None"),
    "settings": ({"settings": [1]}, UsageError, "settings is a list"),
    "local": ({"local": {"learning_rate": 1}}, UsageError, "no 'learning_rate'"),
    "local's value": ({"local": {"lr": -1}}, UsageError, "lr is a number"),
    "target": ({"target": (0, 1)}, UsageError, "a classification task has no range of targets"),
    "range": ({"model": nn.Linear(6, 1), "task": "regression", "target": 3}, UsageError, "target is 3"),
    "mask": ({"mask": "rot13"}, ConfigError, "mask mode 'rot13'"),
    "task": ({"task": "clustering"}, UsageError, "no task 'clustering'"),
    "rounds": ({"rounds": 0}, UsageError, "rounds is"),
    "seed": ({"seed": -1}, UsageError, "seed is"),
    "participation": ({"participation": 0}, UsageError, "participation is a number above 0"),
    "drawn": ({"participation": 0.3}, ConfigError, "draws 2 of 6 devices"),
    "model": ({"model": 3}, UsageError, "model is a int"),
    "function": ({"model": lambda: 3}, UsageError, "function returned a int"),
    "file": ({"model": "no/such.py:make"}, TaskError, "does not exist"),
    "inputs": ({"model": nn.Linear(7, 3)}, TaskError, "fails on samples of shape"),
    "outputs": ({"model": nn.Linear(6, 1)}, TaskError, "a classification needs"),
    "targets": ({"model": nn.Linear(6, 4), "task": "regression"}, TaskError, "a target has shape"),
    "dropout": ({"model": nn.Sequential(nn.Linear(6, 3), nn.Dropout())}, TaskError, "at random"),
    "starts": ({"model": NoReset(), "strategy": "ifca", "settings": {"k": 2}}, UsageError, "has no reset_parameters"),
    "private": ({**HEADS, "private": "2"}, UsageError, "private is the text"),
    "no private": ({**HEADS, "private": ["head"]}, TaskError, "no parameter"),
    "all private": ({**HEADS, "private": ["0", "2"]}, TaskError, "all"),
    "two models": (
        {"model": [softmax(), softmax()]},
        ConfigError,
        "^fedavg begins with 1 models, and the run has 2;",
    ),
    "unlike models": ({"model": [softmax(), nn.Linear(6, 2)], "strategy": "cfl"}, UsageError, "different layers"),
    "no models": ({"model": [softmax(), 3], "strategy": "cfl"}, UsageError, "one of the models is a int"),
    "empty models": ({"model": [], "strategy": "cfl"}, UsageError, "model is a list"),
    "strategy's mode": (
        {"strategy": CoordinateMedian},
        ConfigError,
        "coordinate-median does not work in mask mode rotation; it works in: none, permutation, signed-permutation$",
    ),
    "divergence": (
        {"model": nn.Linear(5, 1), "partitions": targets(), "task": "regression", "local": {"lr": 1e6, "epochs": 10}},
        TaskError,
        "training diverged.*; lower the learning rate, or set clip$",
    ),
    **{
        name: ({name: "int4"}, UsageError, r"precision_\w+ is one of float32, float16, int8, not 'int4'")
        for name in ("precision", "precision_down")
    },
    "few devices": (
        {"partitions": plain()[:2]},
        ConfigError,
        "min_contributors 3 wants 3 devices in each mean, and there are 2: .*; lower min_contributors",
    ),
    **{
        f"contributors {wrong!r}": ({"min_contributors": wrong}, UsageError, "min_contributors is a whole number")
        for wrong in (0, 1.5, "2")
    },
    "proximal": ({"strategy": "fedprox"}, ConfigError, "prox_mu is 0"),
}


SELF_EXPLAINING = (
    "local's value",
    "two models",
    "rounds",
    "seed",
    "participation",
    "file",
    "inputs",
    "targets",
    "precision",
    "contributors",
)
"""Their message says it all; every other one has a hint."""


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_refused(name):
    arguments, kind, text = BAD[name]
    arguments = {"model": softmax(), "partitions": plain(6), "strategy": "fedavg", "rounds": 1, **arguments}
    with pytest.raises(kind) as caught:
        shoal.simulate(arguments.pop("model"), arguments.pop("partitions"), **arguments)
    assert re.search(text, f"{caught.value}; {caught.value.hint}")
    assert caught.value.hint or name.startswith(SELF_EXPLAINING)


def test_models_above_are_candidates(monkeypatch):
    """The simulator takes the leaf, as a device does, and hands the models above it to the finish."""
    # `shoal.simulation.api.simulate` names the function.
    seen, module = [], sys.modules["shoal.simulation.api.simulate"]
    real = module.finish

    def finish(*arguments, **options):
        seen.append(options["above"])
        return real(*arguments, **options)

    monkeypatch.setattr(module, "finish", finish)
    result = shoal.simulate(lambda: nn.Linear(30, 2), cancer(), rounds=20, settings={"path": "on"})
    assert adjusted_rand(result.clusters.tolist(), TRUTH) == 1.0
    assert result.personal.mean() > 0.85
    assert [list(above) for above in seen[0]] == [["node-0"]] * 10


# ------------------------------------------------------------------------------------------------------ private layers


def test_private_head_serves_permuted_labels():
    """A private head serves groups that permute their labels."""
    options = {"strategy": "fedavg", "rounds": 15, "local": {"epochs": 3, "lr": 0.2}}
    one = shoal.simulate(body_and_head, permuted(), **options)
    own = shoal.simulate(body_and_head, permuted(), private=["2"], **options)
    assert one.accuracy.mean() < 0.5
    assert own.accuracy.mean() > 0.8
    assert (own.clusters == 0).all()
    first, second = own.device_model(0), own.device_model(1)
    assert torch.equal(first[0].weight, second[0].weight)
    assert not torch.equal(first[2].weight, second[2].weight)
    x, y = permuted()[1]["test"]
    right = (second(torch.from_numpy(x)).argmax(1).numpy() == y).mean()
    assert right == pytest.approx(own.accuracy[1])
    # The cluster's model has the values that every device began with.
    short = shoal.simulate(body_and_head, permuted(), private=["2"], **{**options, "rounds": 1})
    assert torch.equal(own.models[0][2].weight, short.models[0][2].weight)
    assert own.personal.mean() > 0.8


@pytest.mark.parametrize("strategy", with_long(["cfl", "ifca", "fedgroup", "fesem", "one-shot", "local"], "cfl"))
def test_every_strategy_takes_private_layers(strategy):
    options = {"rounds": 6, "private": ["2.bias"], "settings": {"path": True} if strategy == "cfl" else {}}
    result = shoal.simulate(body_and_head, permuted(12, 2, 40), strategy=strategy, **options)
    assert np.isfinite(result.loss).all()
    assert np.isfinite(result.personal).all()


def test_any_module_takes_private_layers():
    """A layer that the simulator has no vectorised network for, with the private layer first."""
    make = lambda: nn.Sequential(nn.Linear(6, 5), nn.Tanh(), nn.Linear(5, 3))  # noqa: E731
    result = shoal.simulate(make, plain(), strategy="fedavg", rounds=2, private=["0"])
    heads = [result.device_model(i)[2].weight for i in range(2)]
    bodies = [result.device_model(i)[0].weight for i in range(2)]
    assert torch.equal(*heads)
    assert not torch.equal(*bodies)


def changed(partitions):
    """The last device of the first group moves to the second, and a device of each group is new."""
    return [*partitions[:4], *partitions[5:], partitions[9], partitions[0], partitions[9]]


WARM = [("cfl", {}), ("fedgroup", {}), ("ifca", {}), ("one-shot", {}), ("fesem", {"k": 2})]


@pytest.mark.parametrize("seed", with_long(range(3), 0))
def test_clusters_of_an_earlier_run_are_kept(seed):
    """Each device takes the cluster of its data, from the first round on."""
    truth = [0] * 4 + [1] * 6 + [0, 1]
    before = shoal.simulate(nn.Linear(30, 2), cancer(seed), strategy="ifca", settings={"k": 2}, rounds=8, seed=seed)
    models = list(before.models.values())
    for strategy, settings in WARM:
        after = shoal.simulate(
            models, changed(cancer(seed + 3)), strategy=strategy, settings=settings, rounds=3, seed=seed
        )
        assert adjusted_rand(after.clusters, truth) == 1
        assert len(after.models) == 2
        assert after.accuracy.mean() > 0.9
    one = shoal.simulate(models[:1], cancer(seed), strategy="fedavg", rounds=1, seed=seed)
    single = shoal.simulate(models[0], cancer(seed), strategy="fedavg", rounds=1, seed=seed)
    np.testing.assert_array_equal(one.loss, single.loss)
