"""The owner's way to the broker: its address with user, password and certificates, and client ids for single commands."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, ClassVar, Final

from shoal.address import BrokerAddress, check_chunk_bytes
from shoal.errors import ConfigError
from shoal.limits import CHUNK_BYTES, MAX_TRANSFER_BYTES
from shoal.membership.grants import OWNER_NAME
from shoal.util.config import Proxy, Setting, read

if TYPE_CHECKING:
    from shoal.owner.keys.directory import FleetDirectory

CA_FILE: Final = "broker-ca.crt"
"""Certificate of the CA that `shoal-fleet broker-config` makes, in the owner's directory."""


SETTINGS_FILE: Final = "settings.toml"
"""The owner's settings, in the owner's directory; it need not be there."""
MOST_WAIT_S: Final = 3600.0


@dataclass(frozen=True, slots=True)
class OwnerConfig:
    """The settings of `shoal-fleet`: the table [fleet] of SETTINGS_FILE, or the environment."""

    TABLE: ClassVar = "fleet"

    ca: Annotated[Path | None, Setting("CA certificates for mqtts.", shown="broker-config's")] = None
    cert: Annotated[Path | None, Setting("Client certificate for mqtts.")] = None
    key: Annotated[Path | None, Setting("Client certificate's key.")] = None
    proxy: Proxy = field(default="", repr=False)
    chunk_bytes: Annotated[int, Setting("Largest chunk to send, for a broker that takes small packets only.")] = (
        CHUNK_BYTES
    )
    wait: Annotated[float, Setting("Seconds to wait for the aggregator's answer, or for a device's request.")] = 10.0
    silence: Annotated[float, Setting("Seconds without a message from the broker that end a listing.")] = 3.0
    offline: Annotated[
        bool, Setting("Only sign what `revoke`, `rotate` and `replace-aggregator` change; `publish` sends it later.")
    ] = False
    broker_folder: Annotated[
        Path | None,
        Setting("Folder on the broker's host that holds the files of broker-config.", shown="the folder written"),
    ] = None
    plugin: Annotated[
        Path | None,
        Setting(
            "Mosquitto's dynamic security plugin on the broker's host.",
            shown="Debian's, for this machine's processor",
        ),
    ] = None
    upload_bytes: Annotated[
        int | None,
        Setting(
            "Size of one upload, 4 bytes for each coordinate of the model; sizes the broker's queues for a round.",
            shown="the largest signed run's, at least 4 MiB",
        ),
    ] = None

    def __post_init__(self) -> None:
        check_chunk_bytes(self.chunk_bytes)
        for name in ("wait", "silence"):
            if not 0 < (value := getattr(self, name)) <= MOST_WAIT_S:
                raise ConfigError(f"{name} is above 0 and up to {MOST_WAIT_S:g} seconds, not {value:g}")
        if self.upload_bytes is not None and not 0 < self.upload_bytes <= MAX_TRANSFER_BYTES:
            raise ConfigError(f"upload_bytes is from 1 to {MAX_TRANSFER_BYTES}, not {self.upload_bytes}")


def settings_of(directory: Path) -> OwnerConfig:
    """Return the settings of the owner whose directory this is.

    Raises:
        ConfigError: a setting is wrong, or the file can't be read.
    """
    file = directory / SETTINGS_FILE
    return read(OwnerConfig, file=file if file.exists() else None).config()


def owner_address(fleet: FleetDirectory) -> BrokerAddress:
    """Return the broker's address as the owner connects to it: by default with the CA that `broker-config` made, if any."""
    url, config = fleet.broker_for(OWNER_NAME), settings_of(fleet.path)
    own_ca = fleet.path / CA_FILE
    ca = config.ca or (own_ca if own_ca.exists() and url.startswith(("mqtts", "wss")) else None)
    return BrokerAddress.parse(
        url,
        ca_file=ca,
        cert_file=config.cert,
        key_file=config.key,
        chunk_bytes=config.chunk_bytes,
        proxy=config.proxy,
    )


def beside_client_id(fleet: str) -> str:
    """Return a client id that no other program has: a connection with it takes over none of another `shoal-fleet`."""
    return f"shoal-{fleet}-owner-{secrets.token_hex(4)}"
