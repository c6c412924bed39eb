"""The data and the network of studies that are tables: `TASKS` has a function of the options for each name.

`TweetLstm` is the network of fedgroup-sent140: two layers of LSTM over word vectors, then two dense layers (Duan et al., Table
II). Word vectors are frozen, so they are no part of theta: every device has the same, drawn from a fixed seed. Sizes are those of
the published model (243,861 parameters), but for torch's second bias in each LSTM layer (800), and two outputs in place of one
(31).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from shoal.errors import DataError, UsageError
from shoal.simulation.data import Population, Shard, shards_of
from shoal.simulation.trainers.networks import Cnn, Lstm, Network, OneHidden, Softmax
from shoal_lab.experiments.common.experiment import Options
from shoal_lab.experiments.data import datasets, splits, text
from shoal_lab.experiments.data.datasets import CLASSES, Dataset
from shoal_lab.experiments.data.text import Person

LEAST: Final = 10
"""Fewest samples of a person in FedGroup's experiments."""
LOWER_FROM: Final = 36
"""LEAF's FEMNIST labels: 0-9 digits, 10-35 upper case, 36-61 lower case."""


@dataclass(frozen=True, slots=True)
class Task:
    """The devices of a run and the network that they train.

    Attributes:
        population: the devices.
        network: of each of them.
        parameters: what the result has beside the study's values.
        segments: (name, length) pairs for an algorithm that shares layers.
    """

    population: Population
    network: Network
    parameters: Mapping[str, Any] = field(default_factory=dict)
    segments: tuple[tuple[str, int], ...] = ()


def one_of(options: Options, name: str, known: Sequence[str]) -> str:
    """Return the value ``name``, which is one of the ``known``.

    Raises:
        UsageError: it is another.
    """
    value = str(options.values[name])
    if value not in known:
        raise UsageError(f"--set {name}={value}: it takes {' or '.join(known)}")
    return value


def network_for(options: Options, data: Dataset) -> Network:
    """Return the network ``model`` for ``data``: ``cnn`` (6 and 16 filters of 5x5, 120 and 84 units) or ``mlp``."""
    shape = data.x_train.shape[1:]
    if one_of(options, "model", ("cnn", "mlp")) == "cnn":
        return Cnn(channels=shape[0] if len(shape) == 3 else 1, side=shape[-1], classes=CLASSES)
    return OneHidden(math.prod(shape), options.values["hidden"], CLASSES)


def _relabelled(options: Options) -> Task:
    """Images whose labels each group renames, or of one group that renames none."""
    data, groups = datasets.load(options.values["dataset"], options.data_dir), options.values["groups"]
    if groups < 1:
        raise UsageError(f"{groups} groups", hint="1 deals data without groups")
    how = "plain" if groups == 1 else one_of(options, "relabel", ("permutation", "swap"))
    population = splits.relabelled(data, how, groups=groups, **options.of("devices", "samples", "seed"))
    shares = {"train": population.train, "validation": population.validation, "test": population.test}
    return Task(population, network_for(options, data), {name: len(share[0]) for name, share in shares.items()})


def _topics(options: Options) -> Task:
    """AG-News by topic."""
    values, news = options.values, text.load_news(options.data_dir)
    dealt = options.of("devices", "samples", "seed")
    population, vocabulary = text.by_topic(news, words=values["words"], vocabulary_size=values["vocabulary"], **dealt)
    found = {
        "topics": len(set(population.groups or ())),
        "windows": int(population.samples.min()),
        "vocabulary": len(vocabulary),
    }
    return Task(population, Lstm(len(vocabulary), values["width"], values["width"], values["layers"]), found)


def sizes(options: Options) -> tuple[int, int]:
    """Return m and n: as asked, or so that all ``images`` are dealt where only one of them is asked.

    Raises:
        UsageError: the one that is asked does not divide the images.
    """
    m, n, images = options.devices, options.samples, options.values["images"]
    if m is not None and n is not None:
        return m, n
    given = m or n or options.values["machines"]
    if images % given:
        raise UsageError(
            f"{given} does not divide {images} images", hint="give both --devices and --samples for another size"
        )
    return (images // given, given) if n is not None else (given, images // given)


def _rotated(options: Options) -> Task:
    """All images, turned by each group's angle."""
    values, (m, n) = options.values, sizes(options)
    data = datasets.load(values["dataset"], options.data_dir)
    turns = range(0, values["groups"] * values["quarter_turns"], values["quarter_turns"])
    population = splits.rotation(data, devices=m, samples=n, seed=options.seed, turns=turns)
    network: Network
    if "filters" in values:
        network = _cnn(options, side=datasets.CIFAR_SHAPE[1], classes=CLASSES, channels=datasets.CIFAR_SHAPE[0])
    else:
        network = OneHidden(population.train[0].x.shape[1], values["hidden"], CLASSES)
    dealing_all = m if m * n == values["images"] else None
    return Task(population, network, {"devices": m, "samples": n, "dealing_all": dealing_all})


def _cnn(options: Options, **shape: int) -> Cnn:
    filters, dense = (tuple(options.values[name]) for name in ("filters", "dense"))
    return Cnn(**shape, filters=filters, dense=dense, same=True)


def _writers(options: Options) -> Task:
    """Handwriting by writer, whose last layer alone may be clustered."""
    population = text.by_writer(text.load_femnist(options.data_dir), devices=options.devices, seed=options.seed)
    network = _cnn(options, side=math.isqrt(text.FEMNIST_PIXELS), classes=text.FEMNIST_CLASSES)
    last = sum(math.prod(shape) for shape in network.shapes[-2:])
    found = {"devices": len(population), "samples": int(population.samples.max()), "clustered_coordinates": last}
    return Task(population, network, found, (("shared", network.length - last), ("cluster", last)))


def _letters(options: Options) -> Task:
    """Handwriting by writer, lower-case letters only unless all are asked for."""
    people, classes = text.load_femnist(options.data_dir), text.FEMNIST_CLASSES
    if one_of(options, "classes", ("lower", "all")) == "lower":
        people, classes = lower_case(people), text.FEMNIST_CLASSES - LOWER_FROM
    network: Network = Softmax(text.FEMNIST_PIXELS, classes)
    if one_of(options, "model", ("mclr", "mlp")) == "mlp":
        network = OneHidden(text.FEMNIST_PIXELS, options.values["hidden"], classes)
    return _of_people(options, people, network)


def _tweets(options: Options) -> Task:
    """Tweets by account."""
    people, vocabulary = text.load_sent140(options.data_dir)
    network = TweetLstm(len(vocabulary), options.values["embedding"], options.values["hidden"])
    found = {"vocabulary": len(vocabulary), "vectors": "drawn at random, frozen"}
    return _of_people(options, people, network, found)


def _of_people(
    options: Options, people: Sequence[Person], network: Network, found: Mapping[str, Any] | None = None
) -> Task:
    able = max(1, sum(len(p.train) + len(p.test) >= LEAST and len(p.train) > 0 for p in people))
    devices = options.devices or min(options.values["people"], able)
    population = text.by_writer(people, devices=devices, seed=options.seed, least=LEAST)
    return Task(population, network, {"devices": devices, **(found or {})})


def lower_case(people: Sequence[Person]) -> tuple[Person, ...]:
    """Return the people's lower-case letters only, as labels 0 to 25; people without any to train on are left out.

    Raises:
        DataError: there are no lower-case letters to train on.
    """

    def letters(shard: Shard) -> Shard:
        rows = np.flatnonzero(shard.y >= LOWER_FROM)
        return Shard(shard.x[rows], shard.y[rows] - LOWER_FROM)

    kept = [replace(p, train=letters(p.train), test=letters(p.test)) for p in people]
    kept = [p for p in kept if len(p.train)]
    if not kept:
        raise DataError("femnist holds no lower-case letters", hint="take --set classes=all")
    return tuple(kept)


def _power_law(options: Options) -> Task:
    """MNIST by classes in sizes of a power law."""
    classes, hidden = options.values["classes"], options.values["hidden"]
    data = datasets.load("mnist", options.data_dir)
    population = splits.classes_power_law(data, classes=classes, **options.of("devices", "seed"))
    if options.values["identical"] and classes == CLASSES:
        population = identical(population, options.seed)
    pixels = population.train[0].x.shape[1]
    return Task(population, OneHidden(pixels, hidden, CLASSES) if hidden else Softmax(pixels, CLASSES))


def identical(population: Population, seed: int) -> Population:
    """Return devices of the same sizes with random samples of all: training samples from training ones, tests from tests."""
    rng = np.random.default_rng([seed, len(population)])
    parts = []
    for shards in (population.train, population.test):
        counts = [len(s) for s in shards]
        order = rng.permutation(sum(counts))
        x, y = np.concatenate([s.x for s in shards])[order], np.concatenate([s.y for s in shards])[order]
        parts.append(shards_of(x, y, counts))
    return Population(parts[0], test=parts[1], groups=(0,) * len(population))


def _synthetic(options: Options) -> Task:
    """Drawn samples with a labelling of each device's own."""
    alpha, beta = options.values["shape_alpha"], options.values["shape_beta"]
    population = splits.synthetic(alpha, beta, **options.of("devices", "seed"))
    return Task(population, Softmax(splits.SYNTHETIC_INPUTS, splits.SYNTHETIC_CLASSES))


TASKS: Final[Mapping[str, Callable[[Options], Task]]] = {
    "relabelled": _relabelled,
    "topics": _topics,
    "rotated": _rotated,
    "writers": _writers,
    "letters": _letters,
    "tweets": _tweets,
    "power-law": _power_law,
    "synthetic": _synthetic,
}


VECTORS_SEED: Final = 140
DENSE: Final = 30
LAYERS: Final = 2
OUTPUTS: Final = 2


@dataclass(frozen=True, slots=True)
class TweetLstm(Network):
    """Negative or positive: x (n, words) int64, y (n,) int64.

    Attributes:
        vocabulary: tokens; embedding: length of a word's vector; hidden: units of a layer.
        vectors: shape (vocabulary, embedding), float32: the words' vectors.
    """

    vocabulary: int
    embedding: int = 300
    hidden: int = 100
    vectors: Tensor = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        drawn = np.random.default_rng(VECTORS_SEED).standard_normal((self.vocabulary, self.embedding), np.float32)
        object.__setattr__(self, "vectors", torch.from_numpy(drawn))

    def module(self) -> nn.Module:
        """Return the trained layers as a fresh torch module, initialised from torch's global generator."""
        lstm = nn.LSTM(self.embedding, self.hidden, LAYERS, batch_first=True)
        return nn.ModuleList([lstm, nn.Linear(self.hidden, DENSE), nn.Linear(DENSE, OUTPUTS)])

    def forward(self, params: Sequence[Tensor], x: Tensor) -> Tensor:
        """Return logits (n, 2) of the state after the last word; as published, there is no activation between dense layers."""
        words = functional.embedding(x, self.vectors.to(x.device))
        zeros = words.new_zeros(LAYERS, len(x), self.hidden)
        weights = list(params[: 4 * LAYERS])
        states = torch.lstm(words, (zeros, zeros), weights, True, LAYERS, 0.0, True, False, True)[0]
        w1, b1, w2, b2 = params[4 * LAYERS :]
        return functional.linear(functional.linear(states[:, -1], w1, b1), w2, b2)
