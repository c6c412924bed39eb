"""fedgroup-femnist and fedgroup-sent140: LEAF's handwriting and tweets, one person per device (Duan et al., section IV).

FEMNIST: 200 writers, five groups, step size .003. The paper mentions 62 classes, but its models' 20,410 and 415,258
parameters have 26 outputs: by default only lower-case letters are used (``classes=all`` uses everything). Sent140: 772
accounts, five groups, an LSTM, step size .3 and mu .01. The published model uses frozen GloVe vectors, which are not part of
the data: here the vectors are frozen too, but drawn at random, so the figures are not directly comparable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Final

import numpy as np

from shoal.errors import DataError, UsageError
from shoal_lab.experiments.common.experiment import Options, Progress, Result, Study

if TYPE_CHECKING:
    from shoal_lab.experiments.data.leaf import Person

GROUPS: Final = 5
WRITERS: Final = 200
ACCOUNTS: Final = 772
FEMNIST_LR: Final = 0.003
FEMNIST_HIDDEN: Final = 512
SENT140_LR: Final = 0.3
SENT140_MU: Final = 0.01
LEAST: Final = 10
LOWER_FROM: Final = 36
"""LEAF's FEMNIST labels: 0-9 digits, 10-35 upper case, 36-61 lower case."""
NETWORKS: Final = ("mclr", "mlp")
CLASSES: Final = ("lower", "all")
_COLUMNS: Final = ("fg-edc", "fg-madc", "fgp-edc", "fgp-madc", "ifca", "fesem", "fedprox", "fedavg", "rcc", "rac")
_FEMNIST_MCLR: Final = (91.7, 91.2, 91.7, 90.7, 87.9, 65.6, 77.9, 78.8, 88.8, 74.7)
_FEMNIST_MLP: Final = (96.8, 94.6, 95.4, 93.6, 95.5, 69.9, 81.0, 82.7, 91.5, 78.4)
_SENT140: Final = (75.3, 75.8, 75.4, 75.4, 76.8, 70.0, 71.9, 72.2, 76.1, 72.2)
FEMNIST: Final[Mapping[str, Mapping[str, float]]] = {
    name: {"mclr": a, "mlp": b} for name, a, b in zip(_COLUMNS, _FEMNIST_MCLR, _FEMNIST_MLP, strict=True)
}
SENT140: Final[Mapping[str, float]] = dict(zip(_COLUMNS, _SENT140, strict=True))


def femnist(options: Options, progress: Progress) -> Result:
    """Run ``fedgroup-femnist``."""
    from shoal.simulation.trainers.networks import OneHidden, Softmax
    from shoal_lab.experiments.data import leaf
    from shoal_lab.experiments.fedgroup.runs import ROUNDS, Setup, method_of, run_setup

    _refuse_samples(options)
    kind, kept = _one_of("network", options, NETWORKS), _one_of("classes", options, CLASSES)
    progress.stage("reading femnist")
    people = leaf.load_femnist(options.data_dir)
    classes = leaf.FEMNIST_CLASSES
    if kept == "lower":
        people, classes = lower_case(people), leaf.FEMNIST_CLASSES - LOWER_FROM
    devices = options.devices or min(WRITERS, _able(people))
    population = leaf.by_writer(people, devices=devices, seed=options.seed, least=LEAST)
    hidden = options.knob("hidden", FEMNIST_HIDDEN)
    pixels = leaf.FEMNIST_PIXELS
    setup = Setup(
        experiment="fedgroup-femnist",
        population=population,
        network=Softmax(pixels, classes) if kind == "mclr" else OneHidden(pixels, hidden, classes),
        groups=GROUPS,
        lr=FEMNIST_LR,
        published=FEMNIST[method_of(options)[0]][kind],
        rounds=options.rounds or ROUNDS,
        parameters={"network_kind": kind, "classes": kept},
    )
    return run_setup(setup, options, progress, ("network", "classes", "hidden"))


def sent140(options: Options, progress: Progress) -> Result:
    """Run ``fedgroup-sent140``."""
    from shoal_lab.experiments.data import leaf
    from shoal_lab.experiments.fedgroup.lstm import TweetLstm
    from shoal_lab.experiments.fedgroup.runs import ROUNDS, Setup, method_of, run_setup

    _refuse_samples(options)
    progress.stage("reading sent140")
    people, vocabulary = leaf.load_sent140(options.data_dir)
    devices = options.devices or min(ACCOUNTS, _able(people))
    setup = Setup(
        experiment="fedgroup-sent140",
        population=leaf.by_writer(people, devices=devices, seed=options.seed, least=LEAST),
        network=TweetLstm(len(vocabulary), options.knob("embedding", 300), options.knob("hidden", 100)),
        groups=GROUPS,
        lr=SENT140_LR,
        published=SENT140[method_of(options)[0]],
        rounds=options.rounds or ROUNDS,
        mu=SENT140_MU,
        parameters={"vocabulary": len(vocabulary), "vectors": "drawn at random, frozen"},
    )
    return run_setup(setup, options, progress, ("embedding", "hidden"))


def lower_case(people: Sequence[Person]) -> tuple[Person, ...]:
    """Return the people's lower-case letters only, as labels 0 to 25; people without any to train on are left out.

    Raises:
        DataError: there are no lower-case letters to train on.
    """
    from shoal.simulation.data import Shard

    def letters(shard: Shard) -> Shard:
        rows = np.flatnonzero(shard.y >= LOWER_FROM)
        return Shard(shard.x[rows], shard.y[rows] - LOWER_FROM)

    kept = [dataclasses.replace(p, train=letters(p.train), test=letters(p.test)) for p in people]
    kept = [p for p in kept if len(p.train)]
    if not kept:
        raise DataError("femnist holds no lower-case letters", hint="take --set classes=all")
    return tuple(kept)


def _able(people: Sequence[Person]) -> int:
    return max(1, sum(len(p.train) + len(p.test) >= LEAST and len(p.train) > 0 for p in people))


def _one_of(name: str, options: Options, known: tuple[str, ...]) -> str:
    value = options.knob(name, known[0])
    if value not in known:
        raise UsageError(f"--set {name}={value}: it takes {' or '.join(known)}")
    return value


def _refuse_samples(options: Options) -> None:
    if options.samples is not None:
        raise UsageError("a person has the samples that he made", hint="leave --samples out")


EXPERIMENTS: Final = (
    Study(
        id="fedgroup-femnist",
        paper="fedgroup, section IV, Table III and Fig. 3",
        title="handwriting by writer",
        algorithms=_COLUMNS,
        published=FEMNIST,
        runner=femnist,
        needs=("femnist",),
    ),
    Study(
        id="fedgroup-sent140",
        paper="fedgroup, section IV, Table III and Fig. 4",
        title="the mood of tweets by account, an LSTM",
        algorithms=_COLUMNS,
        published=SENT140,
        runner=sent140,
        needs=("sent140",),
    ),
)
