"""Updates of its own that a device keeps: those that CFL remembers a split by, to be masked anew in a later mask epoch.

The aggregator asks for one when it has become part of its memory, a round or more after it came, so the newest is held
until the next. What is kept lies in clear in the device's private directory until the run is over.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Final

from edge_client.state import OwnModel, read_model, write_model

if TYPE_CHECKING:
    from wire.documents import RunPlan
    from wire.types import Float32Vector

FILES: Final = "own-*.bin"


def wanted(plan: RunPlan) -> bool:
    """Whether anybody may ask for an update of an earlier round."""
    return plan.algorithm == "cfl" and plan.epochs > 1


class OwnUpdates:
    """The newest update of a run, and those that were kept."""

    def __init__(self, directory: Path, plan: RunPlan) -> None:
        """Take up what an earlier life has kept of this run; what it kept of another goes."""
        self._directory = directory
        self._run = (plan.run, plan.run_id)
        self._newest: tuple[int, Float32Vector] | None = None
        for path in directory.glob(FILES):
            if read_model(path).run_id != plan.run_id:
                path.unlink()

    def note(self, round_: int, update: Float32Vector) -> None:
        """Hold the update (d,), float32, of a round until the next one."""
        self._newest = (round_, update)

    def keep(self, round_: int) -> None:
        """Keep the update of ``round_`` durably, if it is at hand and not kept already."""
        path = self._path(round_)
        if self._newest is not None and self._newest[0] == round_ and not path.exists():
            write_model(path, OwnModel(*self._run, round_, 0, self._newest[1]), durable=True)

    def find(self, round_: int) -> Float32Vector | None:
        """Return the update (d,), float32, of a round if it is kept, or the newest; else None."""
        if self._newest is not None and self._newest[0] == round_:
            return self._newest[1]
        path = self._path(round_)
        return read_model(path).theta if path.exists() else None

    def _path(self, round_: int) -> Path:
        return self._directory / FILES.replace("*", f"{round_:06d}")
