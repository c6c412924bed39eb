"""The scenarios of the experiment ``wild``: fleets whose devices differ in ways that the papers' tables do not have.

A scenario says which images or table the devices hold and how these differ: by group, by mix of labels, by number, over time.
`images`, `tables` and `natural` make its data. Names end in ``-cnn`` if the devices train a CNN instead of one hidden layer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from shoal.errors import UsageError
from shoal.owner.runs.defaults import DEFAULT_MIN_CONTRIBUTORS

ROUNDS: Final = 100
SAMPLES: Final = 150
NO_GROUP: Final = -1
"""Group of a faulty device, which belongs to none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One fleet.

    Attributes:
        kind: a key of `KINDS`.
        title: a description in one line.
        data: ``mnist``, ``fashion-mnist``, a table of `tables`, or a fleet of `natural`.
        groups: the group of each device; devices with images are shuffled unless ``later`` is given. Group 0 holds plain data.
            Without any, a table's groups take turns.
        shift: how groups differ, a name that `images.shifted` knows; for tables ``scaled``: by the scale of their features only.
        pairs: for shift ``swapped``, the two labels that each group swaps.
        degrees: for shift ``turned``, by which each group turns its images further than the group before.
        samples: images of a device, of which 60 % are for training and 20 % for validation; one number, or one for each device.
        dirichlet: concentration of each device's label mix; 0 is an even mix.
        labels: number of labels that a device holds; 0 is all of them.
        later: the group of each device in the second half of the run, if groups change.
        faulty: number of devices with random labels, or, with ``noise``, with images of noise.
        participation: share of the devices drawn for a round.
        min_contributors: fewest devices in a mean that the owner allows.
        regression: whether a fleet of `natural` predicts the figure itself instead of its class.
        network: ``mlp`` (one hidden layer of 64 units) or ``cnn`` (8 filters of 5x5, 32 units).
    """

    kind: str
    title: str
    data: str = "mnist"
    groups: tuple[int, ...] = ()
    shift: str = "none"
    pairs: tuple[tuple[int, int], ...] = ()
    degrees: float = 0.0
    samples: int | tuple[int, ...] = SAMPLES
    dirichlet: float = 0.0
    labels: int = 0
    later: tuple[int, ...] | None = None
    faulty: int = 0
    noise: bool = False
    participation: float = 1.0
    min_contributors: int = DEFAULT_MIN_CONTRIBUTORS
    regression: bool = False
    network: str = "mlp"

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the data sets that are read from files."""
        return (self.data,) if self.data in IMAGES + NATURAL else ()


IMAGES: Final = ("mnist", "fashion-mnist")
NATURAL: Final = ("cmapss", "air")
KINDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "clear": "clear groups of equal size",
        "unequal": "groups of unequal size, and devices alone in theirs",
        "counts": "groups of devices with unequal numbers of samples",
        "few": "few devices",
        "many": "many groups, or many devices",
        "weak": "groups that differ little",
        "inputs": "groups that differ in their inputs",
        "skew": "label skew inside groups",
        "none": "no groups",
        "tables": "tables, classification and regression",
        "natural": "units, series and natural groups",
        "drift": "data that change in the middle of the run",
        "part": "few devices a round",
        "faulty": "faulty devices",
    }
)


def blocks(*sizes: int) -> tuple[int, ...]:
    """Return the groups of devices in order: ``sizes[0]`` devices of group 0, and so on."""
    return tuple(group for group, size in enumerate(sizes) for _ in range(size))


_FOUR: Final = blocks(5, 5, 5, 5)
_TWO: Final = blocks(10, 10)
_ONE: Final = blocks(20)
_POWER: Final = tuple(round(20 * 50 ** (i / 19)) for i in range(20))
"""Images of each device by a power law: 20 to 1,000, of which 12 to 600 are for training."""
_SWAPS: Final = ((0, 1), (2, 3), (4, 5), (6, 7))
_8_AND_9: Final = ((0, 0), (8, 9))
_SHIRTS: Final = ((0, 0), (0, 6))
_FASHION: Final = "fashion-mnist"


def _moved(groups: tuple[int, ...], by: int, places: tuple[int, ...] | None = None) -> tuple[int, ...]:
    """Return groups of which the devices at ``places`` (by default all) take the group ``by`` further on."""
    count = max(groups) + 1
    return tuple((g + by) % count if places is None or i in places else g for i, g in enumerate(groups))


_FLEETS: Final[dict[str, Scenario]] = {
    "permuted-4": Scenario(kind="clear", title="4 groups of 5, labels permuted", groups=_FOUR, shift="permuted"),
    "rotated-4": Scenario(kind="clear", title="4 groups of 5, quarter turns", groups=_FOUR, shift="rotated"),
    "swapped-4-fashion": Scenario(
        kind="clear",
        title="4 groups of 5, two labels swapped, Fashion",
        data=_FASHION,
        groups=_FOUR,
        shift="swapped",
        pairs=_SWAPS,
    ),
    "permuted-2-of-4": Scenario(
        kind="clear",
        title="2 groups of 4, labels permuted, Fashion",
        data=_FASHION,
        groups=blocks(4, 4),
        shift="permuted",
    ),
    "unequal-14-4-2": Scenario(
        kind="unequal", title="groups of 14, 4 and 2, labels permuted", groups=blocks(14, 4, 2), shift="permuted"
    ),
    "unequal-10-9-1": Scenario(
        kind="unequal", title="groups of 10, 9 and 1, labels permuted", groups=blocks(10, 9, 1), shift="permuted"
    ),
    "unequal-12-5-3-fashion": Scenario(
        kind="unequal",
        title="groups of 12, 5 and 3, quarter turns, Fashion",
        data=_FASHION,
        groups=blocks(12, 5, 3),
        shift="rotated",
    ),
    "unequal-18-1-1": Scenario(
        kind="unequal",
        title="18 alike and two devices alone, labels permuted",
        groups=blocks(18, 1, 1),
        shift="permuted",
    ),
    "power-permuted": Scenario(
        kind="counts",
        title="4 groups of 5, labels permuted, 20 to 1,000 images a device",
        groups=_FOUR,
        shift="permuted",
        samples=_POWER,
    ),
    "power-turned": Scenario(
        kind="counts",
        title="4 groups of 5, quarter turns, 20 to 1,000 images a device",
        groups=_FOUR,
        shift="rotated",
        samples=_POWER,
    ),
    "few-3-2": Scenario(
        kind="few",
        title="8x8 digits, labels shifted on 2 of 5 devices, means of 2",
        data="digits",
        groups=blocks(3, 2),
        min_contributors=2,
    ),
    "few-4-1": Scenario(
        kind="few",
        title="8x8 digits, labels shifted on 1 of 5 devices, means of 2",
        data="digits",
        groups=blocks(4, 1),
        min_contributors=2,
    ),
    "few-3-3": Scenario(
        kind="few",
        title="8x8 digits, labels shifted on 3 of 6 devices, means of 2",
        data="digits",
        groups=blocks(3, 3),
        min_contributors=2,
    ),
    "few-3-3-regression": Scenario(
        kind="few",
        title="targets with the other sign on 3 of 6 devices, means of 2 (squared error)",
        data="diabetes",
        groups=blocks(3, 3),
        min_contributors=2,
    ),
    "permuted-8": Scenario(
        kind="many", title="8 groups of 5, labels permuted", groups=blocks(*[5] * 8), shift="permuted"
    ),
    "permuted-200": Scenario(
        kind="many",
        title="200 devices in 3 groups, labels permuted",
        groups=blocks(67, 67, 66),
        shift="permuted",
        samples=100,
    ),
    "rotated-200": Scenario(
        kind="many",
        title="200 devices in 3 groups, quarter turns",
        groups=blocks(67, 67, 66),
        shift="rotated",
        samples=100,
    ),
    "permuted-6-of-3": Scenario(
        kind="many",
        title="6 groups of 3, labels permuted, Fashion",
        data=_FASHION,
        groups=blocks(*[3] * 6),
        shift="permuted",
    ),
    "turned-15": Scenario(
        kind="weak", title="half of the devices' images turned by 15 degrees", groups=_TWO, shift="turned", degrees=15
    ),
    "turned-45": Scenario(
        kind="weak", title="half of the devices' images turned by 45 degrees", groups=_TWO, shift="turned", degrees=45
    ),
    "swapped-8-9": Scenario(
        kind="weak", title="8 and 9 swapped on half of the devices", groups=_TWO, shift="swapped", pairs=_8_AND_9
    ),
    "swapped-shirts": Scenario(
        kind="weak",
        title="two alike labels swapped on half of the devices, Fashion",
        data=_FASHION,
        groups=_TWO,
        shift="swapped",
        pairs=_SHIRTS,
    ),
    "features-4": Scenario(
        kind="inputs", title="4 groups of 5: plain, blurred, noisy, inverted", groups=_FOUR, shift="features"
    ),
    "backgrounds-4": Scenario(
        kind="inputs", title="4 groups of 5, each with a texture behind its digits", groups=_FOUR, shift="background"
    ),
    "inverted-2": Scenario(
        kind="inputs", title="half of the devices' images inverted", groups=(0,) * 10 + (3,) * 10, shift="features"
    ),
    "dimmed-2": Scenario(
        kind="inputs", title="half of the devices' images at a quarter of the contrast", groups=_TWO, shift="dimmed"
    ),
    "skewed-permuted-4": Scenario(
        kind="skew",
        title="4 groups of 5, labels permuted, Dirichlet .3 inside",
        groups=_FOUR,
        shift="permuted",
        dirichlet=0.3,
    ),
    "skewed-rotated-2": Scenario(
        kind="skew", title="2 groups of 10, quarter turns, 4 labels a device", groups=_TWO, shift="rotated", labels=4
    ),
    "alike-dirichlet-0.1": Scenario(kind="none", title="no groups, Dirichlet .1", groups=_ONE, dirichlet=0.1),
    "alike-dirichlet-0.5": Scenario(kind="none", title="no groups, Dirichlet .5", groups=_ONE, dirichlet=0.5),
    "alike": Scenario(kind="none", title="no groups, an even mix", groups=_ONE),
    "alike-3-labels": Scenario(kind="none", title="no groups, 3 labels a device", groups=_ONE, labels=3),
    "alike-sizes-fashion": Scenario(
        kind="none",
        title="no groups, 20 to 400 images a device, Fashion",
        data=_FASHION,
        groups=_ONE,
        samples=tuple(20 * (1 + i) for i in range(20)),
    ),
    "power-none": Scenario(kind="none", title="no groups, 20 to 1,000 images a device", groups=_ONE, samples=_POWER),
    "table-diabetes": Scenario(
        kind="tables", title="regression, half of the targets with the other sign (squared error)", data="diabetes"
    ),
    "table-breast-cancer": Scenario(
        kind="tables", title="two labels swapped on half of the devices", data="breast-cancer"
    ),
    "table-wine": Scenario(kind="tables", title="three labels shifted on half of the devices", data="wine"),
    "table-linear": Scenario(kind="tables", title="three linear models (squared error)", data="linear"),
    "table-planes": Scenario(kind="tables", title="three separating planes", data="planes"),
    "table-digits": Scenario(kind="tables", title="8x8 digits, labels shifted on half of the devices", data="digits"),
    "table-iris": Scenario(kind="tables", title="no groups, 6 devices", data="iris"),
    "scaled-groups": Scenario(
        kind="natural", title="three groups with other scales of their features", data="planes", shift="scaled"
    ),
    "series": Scenario(
        kind="natural", title="series of three groups, validated and tested on later stretches", data="series"
    ),
    "cmapss": Scenario(
        kind="natural", title="turbofan engines of four kinds, remaining life in classes", data="cmapss"
    ),
    "cmapss-regression": Scenario(
        kind="natural",
        title="turbofan engines of four kinds, remaining life (squared error)",
        data="cmapss",
        regression=True,
    ),
    "air": Scenario(kind="natural", title="air of 12 stations, PM2.5 in six hours in classes", data="air"),
    "air-regression": Scenario(
        kind="natural", title="air of 12 stations, PM2.5 in six hours (squared error)", data="air", regression=True
    ),
    "drift-all": Scenario(
        kind="drift",
        title="every group takes the next one's labels",
        groups=_FOUR,
        shift="permuted",
        later=_moved(_FOUR, 1),
    ),
    "drift-some": Scenario(
        kind="drift",
        title="4 of 20 devices change their group",
        groups=_FOUR,
        shift="permuted",
        later=_moved(_FOUR, 1, (0, 5, 10, 15)),
    ),
    "drift-apart": Scenario(
        kind="drift",
        title="no groups at first, then two of quarter turns",
        groups=_ONE,
        shift="rotated",
        later=blocks(10, 10),
    ),
    "drift-together": Scenario(
        kind="drift", title="two groups at first, labels permuted, then none", groups=_TWO, shift="permuted", later=_ONE
    ),
    "part-0.2-of-20": Scenario(
        kind="part",
        title="4 groups of 5, labels permuted, a fifth of the devices a round",
        groups=_FOUR,
        shift="permuted",
        participation=0.2,
    ),
    "part-0.2-of-100": Scenario(
        kind="part",
        title="4 groups of 25, labels permuted, a fifth of the devices a round",
        groups=blocks(25, 25, 25, 25),
        shift="permuted",
        participation=0.2,
    ),
    "part-0.4-of-20": Scenario(
        kind="part",
        title="2 groups of 14 and 6, quarter turns, two fifths of the devices a round",
        groups=blocks(14, 6),
        shift="rotated",
        participation=0.4,
    ),
    "part-0.2-alike": Scenario(
        kind="part", title="no groups, a fifth of the devices a round", groups=_ONE, participation=0.2
    ),
    "faulty-1-swapped": Scenario(
        kind="faulty",
        title="8 and 9 swapped in half, one device with random labels",
        groups=_TWO,
        shift="swapped",
        pairs=_8_AND_9,
        faulty=1,
    ),
    "faulty-2-swapped": Scenario(
        kind="faulty",
        title="8 and 9 swapped in half, two devices with random labels",
        groups=_TWO,
        shift="swapped",
        pairs=_8_AND_9,
        faulty=2,
    ),
    "faulty-1-rotated": Scenario(
        kind="faulty",
        title="quarter turn in half, one device with random labels",
        groups=_TWO,
        shift="rotated",
        faulty=1,
    ),
    "faulty-1-permuted": Scenario(
        kind="faulty",
        title="labels permuted in half, one device with random labels",
        groups=_TWO,
        shift="permuted",
        faulty=1,
    ),
    "faulty-2-noise": Scenario(
        kind="faulty",
        title="labels permuted in half, two devices whose images are noise",
        groups=_TWO,
        shift="permuted",
        faulty=2,
        noise=True,
    ),
}

_WITH_CNN: Final = (
    "permuted-4",
    "rotated-4",
    "permuted-2-of-4",
    "unequal-14-4-2",
    "unequal-12-5-3-fashion",
    "permuted-6-of-3",
    "turned-45",
    "swapped-8-9",
    "features-4",
    "dimmed-2",
    "skewed-permuted-4",
    "alike-dirichlet-0.1",
    "alike",
    "drift-apart",
    "part-0.2-of-20",
    "faulty-2-swapped",
)
"""At least a third of the fleets with images."""

_ALL: Final = _FLEETS | {
    f"{name}-cnn": dataclasses.replace(_FLEETS[name], title=f"{_FLEETS[name].title}; CNN", network="cnn")
    for name in _WITH_CNN
}
SCENARIOS: Final[Mapping[str, Scenario]] = MappingProxyType(
    {name: s for kind in KINDS for name, s in _ALL.items() if s.kind == kind}
)


def find(name: str) -> Scenario:
    """Return the scenario called ``name``.

    Raises:
        UsageError: there is none.
    """
    if name not in SCENARIOS:
        raise UsageError(f"no scenario {name!r}", hint="shoal simulate wild --list names them")
    return SCENARIOS[name]
