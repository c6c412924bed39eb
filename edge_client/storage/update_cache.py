"""Cache of a device's own updates that a run of several mask epochs needs again.

The aggregator asks a device to cache an update once that update is part of its clustering state, which is a round or more
after the upload. The newest update is therefore held in memory until the next one. Cached updates are stored in clear in the
device's private directory, and removed when the device follows another run.
"""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING, Final

from edge_client.storage.state import OwnModel, read_model, write_model
from shoal.errors import IntegrityError

if TYPE_CHECKING:
    from shoal.protocol.documents import RunPlan
    from shoal.types import Float32Vector

LOG = logging.getLogger("shoal.edge")
FILES: Final = "own-*.bin"
MOST_KEPT: Final = 64
"""Enough for one update for each split above the device's cluster, and a few for splits that failed."""


def wanted(plan: RunPlan) -> bool:
    """Whether the aggregator may ask for an update of an earlier round."""
    return plan.capabilities.keep_updates and plan.epochs > 1


class UpdateCache:
    """The newest update of a run, in memory, and the cached ones, as files."""

    def __init__(self, directory: Path, plan: RunPlan) -> None:
        """Reuse the updates of this run that were cached before a restart; remove those of another run."""
        self._directory = directory
        self._run = (plan.run, plan.run_id)
        self._newest: tuple[int, Float32Vector] | None = None
        for path in directory.glob(FILES):
            kept = self._read(path)
            if kept is not None and kept.run_id != plan.run_id:
                path.unlink()

    def note(self, round_: int, update: Float32Vector) -> None:
        """Hold the update (d,), float32, of a round in memory until the next one."""
        self._newest = (round_, update)

    def keep(self, round_: int) -> None:
        """Cache the update of ``round_`` durably if it is the newest, not cached yet, and the cache is not full."""
        path = self._path(round_)
        if self._newest is None or self._newest[0] != round_ or path.exists():
            return
        if len(list(self._directory.glob(FILES))) >= MOST_KEPT:
            LOG.warning("no more updates are kept", extra={"kv": {"round": round_, "kept": MOST_KEPT}})
        else:
            # The file format of a model serves for an update; it has no cluster.
            write_model(path, OwnModel(*self._run, round_, 0, self._newest[1]), durable=True)

    def find(self, round_: int) -> Float32Vector | None:
        """Return the update (d,), float32, of a round if it is the newest or cached; else None."""
        if self._newest is not None and self._newest[0] == round_:
            return self._newest[1]
        path = self._path(round_)
        kept = self._read(path) if path.exists() else None
        return None if kept is None else kept.theta

    def _read(self, path: Path) -> OwnModel | None:
        """Read a cached update; remove a damaged file and return None, since a device can do without one update."""
        try:
            return read_model(path)
        except IntegrityError as error:
            LOG.warning("a cached update is damaged", extra={"kv": {"file": path.name, "reason": error}})
            path.unlink()
            return None

    def _path(self, round_: int) -> Path:
        return self._directory / FILES.replace("*", f"{round_:06d}")
