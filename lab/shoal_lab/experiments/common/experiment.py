"""The interface of an experiment: `Options` in, a `Result` beside the published figure out, described by a `Study`.

Most studies are tables in the TOML files of `shoal_lab.experiments.studies`, which `shoal_lab.experiments.registry` reads. A
study that is a program of its own names its function in the table.
"""

from __future__ import annotations

import dataclasses
import difflib
import importlib
import math
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Final, Protocol

from shoal.errors import UsageError
from shoal.hints import wanted

_SWITCHES: Final = {
    **dict.fromkeys(("1", "on", "true", "yes"), True),
    **dict.fromkeys(("0", "off", "false", "no"), False),
}
_NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


class Values(dict[str, Any]):
    """A study's values by name; one that a task or a measure needs and the table lacks is a UsageError."""

    def __missing__(self, name: str) -> Any:
        raise UsageError(f"the study lacks the value {name!r}", hint=f"add {name} = ... under values")


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
        settings: NAME -> VALUE of --set; a study's runner gets those of the strategy only, and the others in ``values``.
        grid: points of a sweep: "default", or "paper" for all of the paper's.
        device: "cpu" or "cuda".
        threads: threads of one matrix product.
        checkpoint: a file to which a long run is saved, and from which it resumes if the file exists.
        scenario: one of the experiment's scenarios, if it has any.
        values: the study's own values for a runner, with those of --set.
    """

    algorithm: str = ""
    devices: int | None = None
    samples: int | None = None
    rounds: int | None = None
    seed: int = 0
    mask: str = "none"
    data_dir: Path | None = None
    settings: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    grid: str = "default"
    device: str = "cpu"
    threads: int = 1
    checkpoint: Path | None = None
    scenario: str | None = None
    values: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)

    def of(self, *names: str) -> dict[str, Any]:
        """Return the options ``names``, as keyword arguments of a function that deals data.

        Raises:
            UsageError: the number of devices is asked, and there is none.
        """
        if "devices" in names and self.devices is None:
            raise UsageError("how many devices?", hint="give --devices, or devices = ... in the study's table")
        return {name: getattr(self, name) for name in names}

    def parameters(self) -> dict[str, Any]:
        """Return everything that decides a run's result, as its parameters."""
        sizes = {"devices": self.devices, "samples": self.samples, "rounds": self.rounds}
        given = {name: size for name, size in sizes.items() if size is not None}
        return {**given, "seed": self.seed, "mask": self.mask, **self.values, "settings": dict(self.settings)}


def parsed(name: str, text: str, default: Any) -> Any:
    """Return the ``text`` of a setting as a value of the type of its default; a list is written ``64,64``.

    Raises:
        UsageError: the text is no such value.
    """
    kind = type(default)
    try:
        if kind is bool:
            value: Any = _SWITCHES[text.lower()]
        elif kind is list:
            value = [int(part) for part in text.split(",")]
        else:
            value = kind(text)
        if (kind is float and not math.isfinite(value)) or (kind is list and min(value) < 1):
            raise ValueError
    except (ValueError, KeyError):
        words = "sizes, such as 64,64" if kind is list else wanted(kind)
        raise UsageError(f"--set {name}={text}: it takes {words}", hint=f"the default is {name}={default}") from None
    return value


def imported(place: str) -> Callable[..., Any]:
    """Return the function at ``module:function`` of this package."""
    module, _, name = place.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(f"shoal_lab.experiments.{module}"), name)
    return function


def nearest(name: str, known: Iterable[str]) -> str:
    """Return a hint for an unknown name: the nearest known one, and all of them."""
    names = sorted(known)
    close = difflib.get_close_matches(name, names, 1)
    there = f"there are {', '.join(names)}" if names else "there are none"
    return f"do you mean {close[0]}? {there}" if close else there


def one_of(what: str, name: str, known: Collection[str]) -> str:
    """Return ``name``, which is one of the ``known`` ones.

    Raises:
        UsageError: it is another; ``what`` says of which kind.
    """
    if name not in known:
        raise UsageError(f"no {what} {name!r}", hint=nearest(name, known))
    return name


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


Result = dict[str, Any]
"""The JSON object of ``shoal simulate --json``, see `Study.result`."""


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


RUNNER: Final = "studies.run:run"
"""The runner of studies that are tables only."""


@dataclass(frozen=True, slots=True)
class Study:
    """One table or figure of a paper.

    Attributes:
        id: its name on the command line.
        paper: cfl, ifca or fedgroup, with the section.
        title: a description in one line.
        algorithms: the algorithms that it can run, the default first.
        published: the paper's figures by algorithm.
        runner: a function of the study, its resolved options and progress, or the function's place in this package, as
            ``module:function``.
        needs: names of data sets, as `shoal_lab.experiments.data.datasets.load` knows them.
        figure: kind of figure for `shoal_lab.experiments.figures`: accuracy, identity, perplexity, gap, clusters, norms, success,
            chance, panels or fleet.
        resumable: the algorithms whose runs can be saved in a checkpoint.
        scenarios: descriptions of its scenarios by name, with title, kind, data, network and needs; empty if it has none.
        devices, samples, rounds: defaults of the options; None where the study has none.
        refuses: options that it doesn't take, with the reason.
        values: the study's settings with their defaults; ``--set`` takes values of the same type.
        methods: algorithm -> its ``strategy``, whose settings ``--set`` takes too, the strategy's ``settings``, ``values`` in
            the place of the study's, ``fixed`` ones that ``--set`` doesn't change, and ``clusters``, whether the result
            reports its clusters. "$NAME" is the value of that name.
        task: the data and the network of a table, a name in `shoal_lab.experiments.studies.tasks`.
        measure: what a table measures, a name in `shoal_lab.experiments.studies.run`.
        published_by: the value by which a published mapping is read.
    """

    id: str
    paper: str
    title: str
    algorithms: Sequence[str]
    published: Mapping[str, Any]
    runner: str | Callable[[Study, Options, Progress], Result] = RUNNER
    needs: Sequence[str] = ()
    figure: str = "accuracy"
    resumable: Sequence[str] = ()
    scenarios: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: _NOTHING)
    devices: int | None = None
    samples: int | None = None
    rounds: int | None = None
    refuses: Mapping[str, str] = field(default_factory=lambda: _NOTHING)
    values: Mapping[str, Any] = field(default_factory=lambda: _NOTHING)
    methods: Mapping[str, Mapping[str, Any]] = field(default_factory=lambda: _NOTHING)
    task: str = ""
    measure: str = ""
    published_by: str = ""

    def run(self, options: Options, progress: Progress) -> Result:
        """Run one algorithm, ``options.algorithm`` or the default; raises UsageError as `resolved`."""
        runner = imported(self.runner) if isinstance(self.runner, str) else self.runner
        result: Result = runner(self, self.resolved(options), progress)
        return result

    def result(
        self,
        options: Options,
        parameters: Mapping[str, Any] = _NOTHING,
        *,
        accuracy: float | None,
        clusters: int,
        cpu_seconds_per_round: float,
        history: Sequence[Mapping[str, Any]],
        rounds: int | None = None,
        accuracy_last: float | None = None,
        purity: float | None = None,
        ari: float | None = None,
        extra: Mapping[str, Any] = _NOTHING,
    ) -> Result:
        """Return the result of one algorithm, beside the published one; values that aren't finite become null.

        Args:
            options: the run's, which the result holds as parameters.
            parameters: more of them, or others in their place.
            accuracy: percent, by the paper's protocol; None if the paper measures something else.
            clusters: number of clusters at the end.
            cpu_seconds_per_round: CPU time of this process.
            history: a mapping for each round or point, with round, accuracy, loss and purity if they were measured.
            rounds: number of rounds with training; the options' if None.
            accuracy_last: percent after the last round, if the protocol takes the maximum.
            purity: of the clusters against the hidden groups, in [0, 1]; None if the groups are unknown.
            ari: adjusted Rand index of the clusters against the hidden groups, in [-1, 1]; None if the groups are unknown.
            extra: further data: gap, success, perplexity, discrepancy, splits, population.
        """
        every = {**options.parameters(), **parameters}
        published = self.published.get(options.algorithm)
        if self.published_by and isinstance(published, Mapping):
            published = published.get(str(every[self.published_by]), published)
        fixed = {
            "experiment": self.id,
            "algorithm": options.algorithm,
            "accuracy": accuracy,
            **({} if accuracy_last is None else {"accuracy_last": accuracy_last}),
            "purity": purity,
            "ari": ari,
            "clusters": clusters,
            "rounds": (options.rounds or 0) if rounds is None else rounds,
            "cpu_seconds_per_round": cpu_seconds_per_round,
            "published": published,
        }
        if clash := fixed.keys() & extra.keys():
            raise ValueError(f"extra values would hide {sorted(clash)}")
        # In this order, the long values come last.
        result: Result = as_json({**fixed, **extra, "parameters": every, "history": history})
        return result

    def resolved(self, options: Options) -> Options:
        """Return the options with the study's defaults, its own values apart from the strategy's settings.

        Raises:
            UsageError: there is no such algorithm, scenario or setting, the study refuses an option, or a checkpoint is
                requested and the algorithm's run can't be saved in one.
        """
        algorithm = options.algorithm or self.algorithms[0]
        if algorithm not in self.algorithms:
            raise UsageError(f"{self.id} has no algorithm {algorithm!r}", hint=nearest(algorithm, self.algorithms))
        for name, reason in self.refuses.items():
            if getattr(options, name) is not None:
                raise UsageError(reason, hint=f"leave --{name} out")
        if options.scenario is not None and options.scenario not in self.scenarios:
            raise UsageError(
                f"{self.id} has no scenario {options.scenario!r}", hint=nearest(options.scenario, self.scenarios)
            )
        if options.checkpoint is not None and algorithm not in self.resumable:
            names = ", ".join(self.resumable)
            raise UsageError(
                f"{self.id} can't save a run of {algorithm} in a checkpoint",
                hint=f"it can for {names}" if names else "leave --checkpoint out: its runs are short",
            )
        method = self.methods.get(algorithm, {})
        of_strategy = _settings_of(method.get("strategy", ""))
        values, settings = Values({**self.values, **method.get("values", {})}), {}
        for name, text in options.settings.items():
            if name in values:
                values[name] = parsed(name, text, values[name])
            elif name in of_strategy:
                settings[name] = text
            else:
                raise UsageError(
                    f"{self.id} has no setting {name!r} with {algorithm}", hint=nearest(name, {*values, *of_strategy})
                )
        taken = {
            name: str(values[value[1:]] if str(value).startswith("$") else value)
            for name, value in method.get("settings", {}).items()
        }
        sizes = {name: getattr(options, name) or getattr(self, name) for name in ("devices", "samples", "rounds")}
        if options.rounds is None and (sizes["samples"] or 0) < values.get("few_samples", 0):
            sizes["rounds"] = values["few_samples_rounds"]
        return dataclasses.replace(
            options,
            algorithm=algorithm,
            settings=taken | settings,
            values=Values(values | method.get("fixed", {})),
            **sizes,
        )


def _settings_of(strategy: str) -> set[str]:
    if not strategy:
        return set()
    from aggregator.strategies.registry import find_strategy

    return {f.name for f in dataclasses.fields(find_strategy(strategy).settings_type)}
