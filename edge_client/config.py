"""A device's configuration: flags, SHOAL_EDGE_*, the [edge] table of a TOML file, defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from edge_client.learning.executor.choice import AUTO, check_setting
from edge_client.learning.reading import Reading
from edge_client.metered import parse_hours
from shoal.address import check_chunk_bytes
from shoal.errors import ConfigError
from shoal.limits import CHUNK_BYTES, MOST_DITTO_WEIGHT

LEAST_KBPS: Final = 8.0
"""1,000 bytes a second: below it a reminder would take longer than the pause before the next."""
MOST_KBPS: Final = 1e6


@dataclass(frozen=True, slots=True)
class EdgeConfig:
    """The settings of `shoal-edge run`.

    Attributes:
        dir: keys, membership and state of this device.
        data: a file or folder of samples, in any format of `edge_client.learning.data`.
        label: name of the label column of tables; empty for the task's.
        separator: of CSV files, one character or ``tab``; empty to find it.
        skip_bad: most damaged samples that are left out; None for the larger of 3 samples and 1 %.
        watch: read data files that have grown again at the next round.
        broker: mqtt:// or mqtts:// address; if empty, the one of the owner's grant. It may hold a password.
        ca, cert, key: PEM files for mqtts.
        threads: threads of ONNX Runtime or of numpy's BLAS, at least 1.
        once: exit after one run and its personal finish instead of waiting for the next; a run that was reported as finished
            before does not count.
        personal: ``on`` for the personal finish after each run, ``off``, or the weight of Ditto's proximal term, with which
            Ditto's personal model is one more candidate.
        executor: ``onnxruntime`` or ``numpy``, which computes the task; ``auto`` for ONNX Runtime if it is installed, else numpy.
        log: debug, info, warning or error.
        max_kbps: most kilobits a second that are sent to the broker; 0 is no limit.
        chunk_bytes: largest payload of a chunk that is sent.
        vitals: report disk, memory, load, temperature and battery to the aggregator every ten minutes.
        metered: hours of the day, such as ``08:00-20:00``, in which the device declines all rounds but the final one; empty for
            none.
    """

    dir: Path
    data: Path
    broker: str = field(default="", repr=False)
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    threads: int = 1
    once: bool = False
    log: str = "info"
    personal: str = "on"
    label: str = ""
    separator: str = ""
    watch: bool = False
    executor: str = AUTO
    max_kbps: float = 0.0
    metered: str = ""
    vitals: bool = False
    skip_bad: int | None = None
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ConfigError(f"threads must be at least 1, not {self.threads}")
        ditto_weight(self.personal)
        self.reading  # noqa: B018 - it checks its options
        check_setting(self.executor)
        if self.max_kbps and not LEAST_KBPS <= self.max_kbps <= MOST_KBPS:
            raise ConfigError(
                f"max_kbps is 0, for no limit, or from {LEAST_KBPS:g} to {MOST_KBPS:g}, not {self.max_kbps:g}",
                hint="kilobits a second: 64 is a slow mobile link",
            )
        parse_hours(self.metered)
        check_chunk_bytes(self.chunk_bytes)

    @property
    def reading(self) -> Reading:
        """How the files of samples are read."""
        return Reading(self.label, self.separator, self.skip_bad, growing=self.watch)

    @property
    def finishes(self) -> bool:
        """Whether the device does the personal finish by itself."""
        return self.personal != "off"


def ditto_weight(personal: str) -> float:
    """Return the weight of Ditto's proximal term that a text names; 0, for no such candidate, for ``on`` and ``off``.

    Raises:
        ConfigError: the text is no weight.
    """
    if personal in ("on", "off"):
        return 0.0
    try:
        weight = float(personal)
    except ValueError:
        weight = -1.0
    if not 0 < weight <= MOST_DITTO_WEIGHT:
        raise ConfigError(
            f"personal is on, off, or a weight above 0 and up to {MOST_DITTO_WEIGHT:g}, not {personal!r}",
            hint="a weight of 0.1 to 1 is usual: the larger, the nearer Ditto's model stays to the cluster's",
        )
    return weight
