"""The scenarios of the experiment ``wild``: fleets whose devices differ in ways that the papers' tables do not have.

A scenario says which images or table the devices hold and how these differ: by group, by mix of labels, by number, over time.
`images` and `tables` make its data. fleets.toml has the fleets; names end in ``-cnn`` if the devices train a CNN
instead of one hidden layer.
"""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from shoal.errors import UsageError
from shoal.protocol.recipe import DEFAULTS

SAMPLES: Final = 150
NO_GROUP: Final = -1
"""Group of a faulty device, which belongs to none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One fleet.

    Attributes:
        kind: a key of `KINDS`.
        title: a description in one line.
        data: ``mnist``, ``fashion-mnist``, or a table or a real fleet of `tables`.
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
        regression: whether a real fleet of `tables` predicts the figure itself instead of its class.
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
    min_contributors: int = DEFAULTS.min_contributors
    regression: bool = False
    network: str = "mlp"

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the data sets that are read from files."""
        return (self.data,) if self.data in IMAGES + NATURAL else ()


IMAGES: Final = ("mnist", "fashion-mnist")
NATURAL: Final = ("cmapss", "air")


def blocks(*sizes: int) -> tuple[int, ...]:
    """Return the groups of devices in order: ``sizes[0]`` devices of group 0, and so on."""
    return tuple(group for group, size in enumerate(sizes) for _ in range(size))


def _read() -> tuple[dict[str, str], dict[str, Scenario]]:
    """Return the titles of the kinds, and the scenarios in the order of their kinds."""
    file: dict[str, Any] = tomllib.loads(Path(__file__).with_name("fleets.toml").read_text(encoding="utf-8"))
    plain, with_cnn = {}, {}
    for name, table in file["fleets"].items():
        cnn = table.pop("cnn", False)
        lists = {key: tuple(value) for key, value in table.items() if isinstance(value, list)}
        plain[name] = Scenario(**{**table, **lists, "groups": blocks(*table.get("groups", ()))})
        if cnn:
            title = f"{plain[name].title}; CNN"
            with_cnn[f"{name}-cnn"] = replace(plain[name], title=title, network="cnn")
    every = {**plain, **with_cnn}
    return file["kinds"], {name: s for kind in file["kinds"] for name, s in every.items() if s.kind == kind}


KINDS, SCENARIOS = _read()
"""Kind -> its title; scenario by name, those of a kind together."""


def find(name: str) -> Scenario:
    """Return the scenario called ``name``.

    Raises:
        UsageError: there is none.
    """
    if name not in SCENARIOS:
        raise UsageError(f"no scenario {name!r}", hint="shoal simulate wild --list names them")
    return SCENARIOS[name]


def described() -> dict[str, dict[str, Any]]:
    """Return the scenarios by name, as ``shoal simulate wild --list`` shows them."""
    return {
        name: {
            "title": s.title,
            "kind": KINDS[s.kind],
            "data": s.data,
            "network": s.network if s.data in IMAGES else "linear",
            "needs": list(s.needs),
        }
        for name, s in SCENARIOS.items()
    }
