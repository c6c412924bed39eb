"""The owner's program at the broker: connected for as long as one command takes."""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Final, Self

from shoal.address import BrokerAddress
from shoal.errors import BrokerUnreachableError, ShoalError, UntrustedError
from shoal.membership.grants import OWNER_NAME
from shoal.owner.broker.config import CA_FILE
from shoal.owner.enrolment.admission import Registrar
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol.documents import Member
from shoal.transport.base import TakenOver, TransportEvent
from shoal.transport.mqtt import MqttTransport

POLL_S: Final = 0.2
DRAIN_POLL_S: Final = 0.02
SETTLE_S: Final = 0.5
"""Nothing more lies on the broker when nothing has come for so long."""
LOOK_S: Final = 2.0
"""How long to wait for the roster that lies on the broker; a fleet's first publication finds none."""
FLUSH_S: Final = 20.0
"""How long the broker may take for what was signed; the fleet is locked meanwhile, see `directory.CHANGE_WAIT_S`."""


class TakenOverError(UntrustedError):
    """Another program of the owner's has connected in our place."""


@dataclass(frozen=True, slots=True)
class Tls:
    """PEM files for mqtts; without a CA, that of `shoal-fleet broker-config` where there is one."""

    ca: Path | None = None
    cert: Path | None = None
    key: Path | None = None


class Desk:
    """A `Registrar` on a connection of its own; a context manager."""

    def __init__(
        self, fleet: FleetDirectory, tls: Tls, complain: Callable[[str], None], *, beside: bool = False
    ) -> None:
        """Connect.

        Args:
            fleet: the owner's directory.
            tls: for mqtts.
            complain: told about messages that are not even requests.
            beside: for a program that only looks on: it takes over from none of the owner's others, nor they from it.

        Raises:
            BrokerUnreachableError: nobody answers, or the owner's user is refused.
        """
        url = fleet.broker_for(OWNER_NAME)
        own_ca = fleet.path / CA_FILE
        ca = tls.ca or (own_ca if own_ca.exists() and url.startswith("mqtts") else None)
        address = BrokerAddress.parse(url, ca_file=ca, cert_file=tls.cert, key_file=tls.key)
        self._inbox: queue.SimpleQueue[TransportEvent] = queue.SimpleQueue()
        self._complain = complain
        self._fleet = fleet
        self._taken_over = threading.Event()
        client = f"shoal-{fleet.name}-owner" + (f"-{secrets.token_hex(4)}" if beside else "")
        self._transport = MqttTransport(address, client, self._on_event, session_expiry_s=0)
        self.registrar = Registrar(fleet, self._transport, complain, self._drain)
        self.registrar.start(int(time.time()))
        self.registrar.look_for_roster()
        self._transport.start(require=True)

    def listen(self, seconds: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Take what arrives for ``seconds``, or until ``enough()`` and what lies on the broker has come (SETTLE_S of quiet).

        Raises:
            TakenOverError: another program of the owner's took over.
            BrokerUnreachableError: as `flush`.
        """
        last_s = time.monotonic()
        end_s = last_s + max(seconds, SETTLE_S)
        while (now_s := time.monotonic()) < end_s and not (now_s - last_s >= SETTLE_S and enough()):
            self._check_connection()
            try:
                event = self._inbox.get(timeout=POLL_S)
            except queue.Empty:
                continue
            last_s = time.monotonic()
            try:
                with self._connected():
                    self.registrar.on_event(event, int(time.time()))
            except (BrokerUnreachableError, TakenOverError):
                raise
            except ShoalError as error:
                self._complain(f"ignored a message: {error}")

    def approve(self, fingerprint: str) -> Member:
        """Enrol who asks with this fingerprint, and return when the broker has grant and roster.

        Raises:
            UntrustedError, ConfigError: as `Registrar.approve`.
            BrokerUnreachableError, TakenOverError: as `flush`.
        """
        with self._connected():
            return self.registrar.approve(fingerprint, int(time.time()))

    def publish(self) -> None:
        """Leave the newest roster and everybody's newest keys; clear those of whoever is revoked.

        Raises:
            BrokerUnreachableError, TakenOverError: as `flush`.
        """
        # What lies there may be newer than ours: see `Registrar.publish_roster`.
        self.listen(LOOK_S, lambda: self.registrar.has_seen_roster)
        # Locked until the broker has it, or an older roster could come to lie over a newer one.
        with self._connected(), self._fleet.changing():
            self.registrar.publish_roster()
            self.registrar.publish_keys()
            self.flush()

    def flush(self) -> None:
        """Return when the broker has everything; where it has not, nothing more is sent.

        Raises:
            BrokerUnreachableError: it does not take it in FLUSH_S.
            TakenOverError: another program of the owner's took over.
        """
        self.registrar.flush()

    def _drain(self) -> None:
        end_s = time.monotonic() + FLUSH_S
        try:
            while self._transport.pending():
                self._check_connection()
                if time.monotonic() > end_s:
                    raise BrokerUnreachableError(
                        f"the broker did not take everything in {FLUSH_S:g} s",
                        hint="check that it runs and has space left",
                    )
                time.sleep(DRAIN_POLL_S)
            self._check_connection()
        except ShoalError:
            self._transport.close()
            raise

    def _on_event(self, event: TransportEvent) -> None:
        if isinstance(event, TakenOver):
            self._taken_over.set()
        self._inbox.put(event)

    @contextmanager
    def _connected(self) -> Iterator[None]:
        """Blame whatever fails after another program took over on that."""
        try:
            yield
        except ShoalError:
            self._check_connection()
            raise

    def _check_connection(self) -> None:
        if self._taken_over.is_set():
            raise TakenOverError(
                "another program of the owner's connected", hint="end the other shoal-fleet, then run this again"
            )

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._transport.close()
