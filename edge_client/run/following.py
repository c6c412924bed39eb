"""The choice of the run and mask epoch that a device follows, and the order in which they are stored and put in force.

An earlier run, epoch or secret is erased only after its successor is durable, so that a power cut leaves one of the two.
"""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING

from edge_client.followed_run import Run
from edge_client.run.package import (
    check_followable,
    open_epoch,
    open_plan,
    open_run,
    owners_plan,
    reopen,
    starts_later,
)
from edge_client.run.round_runs import LateStart, RoundRun, keep_round_run, open_round_run, resume_round_run
from shoal.errors import IntegrityError, NotEnrolledError, UntrustedError
from shoal.protocol.codec import decode
from shoal.protocol.epochs import Epoch

if TYPE_CHECKING:
    from edge_client.membership import DeviceMembership
    from edge_client.run.held_models import HeldModels
    from edge_client.storage.state import DeviceState
    from shoal.protocol.documents import RunPlan

LOG = logging.getLogger("shoal.edge")


class RunFollower:
    """Opens the owner's run packages and the fleet's mask epochs for one device.

    Attributes:
        early: package of a run that this device can only begin in a later mask epoch, not received yet; else empty.
        late: a run with round keys that this device can only begin with a checkpoint; None if there is none.
        held: the models of the run in force, if it has round keys.
        newest: id of the last run that the device tried to begin, even if it failed; empty if that package was not signed by
            the owner, or its run was older than an earlier one.
    """

    def __init__(self, membership: DeviceMembership, files: DeviceState) -> None:
        self._membership = membership
        self._files = files
        self._known = b""
        self.early = b""
        self.newest = b""
        self.late: LateStart | None = None
        self.held: HeldModels | None = None
        self._begun: RoundRun | None = None

    def resumed(self) -> Run | None:
        """Return the run that was followed before a restart, if there was one and it can be opened."""
        package = self._files.load_run()
        if package is None:
            return None
        try:
            if open_plan(package, self._membership).keys == "round":
                run, self.held = resume_round_run(package, self._membership)
                return run
            run = reopen(package, self._files.load_epoch(), self._membership)
        except (UntrustedError, IntegrityError, NotEnrolledError) as error:
            LOG.warning("the stored run can't be resumed", extra={"kv": {"reason": error}})
            return None
        self._membership.enter(run.generation, run.plan.epoch)
        self._known = hashlib.sha256(package).digest()
        return run

    def begun(self, package: bytes, current: Run | None, least_run: int) -> Run | None:
        """Return the run of a package in its first mask epoch; None if it is known already, or must begin in a later epoch.

        Args:
            package: the run package from the aggregator.
            current: the run that the device follows now.
            least_run: number of the newest run that the device has ever followed.

        Raises:
            UntrustedError: the plan is not signed by the owner, or the run is not newer than an earlier one.
            IntegrityError: task, origins or mask do not fit the plan.
        """
        if hashlib.sha256(package).digest() == self._known:
            return None
        self.newest = b""
        plan = owners_plan(package, self._membership)
        if current is not None and plan.keys == "round" and plan.run_id == current.plan.run_id:
            # After a restart: the stored package has the task in clear, so its digest says nothing.
            self._known = hashlib.sha256(package).digest()
            return None
        if plan.run < least_run or (current is not None and plan.run <= current.plan.run):
            raise UntrustedError(f"run {plan.run} after run {max(least_run, plan.run)}")
        self.newest = plan.run_id
        check_followable(plan, self._membership)
        self.late = None
        if plan.keys == "round":
            return self._begun_with_round_keys(plan, package)
        if starts_later(plan, self._membership):
            self.early = package
            return None
        return open_run(package, self._membership)

    def _begun_with_round_keys(self, plan: RunPlan, package: bytes) -> Run | None:
        try:
            self._begun = open_round_run(package, self._membership)
        except NotEnrolledError:
            if plan.key_version > self._membership.newest_generation:
                raise
            self.late = LateStart(plan, package)
            return None
        return self._begun.run

    def taken(self, label: str, transfer: bytes, sealed: memoryview, most_task_bytes: int) -> Run | None:
        """Return the run that a checkpoint begins late; None if it does not.

        Raises:
            as `LateStart.take`
        """
        assert self.late is not None
        self._begun = self.late.take(label, transfer, sealed, self._membership, most_task_bytes)
        return None if self._begun is None else self._begun.run

    def caught_up(self) -> None:
        """Record that the run from `renewed` is in force; until then its package is opened again each time it arrives."""
        if self.early:
            self._known, self.early = hashlib.sha256(self.early).digest(), b""

    def keep(self, run: Run, package: bytes) -> None:
        """Store a run that has begun, and erase the secrets before its own."""
        if self._begun is not None and self._begun.run is run:
            self.held = keep_round_run(self._begun, package, self._membership, self._files)
            self._known, self.late, self._begun = hashlib.sha256(package).digest(), None, None
            return
        self.held = None
        self._files.save_run(package)  # first: `enter` erases secrets that the stored run before needs
        self._membership.enter(run.generation, run.plan.epoch)
        self._known = hashlib.sha256(package).digest()
        self.early = b""

    def renewed(self, data: bytes, current: Run | None, least_roster: int) -> Run | None:
        """Return the run in a later mask epoch, after storing that epoch and erasing earlier secrets; None if it is not later.

        Args:
            data: an encoded `shoal.protocol.epochs.Epoch`.
            current: the run that the device follows now.
            least_roster: roster sequence of the newest announcement that the device has ever accepted; a certificate of an
                older roster is refused.

        Raises:
            as `open_epoch`
        """
        package = self.early or (self._files.load_run() if current is not None else b"") or b""
        if not package:
            return None  # the runtime requests the epoch again once the run has arrived
        epoch = decode(data, Epoch)
        c = epoch.certificate.checkpoint
        plan = None if current is None or self.early else current.plan
        if plan is not None and (c.run_id != plan.run_id or c.next_epoch <= plan.epoch):
            return None
        run = open_epoch(package, epoch, self._membership, least_roster)
        if self.early:
            self._files.save_run(package)
        self._files.save_epoch(data)
        # Last, since it erases the secret of the epoch before.
        self._membership.enter(run.generation, run.plan.epoch)
        self.newest = run.plan.run_id
        return run
