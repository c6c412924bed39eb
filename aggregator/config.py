"""The aggregator's configuration. No field can hold a mask key, and unknown keys are refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from shoal.address import check_chunk_bytes
from shoal.limits import CHUNK_BYTES


@dataclass(frozen=True, slots=True)
class AggregatorConfig:
    """Settings of `shoal-aggregator serve`, from flags, SHOAL_AGGREGATOR_* and the [aggregator] table of a TOML file.

    Attributes:
        dir: keys, membership, runs and results.
        broker: mqtt:// or mqtts:// address; empty uses the address in the owner's grant. It may hold a password.
        ca, cert, key: PEM files for mqtts.
        device: device for similarities and means: auto, cpu or cuda.
        once: end when every run is finished, instead of waiting for the next.
        log: debug, info, warning or error.
        http: HOST:PORT for the fleet page and its metrics; empty for none.
        http_token: private file with the token that each request must show; required unless HOST is a loopback address.
        shards: folder with a directory for each worker of this machine, for processes that torchrun starts; None without.
        interface: network interface for the sums between coordinator and workers; needed for runs with workers.
        chunk_bytes: largest payload of a chunk that is sent.
        home_assistant: Home Assistant's discovery prefix; empty publishes no sensors.
    """

    dir: Path
    broker: str = field(default="", repr=False)
    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None
    device: str = "auto"
    once: bool = False
    log: str = "info"
    http: str = ""
    http_token: Path | None = None
    home_assistant: str = ""
    shards: Path | None = None
    interface: str = ""
    chunk_bytes: int = CHUNK_BYTES

    def __post_init__(self) -> None:
        check_chunk_bytes(self.chunk_bytes)
