"""What a strategy takes from one mask epoch into the next.

At a rollover devices fold every model into a new origin, so that its offset starts at zero again, and whatever else is
masked is either masked anew, by the devices, or forgotten: no vector of the old key outlives it.
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
    """What must outlive a mask epoch.

    Attributes:
        models: every model that lives on, by its id; the i-th in order of ids becomes origin i.
        shared: with weight sharing, the ``shared`` segment of all of them; ``models`` are then ``cluster`` segments.
        carried: vectors that the device which folds masks anew, by name; those of fewer than ``min_contributors``
            devices are not sent to anybody and so are dropped.
        own: uploads whose devices mask their own update anew.
    """

    models: Mapping[int, ClusterModel]
    shared: ClusterModel | None = None
    carried: Mapping[str, Carried] = field(default_factory=dict)
    own: Mapping[UploadKey, ClientUpdate] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Renewal:
    """What has come through a rollover.

    Attributes:
        round: the round that it followed.
        origins: model id -> the origin that it was folded into, whole, whatever the segments.
        carried: those of the carried vectors that were masked anew, by name.
        own: those of the uploads whose vector was masked anew, with the next key's id.
    """

    round: int
    origins: Mapping[int, int]
    carried: Mapping[str, Float32Vector] = field(default_factory=dict)
    own: Mapping[UploadKey, ClientUpdate] = field(default_factory=dict)


def fresh_slot(renewal: Renewal, model: int) -> ClusterModel:
    """Return the model as it is after the rollover: at an origin of its own.

    Raises:
        IntegrityError: the rollover did not bring it.
    """
    if model not in renewal.origins:
        raise IntegrityError(f"model {model} did not come through the rollover after round {renewal.round}")
    return ClusterModel(renewal.origins[model], version=renewal.round)


def renewed_rows(renewal: Renewal, names: Sequence[str]) -> tuple[Float32Vector, ...]:
    """Return the carried vectors ``names``, (d,) float32 each, under the new key; none at all unless all of them came."""
    if not all(name in renewal.carried for name in names):
        return ()
    return tuple(renewal.carried[name] for name in names)


def retained(of_device: Mapping[str, int], active: frozenset[str]) -> dict[str, int]:
    """Return where devices are, without those that are not ``active``."""
    return {device: at for device, at in of_device.items() if device in active}
