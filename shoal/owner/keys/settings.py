"""The owner's settings, and the certificate by which the fleet's parties know the broker.

Example: ``broker_ca(path, "mqtts://broker.example")`` is what `broker-config` made, if the owner has set no other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, ClassVar, Final

from shoal.address import BrokerAddress, check_chunk_bytes
from shoal.errors import ConfigError, text_of
from shoal.limits import CHUNK_BYTES, MAX_TRANSFER_BYTES
from shoal.protocol.enrolment import MAX_CA_BYTES
from shoal.util.config import Proxy, Setting, read

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


def ca_file(directory: Path, url: str) -> Path | None:
    """Return the PEM file of the CA that the owner trusts for the broker: the setting or `broker-config`'s; None without one."""
    own = directory / CA_FILE
    given = settings_of(directory).ca
    return given or (own if own.exists() and BrokerAddress.parse(url).tls else None)


def broker_ca(directory: Path, url: str) -> bytes:
    """Return the same CA's certificate, DER, for lines and grants; empty without one, or if it is too large for a line.

    Raises:
        ConfigError: the file can't be read.
    """
    from cryptography import x509
    from cryptography.hazmat.primitives.serialization import Encoding

    file = ca_file(directory, url) if BrokerAddress.parse(url).tls else None
    if file is None:
        return b""
    try:
        found = x509.load_pem_x509_certificates(file.read_bytes())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} holds no certificate: {text_of(error)}", hint="give a PEM file") from error
    made = b"".join(certificate.public_bytes(Encoding.DER) for certificate in found)
    return made if len(made) <= MAX_CA_BYTES else b""
