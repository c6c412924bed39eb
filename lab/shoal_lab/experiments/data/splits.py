"""The papers' splits of a data set among devices, each determined by its seed.

The true groups are in `Population.groups`, which strategies don't receive. Images are flattened to (n, pixels). Shards are
views of a few large arrays, so a population takes little more memory than its samples.


`synthetic` draws the data of Synthetic(alpha, beta); linear mixtures are in `shoal_lab.experiments.ifca.synthetic`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
from numpy.typing import NDArray

from shoal.errors import UsageError
from shoal.simulation.data import Population, Shard, shards_of
from shoal.simulation.shares import CFL_SHARES, NINETY_TEN, Shares, by_shard, cut, population_of
from shoal_lab.experiments.data.datasets import CLASSES, Dataset

Images = NDArray[np.float32]
POWER_LAW_SIGMA: Final = 2.0
"""Sigma of the lognormal shares in FedProx's MNIST generator, which FedGroup's section V follows."""
POWER_LAW_FLOOR: Final = 10
"""Samples that this generator first gives to every device, spread over its classes."""
STANDARD_OFFSET: Final = np.float32(0.001)
"""Added by this generator to a pixel's deviation (pixels in 0..255), which is 0 at the border."""


def rotation(
    data: Dataset, *, devices: int, samples: int, seed: int, turns: Sequence[int] = (0, 1, 2, 3)
) -> Population:
    """Deal the images to the devices once for each rotation, ``samples`` to a device (IFCA, section 6.2).

    Args:
        data: images; a device's images all have the same rotation.
        devices: m, a multiple of len(turns); device i belongs to group i // (m / len(turns)).
        samples: n, a device's training images.
        seed: seed of the assignment of images to devices.
        turns: quarter turns, counter-clockwise, of each group; IFCA's CIFAR-10 has (0, 2).

    Returns:
        The population. Its probes are test machines: each rotation's test images, in machines of ``samples`` images, or of
        all test images if these are fewer.

    Raises:
        UsageError: the devices can't be divided among the groups, or there are too few images.
    """
    groups, rng = len(turns), np.random.default_rng(seed)
    if devices < groups or devices % groups:
        raise UsageError(f"{devices} devices can't form {groups} rotations of equal size")
    each = devices // groups
    if samples < 1 or each * samples > len(data.x_train):
        raise UsageError(
            f"{each} devices of {samples} images need more than the {len(data.x_train)} of {data.name}",
            hint="a rotation deals every image once: take fewer --devices or --samples",
        )
    train: list[Shard] = []
    probes: list[Shard] = []
    for quarters in turns:
        order = rng.permutation(len(data.x_train))[: each * samples]
        x = _turned(data.x_train[order], quarters)
        train += shards_of(x, data.y_train[order], [samples] * each)
        of_machine = min(samples, len(data.x_test))
        machines = len(data.x_test) // of_machine
        held = machines * of_machine
        probes += shards_of(_turned(data.x_test[:held], quarters), data.y_test[:held], [of_machine] * machines)
    return Population(
        tuple(train),
        groups=tuple(int(g) for g in np.repeat(np.arange(groups), each)),
        probes=tuple(probes),
        probe_groups=tuple(int(g) for g in np.repeat(np.arange(groups), len(probes) // groups)),
    )


def relabelled(
    data: Dataset,
    how: str,
    *,
    devices: int,
    groups: int = 4,
    samples: int | None,
    seed: int,
    shares: Shares = CFL_SHARES,
) -> Population:
    """Deal random samples, and rename the labels of each group (CFL, sections VI-A and VI-C).

    Args:
        data: images.
        how: ``swap`` (two labels of each group, disjoint pairs if there are enough labels), ``permutation`` (of all labels), or
            ``plain``: without groups, which a clustering must leave in one cluster.
        devices: m; groups differ in size by at most one, and are independent of the devices' order.
        groups: k.
        samples: a device's samples in total, cut by ``shares``; None deals every training sample.
        seed: seed of samples, groups and names.
        shares: fractions for training, validation and test.

    Raises:
        UsageError: there are too few samples or devices.
    """
    renamed = _RENAMED[how](groups, seed)
    if devices < len(renamed):
        raise UsageError(f"{devices} devices can't form {len(renamed)} groups")
    each = len(data.x_train) // devices if samples is None else samples
    if each < 1 or devices * each > len(data.x_train):
        raise UsageError(
            f"{devices} devices of {each} samples need more than the {len(data.x_train)} of {data.name}",
            hint="take fewer --devices or --samples",
        )
    rng = np.random.default_rng(seed)
    truth = rng.permutation(np.arange(devices) % len(renamed))
    order = rng.permutation(len(data.x_train))[: devices * each].reshape(devices, each)
    x = _flat(data.x_train)
    return population_of(
        [cut(x, data.y_train, rows, shares, renamed[g]) for rows, g in zip(order, truth, strict=True)],
        tuple(int(g) for g in truth),
    )


def _swaps(groups: int, seed: int) -> list[NDArray[np.int64]]:
    rng = np.random.default_rng([seed, 1])  # a stream of its own: pairs must not depend on how samples are dealt
    labels = np.concatenate([rng.permutation(CLASSES) for _ in range(-(-2 * groups // CLASSES))])
    renamed = []
    for a, b in labels[: 2 * groups].reshape(groups, 2):
        names = np.arange(CLASSES)
        names[[a, b]] = b, a
        renamed.append(names)
    return renamed


def _permutations(groups: int, seed: int) -> list[NDArray[np.int64]]:
    rng = np.random.default_rng([seed, 2])  # as in `_swaps`
    renamed: list[NDArray[np.int64]] = []
    while len(renamed) < groups:
        names = rng.permutation(CLASSES)
        if not any(np.array_equal(names, other) for other in renamed):
            renamed.append(names)
    return renamed


_RENAMED: Final[dict[str, Callable[[int, int], list[NDArray[np.int64]]]]] = {
    "plain": lambda _groups, _seed: [np.arange(CLASSES)],
    "swap": _swaps,
    "permutation": _permutations,
}
"""The names of the labels in each group, by the way of renaming."""


def classes_power_law(
    data: Dataset,
    *,
    devices: int = 1000,
    classes: int = 2,
    seed: int,
    sigma: float = POWER_LAW_SIGMA,
) -> Population:
    """Deal ``classes`` classes to each device, in sizes that follow a power law (FedGroup, sections III-A and V-A).

    Follows FedProx's MNIST generator, generalised from two classes to c. All images, training and test, are standardised per
    pixel; device u holds classes u, u + 1, ... u + c - 1 modulo 10. It first gets about ten samples of them; then each device
    gets a lognormal(0, sigma) share of a class's remaining samples, in file order. Nine tenths of its samples, shuffled, are
    for training. FedProx's generator has no seed; this one has.

    Returns:
        The population; its groups are the devices with the same classes, at most ten.

    Raises:
        UsageError: the classes are not 1 to 10, the devices no multiple of 10, or there are too few images.
    """
    if not 1 <= classes <= CLASSES or devices < CLASSES or devices % CLASSES:
        raise UsageError(
            f"{devices} devices with {classes} classes each: take a multiple of {CLASSES}, and 1 to {CLASSES}"
        )
    rng = np.random.default_rng(seed)
    x = standardised(np.concatenate([data.x_train, data.x_test]))
    y = np.concatenate([data.y_train, data.y_test])
    rows = [np.flatnonzero(y == c) for c in range(CLASSES)]
    floor = max(1, POWER_LAW_FLOOR // classes)
    dealt = np.zeros(CLASSES, np.int64)
    held: list[list[NDArray[np.int64]]] = [[] for _ in range(devices)]

    def deal(device: int, label: int, count: int) -> None:
        held[device].append(rows[label][dealt[label] : dealt[label] + count])
        dealt[label] += count

    for u in range(devices):
        for j in range(classes):
            deal(u, (u + j) % CLASSES, floor)
    if any(dealt[c] > len(rows[c]) for c in range(CLASSES)):
        raise UsageError(f"{devices} devices need more images than {data.name} has")
    left = np.array([len(rows[c]) - dealt[c] for c in range(CLASSES)])
    weights = rng.lognormal(0.0, sigma, (CLASSES, devices // CLASSES, classes))
    counts = (left[:, None, None] * weights / weights.sum((1, 2), keepdims=True)).astype(np.int64)
    for u in range(devices):
        for j in range(classes):
            label = (u + j) % CLASSES
            count = int(counts[label, u // CLASSES, j])
            # Follows FedProx's generator, which skips a share that would use up the class.
            if dealt[label] + count < len(rows[label]):
                deal(u, label, count)
    dealt_rows = [rng.permutation(np.concatenate(parts)) for parts in held]
    parts = [cut(x, y, chosen, NINETY_TEN) for chosen in dealt_rows]
    same = classes == CLASSES
    return population_of(parts, tuple(0 if same else u % CLASSES for u in range(devices)))


def standardised(x: Images) -> Images:
    """Flatten pixels (n, ...) in [0, 1], subtract their mean over n and divide by their deviation (FedProx's generator)."""
    flat = _flat(x) * np.float32(255.0)  # the generator works on pixels in 0..255, which STANDARD_OFFSET assumes
    mean = flat.mean(0, dtype=np.float64).astype(np.float32)
    deviation = flat.std(0, dtype=np.float64).astype(np.float32)
    flat -= mean
    flat /= deviation + STANDARD_OFFSET
    return flat


def _flat(x: Images) -> Images:
    return x.reshape(len(x), -1)


def _turned(x: Images, quarters: int) -> Images:
    """Return images (n, ..., h, w), turned by ``quarters``, as a contiguous (n, pixels)."""
    return np.ascontiguousarray(np.rot90(x, quarters, axes=(-2, -1))).reshape(len(x), -1)


SYNTHETIC_INPUTS: Final = 60
SYNTHETIC_CLASSES: Final = 10
SYNTHETIC_LEAST: Final = 50
SIZE_LOG_MEAN: Final = 4.0
SIZE_LOG_SIGMA: Final = 2.0
COVARIANCE_POWER: Final = -1.2


def synthetic(alpha: float, beta: float, *, devices: int = 100, seed: int, shares: Shares = NINETY_TEN) -> Population:
    """Return Synthetic(alpha, beta) (Shamir et al. as in FedProx, section 5.1; FedGroup, section V-A).

    Device i labels x by argmax(W x + b), W (10, 60) and b drawn around u_i ~ N(0, alpha); x ~ N(v_i, diag(j^-1.2)), each
    coordinate of v_i around B_i ~ N(0, beta); it has 50 + lognormal(4, 2) samples. Alpha and beta are deviations, as in
    FedProx's generator.

    Raises:
        UsageError: alpha or beta is negative, or there is no device.
    """
    if alpha < 0 or beta < 0 or devices < 1:
        raise UsageError(f"Synthetic({alpha}, {beta}) with {devices} devices can't be made")
    rng = np.random.default_rng(seed)
    counts = rng.lognormal(SIZE_LOG_MEAN, SIZE_LOG_SIGMA, devices).astype(np.int64) + SYNTHETIC_LEAST
    model_means, input_means = rng.normal(0, alpha, devices), rng.normal(0, beta, devices)
    deviations = np.sqrt(np.arange(1, SYNTHETIC_INPUTS + 1, dtype=np.float64) ** COVARIANCE_POWER)
    shards = []
    for count, model_mean, input_mean in zip(counts, model_means, input_means, strict=True):
        centre = rng.normal(input_mean, 1, SYNTHETIC_INPUTS)
        weights = rng.normal(model_mean, 1, (SYNTHETIC_INPUTS, SYNTHETIC_CLASSES))
        bias = rng.normal(model_mean, 1, SYNTHETIC_CLASSES)
        x = centre + deviations * rng.standard_normal((int(count), SYNTHETIC_INPUTS))
        shards.append(Shard(x.astype(np.float32), (x @ weights + bias).argmax(1).astype(np.int64)))
    return by_shard(shards, seed=seed, shares=shares)
