"""Files for the models above a device's cluster in cfl's tree, stored at the end of a run with the setting ``path``.

Sattler et al., section V-C: the nearer to the root, the more general the model. A device may predict with any of them, or
with the average of the outputs of all of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from edge_client.storage.state import OwnModel, read_model, write_model
from shoal.errors import ConfigError
from shoal.protocol.messages import Phase

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from shoal.protocol.messages import Announcement, Assignment
    from shoal.types import Float32Vector

FILES: Final = "above-*.bin"


def keep(
    directory: Path, announcement: Announcement, order: Assignment, own: int, models: Mapping[int, Float32Vector]
) -> list[int]:
    """Store the models of a run's final round if the assignment asks for it; remove those of an earlier run in any case.

    Args:
        directory: the device's.
        announcement: the final round.
        order: the device's.
        own: id of the model of the device's own cluster.
        models: theta (d,) float32 of every candidate.

    Returns:
        the ids on the device's path, from the root to its own; empty if the assignment is another one.
    """
    path = sorted(models) if order.phase == Phase.KEEP else []
    a = announcement
    replace(directory, [OwnModel(a.run, a.run_id, a.round, m, models[m]) for m in path if m != own])
    return path


def replace(directory: Path, models: Iterable[OwnModel]) -> None:
    """Store ``models`` durably, then remove all other files of earlier ones."""
    wanted = set()
    for model in models:
        path = directory / FILES.replace("*", f"{model.cluster:05d}")
        write_model(path, model, durable=True)
        wanted.add(path)
    for path in directory.glob(FILES):
        if path not in wanted:
            path.unlink()


def above(directory: Path, own: OwnModel) -> list[OwnModel]:
    """Return the stored models of the run and round of ``own``, in order of their ids, which grow from the root."""
    found = []
    for path in sorted(directory.glob(FILES)):
        try:
            found.append(read_model(path))
        except ConfigError as error:
            if not isinstance(error.__cause__, FileNotFoundError):
                raise  # a missing file is no error: a running program may have just replaced it with another run's
    return [m for m in found if (m.run_id, m.round) == (own.run_id, own.round)]


def pick(models: Sequence[OwnModel], node: int | None) -> OwnModel:
    """Return the model of ``node``, or the last of ``models``, which is the device's own, if ``node`` is None.

    Raises:
        ConfigError: the device does not hold it.
    """
    if node is None:
        return models[-1]
    for model in models:
        if model.cluster == node:
            return model
    ids = ", ".join(str(m.cluster) for m in models)
    raise ConfigError(
        f"this device has no model of node {node}, but of {ids}",
        hint="a cfl run with the setting path=on leaves every model from the device's cluster to the root",
    )
