"""Which run a device follows and in which mask epoch: what is opened, and in which order it is kept and put in force.

Nothing is erased before what comes after it lies on the disk, so that a power cut leaves the one or the other.
"""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING

from edge_client.followed_run import Run
from edge_client.run.package import check_followable, open_epoch, open_run, owners_plan, reopen, starts_later
from shoal.errors import IntegrityError, NotEnrolledError, UntrustedError
from shoal.protocol.codec import decode
from shoal.protocol.epochs import Epoch

if TYPE_CHECKING:
    from edge_client.membership import DeviceMembership
    from edge_client.storage.state import DeviceState

LOG = logging.getLogger("shoal.edge")


class RunFollower:
    """The owner's run packages and the fleet's mask epochs, as they come to one device.

    Attributes:
        early: a run that this device can only begin in a later mask epoch, which it has not seen yet; else empty.
        newest: id of the run that was to be begun last, also where it could not be; empty where that was not the owner's, or
            older than another.
    """

    def __init__(self, membership: DeviceMembership, files: DeviceState) -> None:
        self._membership = membership
        self._files = files
        self._known = b""
        self.early = b""
        self.newest = b""

    def resumed(self) -> Run | None:
        """Return the run that was followed before a restart, if there was one and it can be opened."""
        package = self._files.load_run()
        if package is None:
            return None
        try:
            run = reopen(package, self._files.load_epoch(), self._membership)
        except (UntrustedError, IntegrityError, NotEnrolledError) as error:
            LOG.warning("the run followed before is not taken up", extra={"kv": {"reason": error}})
            return None
        self._membership.enter(run.generation, run.plan.epoch)
        self._known = hashlib.sha256(package).digest()
        return run

    def begun(self, package: bytes, current: Run | None, least_run: int) -> Run | None:
        """Return the run of a package in its first mask epoch; None where it is known, or can't be begun there.

        Args:
            package: as the aggregator hands it on.
            current: the run followed now.
            least_run: the newest that was ever followed.

        Raises:
            UntrustedError: not the owner's, or an older run than one before.
            IntegrityError: task, origins or mask do not fit the plan.
        """
        if hashlib.sha256(package).digest() == self._known:
            return None
        self.newest = b""
        plan = owners_plan(package, self._membership)
        if plan.run < least_run or (current is not None and plan.run <= current.plan.run):
            raise UntrustedError(f"run {plan.run} after run {max(least_run, plan.run)}")
        self.newest = plan.run_id
        check_followable(plan, self._membership)
        if starts_later(plan, self._membership):
            self.early = package
            return None
        return open_run(package, self._membership)

    def caught_up(self) -> None:
        """Take note that the run which `renewed` gave is followed; until then one that began early is looked at again."""
        if self.early:
            self._known, self.early = hashlib.sha256(self.early).digest(), b""

    def keep(self, run: Run, package: bytes) -> None:
        """Keep a run that was begun, and let go of the secrets before its own."""
        self._files.save_run(package)
        self._membership.enter(run.generation, run.plan.epoch)
        self._known = hashlib.sha256(package).digest()
        self.early = b""

    def renewed(self, data: bytes, current: Run | None, least_roster: int) -> Run | None:
        """Return the run in a later mask epoch, which is kept, and the secret of the one before erased; None for no later one.

        Args:
            data: an encoded `shoal.protocol.epochs.Epoch`.
            current: the run followed now.
            least_roster: of the newest announcement that was ever accepted: no fleet certifies under an older one.

        Raises:
            as `open_epoch`
        """
        package = self.early or (self._files.load_run() if current is not None else b"") or b""
        if not package:
            return None  # it is looked for again when the run has come
        epoch = decode(data, Epoch)
        c = epoch.certificate.checkpoint
        plan = None if current is None or self.early else current.plan
        if plan is not None and (c.run_id != plan.run_id or c.next_epoch <= plan.epoch):
            return None
        run = open_epoch(package, epoch, self._membership, least_roster)
        if self.early:
            self._files.save_run(package)
        self._files.save_epoch(data)
        self._membership.enter(run.generation, run.plan.epoch)
        self.newest = run.plan.run_id
        return run
