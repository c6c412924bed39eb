"""The aggregator's settings. No field can hold a mask key, and unknown keys are refused."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar

from shoal.address import check_chunk_bytes
from shoal.limits import CHUNK_BYTES
from shoal.util.config import Broker, Ca, Cert, ChunkBytes, Key, Proxy, Setting


@dataclass(frozen=True, slots=True)
class AggregatorConfig:
    """The settings of `shoal-aggregator serve`, and of its workers' `shard serve`."""

    TABLE: ClassVar = "aggregator"

    dir: Annotated[
        Path,
        Setting("Keys, membership and runs of this server.", metavar="DIRECTORY", argument=True),
    ]
    broker: Broker = field(default="", repr=False)
    ca: Ca = None
    cert: Cert = None
    key: Key = None
    proxy: Proxy = field(default="", repr=False)
    device: Annotated[str, Setting("Device for similarities: auto, cpu or cuda.", rare=True)] = "auto"
    once: Annotated[
        bool, Setting("End when every run is finished, instead of waiting for the next.", off="forever")
    ] = False
    log: Annotated[str, Setting("debug, info, warning or error.")] = "info"
    http: Annotated[
        str,
        Setting("HOST:PORT of the fleet page and /metrics, such as 127.0.0.1:9464.", shown="none"),
    ] = ""
    http_token: Annotated[
        Path | None,
        Setting("File (mode 0600) with the token that requests must show; required off loopback."),
    ] = None
    home_assistant: Annotated[
        str,
        Setting("Home Assistant's discovery prefix, to publish the fleet's counts as sensors.", rare=True),
    ] = ""
    shards: Annotated[
        Path | None,
        Setting("Under torchrun: folder with a directory for each worker of this machine; rank 0 coordinates."),
    ] = None
    interface: Annotated[
        str,
        Setting("Network interface for the workers' sums, such as wg0; needed for runs with workers."),
    ] = ""
    chunk_bytes: ChunkBytes = CHUNK_BYTES

    def __post_init__(self) -> None:
        check_chunk_bytes(self.chunk_bytes)
