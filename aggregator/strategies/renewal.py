"""The models and vectors that a strategy takes from one mask epoch into the next.

At a rollover devices fold every model into a new origin, so that its offset starts at zero again. Devices mask other vectors
under the new key, or the strategy drops them: no vector under the old key remains.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from aggregator.strategies.base import ClientUpdate, ClusterModel, UploadKey
from shoal.errors import IntegrityError
from shoal.types import Float32Vector


@dataclass(frozen=True, slots=True)
class Carried:
    """A masked vector (d,), float32, that is no model, and how many devices' updates are averaged in it."""

    vector: Float32Vector
    contributors: int


@dataclass(frozen=True, slots=True)
class Inherited:
    """The models and vectors that the next mask epoch needs.

    Attributes:
        models: every model that is needed, by its id; the i-th in order of ids becomes origin i.
        shared: with weight sharing, the ``shared`` segment of all of them; ``models`` are then ``cluster`` segments.
        carried: vectors that the folding device masks under the new key, by name; vectors of fewer than
            ``min_contributors`` devices are not sent to a device, and so are dropped.
        own: uploads whose devices mask their own update under the new key.
    """

    models: Mapping[int, ClusterModel]
    shared: ClusterModel | None = None
    carried: Mapping[str, Carried] = field(default_factory=dict)
    own: Mapping[UploadKey, ClientUpdate] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Renewal:
    """The result of a rollover.

    Attributes:
        round: the round that it followed.
        origins: model id -> the origin into which the whole model was folded, with all segments.
        carried: the carried vectors that were masked under the new key, by name.
        own: the uploads whose vector was masked under the new key, with that key's id.
    """

    round: int
    origins: Mapping[int, int]
    carried: Mapping[str, Float32Vector] = field(default_factory=dict)
    own: Mapping[UploadKey, ClientUpdate] = field(default_factory=dict)


def fresh_slot(renewal: Renewal, model: int) -> ClusterModel:
    """Return the model as it is after the rollover: at an origin of its own.

    Raises:
        IntegrityError: the rollover did not fold it.
    """
    if model not in renewal.origins:
        raise IntegrityError(f"model {model} did not come through the rollover after round {renewal.round}")
    return ClusterModel(renewal.origins[model], version=renewal.round)


def renewed_rows(renewal: Renewal, names: Sequence[str]) -> tuple[Float32Vector, ...]:
    """Return the carried vectors ``names``, (d,) float32 each, under the new key; none unless all are there."""
    if not all(name in renewal.carried for name in names):
        return ()
    return tuple(renewal.carried[name] for name in names)


def retained(of_device: Mapping[str, int], active: frozenset[str]) -> dict[str, int]:
    """Return ``of_device`` without devices that are not ``active``."""
    return {device: at for device, at in of_device.items() if device in active}
