"""The scales by which a device standardises its samples, one file for each run that may still need it.

A run's scale is fixed when the run begins on the device, or, in a federated one, once the fleet's statistics have arrived. A
restart, `predict`, `evaluate` and the personal finish use the same one, whatever the data have become since. The files stay on
the device.

Rules: `Scales.save` writes the file durably before a model is trained by it, and `Scales.keep_only` removes those of runs that
are neither current nor among the finished models.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

from edge_client.checked_files import make_folder, read_checked, write_checked
from shoal.errors import IntegrityError
from shoal.protocol.codec import Fixed16, encode, message
from shoal.util.files import write_failed

FOLDER: Final = "scales"
FILES: Final = "scale-*.bin"


@message(92)
@dataclass(frozen=True, slots=True)
class Scale:
    """Mean and standard deviation of each value of a sample; the file has its SHA-256 behind.

    Attributes:
        run_id: the run whose models take samples of this scale.
        means: (p,), in the units of the data.
        deviations: (p,), above 0; 1 for a feature that does not vary.
        doubted: what the fleet's statistics tell falsely, such as features whose figures had to be limited.
    """

    run_id: Fixed16
    means: tuple[float, ...]
    deviations: tuple[float, ...]
    doubted: tuple[str, ...] = ()


class Scales:
    """The scales in one device's directory."""

    def __init__(self, directory: Path) -> None:
        self._folder = directory / FOLDER

    def load(self, run_id: bytes) -> Scale | None:
        """Return the scale of a run; None if absent.

        Raises:
            IntegrityError: the file is damaged, or of another run.
        """
        path = self._path(run_id)
        hint = "remove it; the device makes its scale again in the next run"
        found = read_checked(path, Scale, hint)
        if found is None:
            return None
        scale, rest = found
        if len(rest) or scale.run_id != run_id or len(scale.means) != len(scale.deviations):
            raise IntegrityError(f"{path} is not the scale of its run", hint=hint)
        if not all(deviation > 0 for deviation in scale.deviations):
            raise IntegrityError(f"{path} has a deviation that is not above 0", hint=hint)
        return scale

    def save(self, scale: Scale) -> None:
        """Store a run's scale durably.

        Raises:
            ConfigError: the file can't be written; StorageError if the disk is full.
        """
        make_folder(self._folder)
        write_checked(self._path(scale.run_id), encode(scale))

    def keep_only(self, run_ids: frozenset[bytes]) -> None:
        """Remove the scales of all other runs.

        Raises:
            ConfigError: a file can't be removed.
        """
        wanted = {self._path(run_id) for run_id in run_ids}
        for path in self._folder.glob(FILES):
            if path not in wanted:
                try:
                    path.unlink(missing_ok=True)
                except OSError as error:
                    raise write_failed(path, error) from error

    def _path(self, run_id: bytes) -> Path:
        return self._folder / FILES.replace("*", run_id.hex())
