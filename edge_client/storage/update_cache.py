"""Cache of a device's own updates that a run of several mask epochs needs again.

The aggregator asks for an update to be kept when it has become part of its memory, a round or more after it came, so the
newest is held until the next. Kept updates are stored in clear in the device's private directory until the run is over.
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
"""An update for each cut above the device's cluster, and a few for splits that failed; CFL asks for no more."""


def wanted(plan: RunPlan) -> bool:
    """Whether the aggregator may ask for an update of an earlier round."""
    return plan.capabilities.keep_updates and plan.epochs > 1


class UpdateCache:
    """The newest update of a run, and those that were kept."""

    def __init__(self, directory: Path, plan: RunPlan) -> None:
        """Take up what an earlier life has kept of this run; what it kept of another goes."""
        self._directory = directory
        self._run = (plan.run, plan.run_id)
        self._newest: tuple[int, Float32Vector] | None = None
        for path in directory.glob(FILES):
            kept = self._read(path)
            if kept is not None and kept.run_id != plan.run_id:
                path.unlink()

    def note(self, round_: int, update: Float32Vector) -> None:
        """Hold the update (d,), float32, of a round until the next one."""
        self._newest = (round_, update)

    def keep(self, round_: int) -> None:
        """Keep the update of ``round_`` durably, if it is at hand and not kept already, and as long as there is room."""
        path = self._path(round_)
        if self._newest is None or self._newest[0] != round_ or path.exists():
            return
        if len(list(self._directory.glob(FILES))) >= MOST_KEPT:
            LOG.warning("no more updates are kept", extra={"kv": {"round": round_, "kept": MOST_KEPT}})
        else:
            write_model(path, OwnModel(*self._run, round_, 0, self._newest[1]), durable=True)

    def find(self, round_: int) -> Float32Vector | None:
        """Return the update (d,), float32, of a round if it is kept, or the newest; else None."""
        if self._newest is not None and self._newest[0] == round_:
            return self._newest[1]
        path = self._path(round_)
        kept = self._read(path) if path.exists() else None
        return None if kept is None else kept.theta

    def _read(self, path: Path) -> OwnModel | None:
        """Return what a file holds; a damaged one goes, for one update is no loss."""
        try:
            return read_model(path)
        except IntegrityError as error:
            LOG.warning("an update that was kept is damaged", extra={"kv": {"file": path.name, "reason": error}})
            path.unlink()
            return None

    def _path(self, round_: int) -> Path:
        return self._directory / FILES.replace("*", f"{round_:06d}")
