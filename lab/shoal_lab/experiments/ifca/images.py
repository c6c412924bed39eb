"""ifca-rotated-mnist and ifca-rotated-cifar: images rotated by a group's angle (Ghosh et al., section 6.2, Table 1).

All images are dealt once for each angle, so mn = 60000 k (50000 k for CIFAR-10); test machines hold n test images of one
angle each and take the model with the least loss on them. ``global`` is FedAvg with the same recipe and no weights,
``local`` trains every device alone and tests it on all test images of its own angle.

Several random starts are our addition: three of eight froze with a merged or an empty cluster. Each start runs for ten
rounds, and the one with the least training loss continues; test images have no influence on it. Once identities have been
stable for five rounds, devices receive their own cluster's model only, and all four every tenth round (the strategy's
communication saving).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from shoal.errors import UsageError
from shoal.task.manifest import LocalTraining
from shoal_lab.experiments.common.experiment import Options, Progress, Result, Study

MNIST_IMAGES: Final = 240_000
MNIST_DEVICES: Final = 1200
MNIST_TURNS: Final = (0, 1, 2, 3)
MNIST_ROUNDS: Final = 300
MNIST_PUBLISHED: Final[Mapping[str, Mapping[str, float]]] = {
    "ifca": {"1200": 95.25, "2400": 95.05, "4800": 94.20},
    "global": {"1200": 89.73, "2400": 88.65, "4800": 86.74},
    "local": {"1200": 80.05, "2400": 73.66, "4800": 63.32},
}
CIFAR_IMAGES: Final = 100_000
CIFAR_DEVICES: Final = 200
CIFAR_TURNS: Final = (0, 2)
CIFAR_ROUNDS: Final = 600
"""Value from the authors' configuration; the paper gives none."""
CIFAR_PUBLISHED: Final[Mapping[str, float]] = {"ifca": 81.51, "global": 77.87, "local": 33.97}
RESTARTS: Final = 6
SAVING: Final[Mapping[str, str]] = {"stable_rounds": "5", "probe_every": "10"}
KNOBS: Final = ("hidden", "filters", "dense", "evaluate_every", "trainer", "lr")


def sizes(options: Options, images: int, devices: int) -> tuple[int, int]:
    """Return m and n: as asked, or so that all ``images`` are dealt where only one of them is asked.

    Raises:
        UsageError: the one that is asked does not divide the images.
    """
    m, n = options.devices, options.samples
    if m is None and n is None:
        m = devices
    if m is not None and n is not None:
        return m, n
    given = m if m is not None else n
    assert given is not None
    if images % given:
        raise UsageError(
            f"{given} does not divide {images} images", hint="give both --devices and --samples for another size"
        )
    return (given, images // given) if m is not None else (images // given, given)


def rotated_mnist(options: Options, progress: Progress) -> Result:
    """Run ``ifca-rotated-mnist``."""
    from shoal.simulation.trainers.networks import OneHidden
    from shoal_lab.experiments.data import datasets, splits
    from shoal_lab.experiments.ifca.runs import Setup, run_setup

    algorithm = options.algorithm or "ifca"
    m, n = sizes(options, MNIST_IMAGES, MNIST_DEVICES)
    progress.stage("reading mnist")
    data = datasets.load("mnist", options.data_dir)
    population = splits.rotation(data, devices=m, samples=n, seed=options.seed, turns=MNIST_TURNS)
    published = MNIST_PUBLISHED[algorithm]
    setup = Setup(
        experiment="ifca-rotated-mnist",
        population=population,
        network=OneHidden(population.train[0].x.shape[1], options.knob("hidden", 200), datasets.CLASSES),
        local=LocalTraining(epochs=0, steps=10, batch_size=0, lr=options.knob("lr", 0.1)),
        rounds=options.rounds or MNIST_ROUNDS,
        k=len(MNIST_TURNS),
        published=published.get(str(m)) if m * n == MNIST_IMAGES else published,
        restarts=RESTARTS,
        evaluate_every=options.knob("evaluate_every", 5),
        defaults=SAVING,
    )
    return run_setup(setup, options, progress, KNOBS)


def rotated_cifar(options: Options, progress: Progress) -> Result:
    """Run ``ifca-rotated-cifar``; without the paper's random flips and crops, which the simulator does not do."""
    from shoal.simulation.trainers.networks import Cnn
    from shoal_lab.experiments.data import datasets, splits
    from shoal_lab.experiments.ifca.runs import Setup, run_setup

    algorithm = options.algorithm or "ifca"
    m, n = sizes(options, CIFAR_IMAGES, CIFAR_DEVICES)
    progress.stage("reading cifar10")
    data = datasets.load("cifar10", options.data_dir)
    population = splits.rotation(data, devices=m, samples=n, seed=options.seed, turns=CIFAR_TURNS)
    rounds = options.rounds or CIFAR_ROUNDS
    participation = 0.1
    setup = Setup(
        experiment="ifca-rotated-cifar",
        population=population,
        network=Cnn(
            channels=datasets.CIFAR_SHAPE[0],
            side=datasets.CIFAR_SHAPE[1],
            classes=datasets.CLASSES,
            filters=counts(options.knob("filters", "64,64")),
            dense=counts(options.knob("dense", "384,192")),
            same=True,
        ),
        local=LocalTraining(epochs=5, batch_size=50, lr=options.knob("lr", 0.25), lr_decay=0.99),
        rounds=rounds,
        k=len(CIFAR_TURNS),
        published=CIFAR_PUBLISHED[algorithm],
        restarts=RESTARTS,
        participation=participation,
        evaluate_every=options.knob("evaluate_every", 10),
        alone_rounds=max(1, round(rounds * participation)),
        parameters={"augmentation": "none"},
    )
    return run_setup(setup, options, progress, KNOBS)


def counts(text: str) -> tuple[int, ...]:
    """Return whole numbers from "64,64".

    Raises:
        UsageError: it is no such list.
    """
    parts = [p.strip() for p in text.split(",")]
    if not all(p.isdigit() and int(p) > 0 for p in parts):
        raise UsageError(f"{text!r} is no list of sizes", hint="write 64,64")
    return tuple(int(p) for p in parts)


EXPERIMENTS: Final = (
    Study(
        id="ifca-rotated-mnist",
        paper="ifca, section 6.2, Table 1",
        title="MNIST under four rotations",
        algorithms=("ifca", "global", "local"),
        published=MNIST_PUBLISHED,
        runner=rotated_mnist,
        needs=("mnist",),
        resumable=("ifca", "global"),
    ),
    Study(
        id="ifca-rotated-cifar",
        paper="ifca, section 6.2, Table 1",
        title="CIFAR-10 upright and upside down",
        algorithms=("ifca", "global", "local"),
        published=CIFAR_PUBLISHED,
        runner=rotated_cifar,
        needs=("cifar10",),
        resumable=("ifca", "global"),
    ),
)
