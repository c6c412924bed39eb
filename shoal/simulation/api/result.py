"""The result of a simulated run: figures per device and per round, and the models."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn
from torch.nn.utils import vector_to_parameters

from aggregator.strategies.base import Event
from edge_client.learning.standardisation import standardised
from edge_client.storage.scales import Scale
from shoal.errors import ConfigError
from shoal.report.plot import Line, Panel, figure_of
from shoal.simulation.api.models import InUnits
from shoal.types import Float32Vector


@dataclass(frozen=True, slots=True)
class Round:
    """A closed round in figures.

    Attributes:
        round: counted from 1.
        loss: mean loss that devices reported, weighted by their samples; None if none did.
        accuracy: share of right labels over all test shares, each device with the model that it would take; None for
            regression, if no device has a test share, and in the last round of a start that IFCA did not keep.
        test_loss: mean loss over the same samples.
        clusters: number of clusters that have members; sizes: theirs, largest first.
    """

    round: int
    loss: float | None
    accuracy: float | None
    test_loss: float | None
    clusters: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class Result:
    """The result of `shoal.simulate`. Devices are in the order of the partitions.

    Attributes:
        accuracy: share of right labels on each device's test share, shape (devices,), float64, by the model that the
            device takes in the end; NaN without a test share. None for regression.
        loss: mean loss on each device's test share, shape (devices,), float64; NaN without one.
        clusters: the model that each device takes in the end, a key of `models`: shape (devices,), int64.
        history: one record a round.
        events: splits, merges and the like, as the strategy reports them, and ``training-diverged`` with the name of a device.
    """

    accuracy: NDArray[np.float64] | None
    loss: NDArray[np.float64]
    clusters: NDArray[np.int64]
    history: list[Round] = field(repr=False)
    events: list[Event] = field(repr=False)
    _template: nn.Module = field(repr=False)
    _thetas: Mapping[int, Float32Vector] = field(repr=False)
    _own: Callable[[int], Float32Vector] = field(repr=False)
    _finish: Callable[[], NDArray[np.float64]] = field(repr=False)
    _scales: tuple[Scale, ...] = field(default=(), repr=False)
    _target: tuple[float, float] = field(default=(0.0, 1.0), repr=False)

    @cached_property
    def personal(self) -> NDArray[np.float64]:
        """Share of right labels (for regression mean loss) on each device's test share after its personal finish.

        Each device chooses by its validation share, or by cross-validation if that is small, among its cluster's model, that
        model after 1, 3 and 10 more local epochs, the models above it with cfl's setting ``path``, Ditto's if `simulate` was
        given a weight, and a model that it trained alone; see `edge_client.learning.finish_rule`. Without a validation share it
        keeps its cluster's model. The first access trains these models, one device after another, which takes two or three times
        as long as a run of the strategy ``local``. Shape (devices,), float64; NaN without a test share.
        """
        return self._finish()

    @cached_property
    def models(self) -> dict[int, nn.Module]:
        """The models that the run ends with, by cluster, in ``eval`` mode and unmasked.

        Private parameters have their initial values: see `device_model`.
        """
        return {cluster: self._module(theta) for cluster, theta in self._thetas.items()}

    def device_model(self, device: int) -> nn.Module:
        """Return the model that a device ends with, in ``eval`` mode: its cluster's, with the device's own private parameters.

        Args:
            device: its place among the partitions.
        """
        return self._module(self._own(device))

    def standardised(self, device: int, x: NDArray[Any]) -> NDArray[np.float32]:
        """Return samples (n, ...) as the models take them, float32: in the scale of a device, or as they are without one.

        Args:
            device: its place among the partitions.
            x: samples in the units of the partitions.
        """
        samples = np.asarray(x, np.float32)
        return standardised(samples, self._scales[device]) if self._scales else samples

    def _module(self, theta: Float32Vector) -> nn.Module:
        module = copy.deepcopy(self._template)
        vector_to_parameters(torch.from_numpy(theta.copy()), module.parameters())
        return (module if self._target == (0.0, 1.0) else InUnits(module, *self._target)).eval()

    def to_dataframe(self) -> Any:
        """Return `history` as a ``pandas.DataFrame``, one row a round.

        Raises:
            ConfigError: pandas is not installed.
        """
        try:
            import pandas as pd
        except ImportError as error:
            raise ConfigError("data frames need pandas", hint="install it with: pip install 'shoal[frames]'") from error
        names = [f.name for f in dataclasses.fields(Round)]
        return pd.DataFrame([[getattr(record, name) for name in names] for record in self.history], columns=names)

    def plot(self) -> Any:
        """Return a ``matplotlib.figure.Figure`` of accuracy (or test loss) and training loss over the rounds.

        Raises:
            ConfigError: matplotlib is not installed.
        """
        tested = "test_loss" if self.accuracy is None else "accuracy"
        panels = [self._panel(tested, "test shares"), self._panel("loss", "training")]
        return figure_of([panel for panel in panels if panel.lines])

    def _panel(self, name: str, title: str) -> Panel:
        values = [(r.round, getattr(r, name)) for r in self.history]
        points = [(x, y) for x, y in values if y is not None]
        lines = [Line(title, [x for x, _ in points], [y for _, y in points])] if points else []
        return Panel(title=title, x_label="round", y_label=name.replace("_", " "), lines=lines, levels={})
