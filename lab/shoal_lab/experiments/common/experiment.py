"""The interface of an experiment: `Options` in, a `Result` beside the published figure out.

To add an experiment, write a function from `Options` and `Progress` to `Result`, make a `Study` of it, and list that in the
module's ``EXPERIMENTS``; `shoal_lab.experiments.registry` names the modules.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol, TypeVar

from shoal.errors import UsageError
from shoal.util.wanted import wanted

Knob = TypeVar("Knob", bool, int, float, str)

_TRUE = ("1", "on", "true", "yes")
_FALSE = ("0", "off", "false", "no")


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """The options of one run; None means the experiment's default.

    Attributes:
        algorithm: one of the experiment's algorithms; never "all", which the command runs one by one.
        devices: number of devices (m in the papers).
        samples: training samples of each device (n).
        rounds: number of rounds (R).
        seed: seed of data split, origins, batches and mask.
        mask: a mask mode of `crypto.mask.modes.registry`, or "none".
        data_dir: folder that is searched first for data sets.
        settings: NAME -> VALUE of --set, for the experiment's own knobs and for the strategy's settings.
        grid: points of a sweep: "default", or "paper" for all of the paper's.
        device: "cpu" or "cuda".
        threads: threads of one matrix product.
        checkpoint: a file to which a long run is saved, and from which it resumes if the file exists.
        scenario: one of the experiment's scenarios, if it has any.
    """

    algorithm: str | None = None
    devices: int | None = None
    samples: int | None = None
    rounds: int | None = None
    seed: int = 0
    mask: str = "none"
    data_dir: Path | None = None
    settings: Mapping[str, str] = field(default_factory=lambda: MappingProxyType({}))
    grid: str = "default"
    device: str = "cpu"
    threads: int = 1
    checkpoint: Path | None = None
    scenario: str | None = None

    def knob(self, name: str, default: Knob) -> Knob:
        """Return setting ``name``, read as the type of ``default``; ``default`` if it isn't set.

        Raises:
            UsageError: the text is not a value of that type.
        """
        text = self.settings.get(name)
        if text is None:
            return default
        kind = type(default)
        try:
            # bool("off") would be True, so switches have a parser of their own.
            value: bool | int | float | str = _parse_switch(text) if isinstance(default, bool) else kind(text)
            if isinstance(value, float) and not math.isfinite(value):
                raise ValueError
        except ValueError:
            raise UsageError(f"--set {name}={text}: it takes {wanted(kind)}") from None
        return kind(value)

    def strategy_settings(self, *knobs: str) -> dict[str, str]:
        """Return the settings other than the experiment's own ``knobs``, for the strategy, which refuses unknown ones."""
        return {name: value for name, value in self.settings.items() if name not in knobs}


def _parse_switch(text: str) -> bool:
    if text.lower() in _TRUE:
        return True
    if text.lower() in _FALSE:
        return False
    raise ValueError(text)


class Progress(Protocol):
    """Receives the progress of a run."""

    def stage(self, text: str) -> None:
        """Report the start of a step that takes a moment; ``text`` names it."""

    def round(self, algorithm: str, done: int, total: int, record: Mapping[str, Any] | None) -> None:
        """Report that some rounds, or points of a sweep, are over.

        Args:
            algorithm: the algorithm's name.
            done: number of finished rounds or points.
            total: number of all of them.
            record: measurements of the latest round or point by name, such as accuracy, loss, purity and clusters; None if there
                are none.
        """


class Quiet:
    """A `Progress` that prints nothing."""

    def stage(self, text: str) -> None:
        """Do nothing."""

    def round(self, algorithm: str, done: int, total: int, record: Mapping[str, Any] | None) -> None:
        """Do nothing."""


@dataclass(frozen=True, slots=True)
class Result:
    """The result of one algorithm in one experiment.

    Attributes:
        experiment: the experiment's id.
        algorithm: the algorithm's name.
        accuracy: percent, by the paper's protocol; None if the paper measures something else.
        clusters: number of clusters at the end.
        rounds: number of rounds with training.
        cpu_seconds_per_round: CPU time of this process.
        published: the paper's figure for this algorithm, or a mapping of several; None if absent.
        history: a mapping for each round or point, with round, accuracy, loss and purity if they were measured.
        parameters: every parameter that affects the result, so that it can be reproduced.
        accuracy_last: percent after the last round, if the protocol takes the maximum.
        purity: of the clusters against the hidden groups, in [0, 1]; None if the groups are unknown.
        ari: adjusted Rand index of the clusters against the hidden groups, in [-1, 1]; None if the groups are unknown.
        extra: further data: gap, success, perplexity, discrepancy, splits, population.
    """

    experiment: str
    algorithm: str
    accuracy: float | None
    clusters: int
    rounds: int
    cpu_seconds_per_round: float
    published: Any
    history: Sequence[Mapping[str, Any]]
    parameters: Mapping[str, Any]
    accuracy_last: float | None = None
    purity: float | None = None
    ari: float | None = None
    extra: Mapping[str, Any] = field(default_factory=lambda: MappingProxyType({}))

    def data(self) -> dict[str, Any]:
        """Return the JSON object of ``shoal simulate --json``; values that aren't finite become null."""
        accuracy_last = {} if self.accuracy_last is None else {"accuracy_last": self.accuracy_last}
        fixed = {
            "experiment": self.experiment,
            "algorithm": self.algorithm,
            "accuracy": self.accuracy,
            **accuracy_last,
            "purity": self.purity,
            "ari": self.ari,
            "clusters": self.clusters,
            "rounds": self.rounds,
            "cpu_seconds_per_round": self.cpu_seconds_per_round,
            "published": self.published,
        }
        clash = fixed.keys() & self.extra.keys()
        if clash:
            raise ValueError(f"extra values would hide {sorted(clash)}")
        # In this order, the long values come last.
        data: dict[str, Any] = as_json({**fixed, **self.extra, "parameters": self.parameters, "history": self.history})
        return data


def as_json(value: Any) -> Any:
    """Convert numpy's numbers and arrays, paths, tuples and mappings in ``value`` to JSON's types; NaN becomes None."""
    if isinstance(value, Mapping):
        return {str(k): as_json(v) for k, v in value.items()}
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, list | tuple | set | frozenset):
        return [as_json(v) for v in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, bool | int | str) else str(value)


class Experiment(Protocol):
    """One table or figure of a paper.

    Attributes:
        id: its name on the command line.
        paper: cfl, ifca or fedgroup, with the section.
        title: a description in one line.
        algorithms: the algorithms that it can run, the default first.
        published: the paper's figures by algorithm.
        needs: names of data sets, as `shoal_lab.experiments.data.datasets.load` knows them.
        figure: kind of figure for `shoal.report.plot`: accuracy, identity, perplexity, gap, clusters, norms, success,
            chance, panels or fleet.
        scenarios: descriptions of its scenarios by name, with title, kind, data, network and needs; empty if it has none.
    """

    @property
    def id(self) -> str: ...  # noqa: D102
    @property
    def paper(self) -> str: ...  # noqa: D102
    @property
    def title(self) -> str: ...  # noqa: D102
    @property
    def algorithms(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def published(self) -> Mapping[str, Any]: ...  # noqa: D102
    @property
    def needs(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def figure(self) -> str: ...  # noqa: D102
    @property
    def scenarios(self) -> Mapping[str, Mapping[str, Any]]: ...  # noqa: D102

    def run(self, options: Options, progress: Progress) -> Result:
        """Run one algorithm, ``options.algorithm`` or the default."""


@dataclass(frozen=True, slots=True)
class Study:
    """An `Experiment` whose run is a function; the attributes are the protocol's.

    Attributes:
        resumable: the algorithms whose runs can be saved in a checkpoint.
    """

    id: str
    paper: str
    title: str
    algorithms: tuple[str, ...]
    published: Mapping[str, Any]
    runner: Callable[[Options, Progress], Result]
    needs: tuple[str, ...] = ()
    figure: str = "accuracy"
    resumable: tuple[str, ...] = ()
    scenarios: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: MappingProxyType({}))

    def run(self, options: Options, progress: Progress) -> Result:
        """Run one algorithm, ``options.algorithm`` or the default.

        Raises:
            UsageError: a checkpoint is requested, and the algorithm's run can't be saved in one.
        """
        algorithm = options.algorithm or self.algorithms[0]
        if options.checkpoint is not None and algorithm not in self.resumable:
            names = ", ".join(self.resumable)
            raise UsageError(
                f"{self.id} can't save a run of {algorithm} in a checkpoint",
                hint=f"it can for {names}" if names else "leave --checkpoint out: its runs are short",
            )
        return self.runner(options, progress)
