"""The settings of a device, from the command line, SHOAL_EDGE_*, the [edge] table of a TOML file, and defaults.

In metered hours, a time of day, the device takes part in no training round, since its link costs money by the byte. It still
sends its presence and its declines, a few hundred bytes a round, and takes part in the final round.

Example:
    >>> hours = parse_hours("22:00-06:30")
    >>> hours.contains(23 * 60), hours.contains(6 * 60 + 30), str(hours)
    (True, False, '22:00-06:30')
"""

from __future__ import annotations

import re
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Final

from edge_client.learning.executor.choice import AUTO, MOST_TRAINER_S, TrainerCommand, check_setting
from edge_client.learning.reading import Reading
from shoal.address import check_chunk_bytes
from shoal.errors import ConfigError
from shoal.limits import CHUNK_BYTES, MOST_DITTO_WEIGHT
from shoal.util.config import Broker, Ca, Cert, ChunkBytes, Key, Proxy, Setting

LEAST_KBPS: Final = 8.0
"""1,000 bytes a second: below it a reminder would take longer than the pause before the next."""
MOST_KBPS: Final = 1e6
DATA_HELP: Final = (
    ".npz with x and y, a .csv or .parquet table, a folder of these, IDX files, or images in one folder for each class."
)


@dataclass(frozen=True, slots=True)
class EdgeConfig:
    """The settings of `shoal-edge run`; the device's other commands take some of them too."""

    TABLE: ClassVar = "edge"

    dir: Annotated[Path, Setting("Keys, membership and state of this device.", metavar="DIRECTORY", argument=True)]
    data: Annotated[Path, Setting(DATA_HELP)]
    label: Annotated[str, Setting("Name of the label column of tables.", shown="the task's")] = ""
    separator: Annotated[
        str, Setting("Separator of CSV files, one character or `tab`.", shown="found in the file", rare=True)
    ] = ""
    skip_bad: Annotated[
        int | None,
        Setting(
            "Leave out up to so many damaged samples, such as a cut last line or an image that can't be decoded, and count them.",
            shown="the larger of 3 samples and 1 %",
            rare=True,
        ),
    ] = None
    decimal: Annotated[str, Setting("Decimal mark of CSV files: `.` or `,`.", shown="found in the file", rare=True)] = (
        ""
    )
    watch: Annotated[
        bool,
        Setting(
            "Read data files that have changed again at the next round; samples may only be appended.", off="read-once"
        ),
    ] = False
    broker: Broker = field(default="", repr=False)
    ca: Ca = None
    cert: Cert = None
    key: Key = None
    proxy: Proxy = field(default="", repr=False)
    threads: Annotated[int, Setting("Threads of ONNX Runtime, or of numpy's BLAS.", rare=True)] = 1
    once: Annotated[
        bool,
        Setting(
            "End after one run and its personal finish; a run that was reported as finished before does not count.",
            off="forever",
        ),
    ] = False
    personal: Annotated[
        str,
        Setting(
            "After a run choose between the cluster's model and models of this device's own; with a number also Ditto's, "
            "trained with a pull of that weight towards the cluster's model.",
            metavar="on|off|LAMBDA",
        ),
    ] = "on"
    executor: Annotated[
        str,
        Setting(
            "What computes the model: auto takes ONNX Runtime if it is installed, else numpy, which has no convolutions.",
            metavar="auto|onnxruntime|numpy",
            rare=True,
        ),
    ] = AUTO
    trainer: Annotated[
        str,
        Setting(
            "Own training code, installed here, for tasks that name it: it runs in a process of its own, without this device's "
            "keys.",
            metavar="PACKAGE:CLASS",
            shown="none",
        ),
    ] = ""
    on_model: Annotated[
        Path | None,
        Setting("Program to run, as this user and without a shell, for each new model in use.", metavar="PROGRAM"),
    ] = None
    trainer_s: Annotated[
        float,
        Setting("Longest time, in seconds, for one training of own code; after it the round is declined.", rare=True),
    ] = MOST_TRAINER_S
    trainer_mb: Annotated[
        int,
        Setting("Most memory of own code, in MB of 2^20 bytes.", shown="three quarters of the machine's", rare=True),
    ] = 0
    max_kbps: Annotated[float, Setting("Most kilobits a second to send to the broker; 0: no limit.")] = 0.0
    chunk_bytes: ChunkBytes = CHUNK_BYTES
    metered: Annotated[
        str,
        Setting(
            "Hours of the day, by this machine's clock, in which to decline all rounds but the final one.",
            metavar="HH:MM-HH:MM",
            shown="none",
        ),
    ] = ""
    vitals: Annotated[
        bool,
        Setting(
            "Report free disk and memory, load, temperature, battery and uptime to the aggregator every ten minutes.",
            off="no-vitals",
        ),
    ] = False
    log: Annotated[str, Setting("debug, info, warning or error.")] = "info"

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ConfigError(f"threads must be at least 1, not {self.threads}")
        ditto_weight(self.personal)
        self.reading  # noqa: B018 - it checks its options
        check_setting(self.executor)
        self.own_trainer  # noqa: B018 - likewise
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
        return Reading(self.label, self.separator, self.skip_bad, growing=self.watch, decimal=self.decimal)

    @property
    def own_trainer(self) -> TrainerCommand | None:
        """The operator's training code; None without."""
        return TrainerCommand(self.trainer, self.trainer_s, self.trainer_mb) if self.trainer else None

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


_TIME: Final = re.compile(r"([01]\d|2[0-3]):([0-5]\d)-([01]\d|2[0-3]):([0-5]\d)")


@dataclass(frozen=True, slots=True)
class Hours:
    """A time of day, in minutes since midnight by the device's own clock and time zone; it may go over midnight."""

    start_min: int
    end_min: int

    def contains(self, minute: int) -> bool:
        """Return whether a minute of the day is in these hours; their last minute is the one before ``end_min``."""
        if self.start_min <= self.end_min:
            return self.start_min <= minute < self.end_min
        return minute >= self.start_min or minute < self.end_min

    def now(self, unix_s: float) -> bool:
        """Return whether a time is in these hours, by the device's time zone."""
        local = time.localtime(unix_s)
        return self.contains(60 * local.tm_hour + local.tm_min)

    def __str__(self) -> str:
        (a, b), (c, d) = divmod(self.start_min, 60), divmod(self.end_min, 60)
        return f"{a:02}:{b:02}-{c:02}:{d:02}"


def parse_hours(text: str) -> Hours | None:
    """Return the hours of a text such as ``08:00-20:00``; None for an empty one.

    Raises:
        ConfigError: it names no two different times.
    """
    if not text:
        return None
    found = _TIME.fullmatch(text)
    hours = None if found is None else Hours(60 * int(found[1]) + int(found[2]), 60 * int(found[3]) + int(found[4]))
    if hours is None or hours.start_min == hours.end_min:
        raise ConfigError(
            f"metered is two different times of day, not {text[:40]!r}",
            hint="such as 08:00-20:00, or 22:00-06:00 over midnight; leave it out for a link that is never metered",
        )
    return hours
