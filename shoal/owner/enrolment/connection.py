"""A `Registrar` on an MQTT connection that lasts for one command of `shoal-fleet`."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final

from shoal.errors import BrokerUnreachableError, LaterKindError, ShoalError
from shoal.owner.broker.address import OwnerLink
from shoal.owner.broker.dynamic import BrokerAdmin, admit, shut_out
from shoal.owner.enrolment.admission import Registrar
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol.documents import Member
from shoal.util.console import working

POLL_S: Final = 0.2
DRAIN_POLL_S: Final = 0.02
SETTLE_S: Final = 0.5
"""After this much silence all retained messages are taken to have arrived."""
LOOK_S: Final = 2.0
"""Wait for the roster on the broker; there is none before a fleet's first publication."""
FLUSH_S: Final = 20.0
"""Time for the broker to take all publications; the fleet is locked meanwhile, see `directory.CHANGE_WAIT_S`."""


def update_users(fleet: FleetDirectory, *, admitted: Sequence[str] = (), removed: Sequence[str] = ()) -> None:
    """Create and remove users of the broker, if it takes them while it runs (`shoal.owner.broker.dynamic`).

    Raises:
        BrokerUnreachableError: the broker or its plugin does not answer.
        UntrustedError: the plugin refuses a command.
    """
    if fleet.users.dynamic:
        with BrokerAdmin(fleet) as admin:
            admin.send([*admit(fleet, admitted), *shut_out(removed)])


class OwnerConnection(OwnerLink):
    """A `Registrar` with its own connection; a context manager that closes it."""

    def __init__(self, fleet: FleetDirectory, complain: Callable[[str], None]) -> None:
        """Connect.

        Args:
            fleet: the owner's directory.
            complain: called with warnings, such as messages that are no requests.

        Raises:
            BrokerUnreachableError: no broker answers, or it refuses the owner's user.
        """
        super().__init__(fleet)
        self._complain = complain
        self._fleet = fleet
        self.registrar = Registrar(fleet, self.transport, complain, self._drain)
        self.registrar.start(int(time.time()))
        self.registrar.look_for_roster()
        self.transport.start(require=True)

    def listen(self, seconds: float, enough: Callable[[], bool] = lambda: False) -> None:
        """Handle events for ``seconds``, or until ``enough()`` is true and SETTLE_S have passed without an event.

        Raises:
            BrokerUnreachableError: as `flush`.
        """
        last_s = time.monotonic()
        end_s = last_s + max(seconds, SETTLE_S)
        with working("waiting for the broker's messages"):
            while (now_s := time.monotonic()) < end_s and not (now_s - last_s >= SETTLE_S and enough()):
                event = self.next(POLL_S)
                if event is None:
                    continue
                last_s = time.monotonic()
                try:
                    self.registrar.on_event(event, int(time.time()))
                except BrokerUnreachableError:
                    raise
                except LaterKindError:
                    continue
                except ShoalError as error:
                    self._complain(f"ignored a message: {error}")

    def look_for_roster(self, most_s: float = 2 * LOOK_S) -> None:
        """Handle what the broker retains, for at most ``most_s``; without a roster LOOK_S are enough.

        Raises:
            BrokerUnreachableError: as `listen`.
        """
        looked_s = time.monotonic() + LOOK_S
        self.listen(most_s, lambda: bool(self.registrar.newest_roster) or time.monotonic() > looked_s)

    def approve(self, wanted: Sequence[str]) -> list[Member]:
        """Enrol the pending devices with these fingerprints, and return once the broker has grants, roster and keys.

        Raises:
            UntrustedError, ConfigError: as `Registrar.approve_all`.
            BrokerUnreachableError: as `flush` and `update_users`.
        """
        # Before the grants, with which the devices connect as their own users.
        pending = self.registrar.pending
        update_users(self._fleet, admitted=[pending[each].name for each in wanted if each in pending])
        return self.registrar.approve_all(wanted, int(time.time()))

    def replace(self, name: str, fingerprint: str) -> Member:
        """Put the device that asks under the name of one of the fleet in its place, as `approve` enrols one.

        Raises:
            UsageError, UntrustedError: as `Registrar.give_way`.
            BrokerUnreachableError: as `flush` and `update_users`.
        """
        wanted = self.registrar.give_way(name, fingerprint, int(time.time()))
        # Two batches, before the grant: the broker disconnects the old user, and the new one has another password.
        update_users(self._fleet, removed=[name])
        return self.approve([wanted])[0]

    def publish(self, replaced: str = "") -> None:
        """Publish the newest roster and each member's newest keys; clear the keys of revoked devices.

        Args:
            replaced: name of the aggregator that was replaced, whose user at the broker the new one's takes the place of.

        Raises:
            BrokerUnreachableError: as `flush`.
        """
        # The broker's roster may be newer than ours: see `Registrar.publish_roster`. The devices' receiving keys come before
        # it; in a large fleet they take longer than LOOK_S.
        self.look_for_roster(FLUSH_S)
        # Locked until the broker has it, or an older roster could replace a newer one there.
        with self._fleet.changing():
            self.registrar.publish_roster()
            self.registrar.publish_keys()
            self.flush()
            roster = self._fleet.roster
            if replaced and roster.aggregator is not None:
                # Two batches: the new one may have the name of the old.
                update_users(self._fleet, removed=[replaced])
                update_users(self._fleet, admitted=[roster.aggregator.name])
            # After the roster, so that a revoked device can still read that it is.
            helpers = [party.name for party in (*self._fleet.workers, *self._fleet.keepers)]
            update_users(self._fleet, admitted=[*roster.active(), *helpers], removed=roster.revoked)

    def flush(self) -> None:
        """Wait until the broker has everything that was published; on failure the connection is closed.

        Raises:
            BrokerUnreachableError: the broker did not take everything within FLUSH_S.
        """
        with working("waiting for the broker to take everything"):
            self.registrar.flush()

    def _drain(self) -> None:
        end_s = time.monotonic() + FLUSH_S
        try:
            while self.transport.pending():
                if time.monotonic() > end_s:
                    raise BrokerUnreachableError(
                        f"the broker did not take everything in {FLUSH_S:g} s",
                        hint="check that it runs and has space left",
                    )
                time.sleep(DRAIN_POLL_S)
        except ShoalError:
            self.transport.close()
            raise
