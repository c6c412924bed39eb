"""A run's recipe: the owner's choices, each declared once with its default, its range and its help text.

The options of `shoal-fleet run start`, the arguments of `shoal.simulate` and the checks of every party come from these fields. A
new choice is a field of `Recipe`, and the code that reads it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Final, TypedDict

from shoal import limits
from shoal.errors import OutOfRangeError
from shoal.hints import wanted
from shoal.protocol.codec import U16, U32, U64, message

_KNOB: Final = "knob"
WHOLE_LIMIT: Final = 1 << 31
"""Most epochs, steps and samples of a batch."""


@dataclass(frozen=True, slots=True)
class Knob:
    """What a field may hold, and its help text.

    Attributes:
        text: the meaning.
        kind: the type; None is allowed as well where it is the default.
        optional: whether None is allowed.
        least, most: inclusive bounds of a number; above, below: exclusive ones.
        off: a number outside of the bounds that turns the choice off.
        choices: the texts that are allowed; empty allows any.
        common: whether `--help` shows the option, and not only `--help-all`.
        simulated: whether it changes a simulated run.
    """

    text: str
    kind: type[Any]
    optional: bool = False
    least: float | None = None
    above: float | None = None
    most: float | None = None
    below: float | None = None
    off: float | None = None
    choices: tuple[str, ...] = ()
    common: bool = False
    simulated: bool = True

    @property
    def words(self) -> str:
        """The allowed values: "a number above 0 and at most 1"."""
        if self.choices:
            return f"one of {', '.join(self.choices)}"
        bounds = {"of at least": self.least, "above": self.above, "at most": self.most, "below": self.below}
        named = " and ".join(f"{word} {_text(bound)}" for word, bound in bounds.items() if bound is not None)
        if self.least is not None and self.most is not None:
            named = f"from {_text(self.least)} to {_text(self.most)}"
        off = "" if self.off is None else f", or {self.off:g} (off)"
        return f"{wanted(self.kind)} {named}".rstrip() + off

    @property
    def help(self) -> str:
        """The meaning and the allowed values."""
        return f"{self.text}." if self.kind is str and not self.choices else f"{self.text} ({self.words})."

    def checked(self, name: str, value: Any) -> Any:
        """Return a value of the field ``name``, a whole number as a float where that is the type.

        Raises:
            OutOfRangeError: the field can't hold it.
        """
        if value is None and self.optional:
            return value
        kinds = (int, float) if self.kind is float else self.kind
        if not isinstance(value, kinds) or isinstance(value, bool) or not self._allows(value):
            raise OutOfRangeError(f"{name} is {self.words}, not {repr(value)[:80]}")
        return float(value) if self.kind is float else value

    def _allows(self, value: Any) -> bool:
        if self.choices:
            return value in self.choices
        if self.kind not in (int, float) or value == self.off:
            return True
        return (
            math.isfinite(value)
            and (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
            and (self.below is None or value < self.below)
        )


def _text(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def knob(default: Any, text: str, *, kind: type[Any] | None = None, **limits: Any) -> Any:
    """Return a field with a `Knob`; ``limits`` are the attributes of one."""
    found = Knob(text, kind or type(default), optional=default is None, **limits)
    return field(default=default, metadata={_KNOB: found})


def knobs(record: type[Any]) -> dict[str, Knob]:
    """Return the fields of a dataclass that `knob` made, by name."""
    return {f.name: f.metadata[_KNOB] for f in fields(record) if _KNOB in f.metadata}


def _check(record: Any) -> None:
    for name, found in knobs(type(record)).items():
        object.__setattr__(record, name, found.checked(name, getattr(record, name)))


@message(6)
@dataclass(frozen=True, slots=True)
class LocalTraining:
    """Local training between two uploads: plain SGD, of a length given in one of three ways.

    ``batch_size == 0`` takes ``steps`` steps on the whole training share. Otherwise mini-batches: ``epochs`` passes,
    or, if ``epochs == 0``, exactly ``steps`` mini-batches.

    Raises:
        OutOfRangeError: a value is out of its range.
    """

    epochs: U32 = knob(1, "passes over the training share, mini-batches only", least=0, most=WHOLE_LIMIT)
    steps: U32 = knob(0, "gradient steps", least=0, most=WHOLE_LIMIT)
    batch_size: U32 = knob(10, "samples per step; 0 is the whole share", least=0, most=WHOLE_LIMIT)
    lr: float = knob(0.1, "step size in the first round", above=0, most=1e6)
    momentum: float = knob(0.0, "heavy-ball factor; the velocity starts at zero each round", least=0, below=1)
    lr_decay: float = knob(1.0, "factor per round: round t has the step size lr * lr_decay**t", above=0, most=1)
    clip: float = knob(
        0.0, "largest global L2 norm of a step's gradient, proximal term included; 0 is off", least=0, most=1e30
    )
    prox_mu: float = knob(
        0.0, "FedProx's mu, weight of the pull towards the round's first model; 0 is off", least=0, most=1e6
    )

    def __post_init__(self) -> None:
        _check(self)


@message(5)
@dataclass(frozen=True, slots=True)
class Setting:
    """Name and value of one hyper-parameter; the strategy parses and checks the value."""

    name: str
    value: str


def as_settings(values: Mapping[str, Any]) -> tuple[Setting, ...]:
    """Return the settings of an algorithm by name, as a recipe has them."""
    return tuple(Setting(name, str(value)) for name, value in sorted(values.items()))


@message(30)
@dataclass(frozen=True, slots=True)
class Recipe:
    """The owner's choices for a run.

    Attributes:
        algorithm: the default needs no number of groups, and where no groups pay it is fedavg.
        settings: the algorithm's own, see `aggregator.strategies`.
        min_contributors: every device can unmask a broadcast mean, and one of fewer devices nearly shows one device's update.
        weighting: under ``uniform`` devices report neither sample counts nor sizes of test shares.
        seed: the aggregator reads it, so no secret and no origin may be derived from it. None lets the owner's program draw one.
        local: None takes the task's.
        pretrain: training in rounds of phase PRETRAIN (cold starts, one-shot); None takes ``local``.

    Raises:
        OutOfRangeError: a value is out of its range.
    """

    algorithm: str = "cfl"
    settings: tuple[Setting, ...] = ()
    rounds: U32 = knob(50, "Rounds, including those of cold starts", least=1, most=limits.MAX_ROUNDS, common=True)
    min_contributors: U16 = knob(3, "Fewest devices in a mean that is broadcast", least=1, most=65535, common=True)
    participation: float = knob(1.0, "Share of the devices drawn for a round", above=0, most=1, common=True)
    mode: str = knob(
        "rotation",
        "Mask mode: rotation (secret permutation, signs, Hadamard), permutation, signed-permutation or none",
    )
    norm_limit: float = knob(
        1000.0,
        "Largest l2 norm of one update; an update above ten times the median norm is left out in any case",
        above=0,
    )
    max_samples: U32 = knob(
        100_000,
        "Largest sample count that a device reports, even if it has more samples",
        least=1,
        most=(1 << 32) - 1,
    )
    weight_cap: float = knob(
        3.0, "Largest weight of a device in a mean, in median weights of its cluster", least=1, off=0
    )
    robust: str = knob(
        "filter", "Weights of the updates in a cluster's mean, against false ones", choices=limits.ROBUST_RULES
    )
    precision_up: str = knob(
        "float32", "Encoding of devices' updates, from the most bytes to the fewest", choices=limits.PRECISIONS
    )
    precision_down: str = knob("float32", "Encoding of the means that devices receive", choices=limits.PRECISIONS)
    quorum: float = knob(
        0.8, "Share of the devices asked that closes a round after its deadline", above=0, most=1, simulated=False
    )
    deadline_s: float = knob(60.0, "Seconds until a round closes with a quorum", above=0, simulated=False)
    weighting: str = knob(
        "samples", "Weights of devices; uniform: they report no sample counts", choices=("samples", "uniform")
    )
    norm_noise: float = knob(
        0.0,
        "Relative standard deviation of a random factor on each update, against guessing a device's data by the update's "
        "norm; 0 is off",
        least=0,
        most=limits.MAX_NORM_NOISE,
        simulated=False,
    )
    evaluate_every: U32 = knob(
        10, "Rounds between accuracy reports; 0: at the end only", least=0, most=limits.MAX_ROUNDS, simulated=False
    )
    only: str = knob("", "Only devices with this label take part, KEY=VALUE; all without", common=True, simulated=False)
    seed: U64 | None = knob(
        None,
        "Seed of participation and batch order, which the aggregator knows; not of origins; default: random",
        kind=int,
        least=0,
        most=(1 << 64) - 1,
    )
    local: LocalTraining | None = None
    pretrain: LocalTraining | None = None

    def __post_init__(self) -> None:
        _check(self)

    @property
    def values(self) -> dict[str, str]:
        """The algorithm's settings by name."""
        return {setting.name: setting.value for setting in self.settings}


class Choices(TypedDict, total=False):
    """The choices of a simulated run, for type checkers: the knobs of `Recipe` that are ``simulated``, with its types.

    Mask mode and precision have names of their own there.
    """

    rounds: int
    min_contributors: int
    participation: float
    norm_limit: float
    max_samples: int
    weight_cap: float
    robust: str
    precision_down: str
    weighting: str
    seed: int | None


DEFAULTS: Final = Recipe()
"""The choices of an owner who makes none."""
