"""The owner's program at the broker: connected for as long as one command takes."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from crypto.seal.grants import OWNER_NAME
from fleet.admission import Registrar
from fleet.broker_config import CA_FILE
from fleet.directory import FleetDirectory
from wire.address import BrokerAddress
from wire.errors import BrokerUnreachableError, ShoalError, UntrustedError
from wire.mqtt import MqttTransport
from wire.transport import TakenOver, TransportEvent

POLL_S: Final = 0.2
FLUSH_S: Final = 20.0


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files for mqtts; without a CA, that of `shoal-fleet broker-config` where there is one."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


class Desk:
    """A `Registrar` on a connection of its own; a context manager."""

    def __init__(self, fleet: FleetDirectory, tls: Tls, complain: Callable[[str], None]) -> None:
        """Connect.

        Args:
            fleet: the owner's directory.
            tls: for mqtts.
            complain: told about messages that are not even requests.

        Raises:
            BrokerUnreachableError: nobody answers, or the owner's user is refused.
        """
        url = fleet.broker_for(OWNER_NAME)
        own_ca = fleet.path / CA_FILE
        ca = tls.ca or (own_ca if own_ca.exists() and url.startswith("mqtts") else None)
        address = BrokerAddress.parse(url, ca_file=ca, cert_file=tls.cert, key_file=tls.key)
        self._inbox: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
        self._complain = complain
        self._transport = MqttTransport(address, f"shoal-{fleet.name}-owner", self._inbox.put, session_expiry_s=0)
        self.registrar = Registrar(fleet, self._transport)
        self.registrar.start(int(time.time()))
        self._transport.start(require=True)

    def listen(self, seconds: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Take what arrives for ``seconds``, or until ``enough()``.

        Raises:
            UntrustedError: another program of the owner's took over.
        """
        end_s = time.monotonic() + seconds
        while not enough() and time.monotonic() < end_s:
            try:
                event = self._inbox.get(timeout=POLL_S)
            except queue.Empty:
                continue
            if isinstance(event, TakenOver):
                raise UntrustedError(
                    "another program of the owner's connected", hint="end the other shoal-fleet, then run this again"
                )
            try:
                self.registrar.on_event(event, int(time.time()))
            except ShoalError as error:
                self._complain(f"ignored a message: {error}")

    def publish(self, gone: str = "") -> None:
        """Leave the newest roster and everybody's newest keys; clear those of the device that is ``gone``.

        Raises:
            BrokerUnreachableError: as `flush`.
        """
        self.registrar.publish_roster()
        self.registrar.publish_keys()
        if gone:
            self.registrar.clear_keys(gone)
        self.flush()

    def flush(self) -> None:
        """Return when the broker has everything.

        Raises:
            BrokerUnreachableError: it does not take it.
        """
        end_s = time.monotonic() + FLUSH_S
        while self._transport.pending():
            if time.monotonic() > end_s:
                raise BrokerUnreachableError(
                    "what was signed did not reach the broker",
                    hint="it is kept: `shoal-fleet publish DIR` when the broker is back",
                )
            self.listen(POLL_S)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transport.close()
