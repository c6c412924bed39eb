"""A device's configuration: flags, SHOAL_EDGE_*, the [edge] table of a TOML file, defaults."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from shoal.errors import ConfigError


@dataclass(frozen=True, slots=True)
class EdgeConfig:
    """The settings of `shoal-edge run`.

    Attributes:
        dir: keys, membership and state of this device.
        data: .npz, a directory of .npz, .csv, or IDX files.
        broker: mqtt:// or mqtts:// address; if empty, the one of the owner's grant. It may hold a password.
        ca, cert, key: PEM files for mqtts.
        threads: threads for ONNX Runtime, at least 1.
        once: exit after one run instead of waiting for the next; a run that was reported as finished before does not count.
        log: debug, info, warning or error.
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

    def __post_init__(self) -> None:
        if self.threads < 1:
            raise ConfigError(f"threads must be at least 1, not {self.threads}")
