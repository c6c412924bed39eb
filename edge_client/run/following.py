"""The choice of the run that a device follows, and the order in which it is stored and put in force.

An earlier run or secret is erased only after its successor is durable, so that a power cut leaves one of the two.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from edge_client.run.beginning import LateStart, OpenedRun, keep_run, open_run, resume_run
from edge_client.run.package import check_followable, owners_plan
from shoal.digests import sha256
from shoal.errors import IntegrityError, NotEnrolledError, UntrustedError
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import RunPackage

if TYPE_CHECKING:
    from edge_client.followed_run import Run
    from edge_client.membership import DeviceMembership
    from edge_client.run.held_models import HeldModels
    from edge_client.storage.state import DeviceState

LOG = logging.getLogger("shoal.edge")


class RunFollower:
    """Opens the owner's run packages for one device.

    Attributes:
        held: the models of the run in force; None before the first run.
        late: a run that this device can only begin with a checkpoint; None if absent.
        newest: id of the last run that the device tried to begin, even if it failed; empty if that package was not signed by
            the owner, or its run was older than an earlier one.
    """

    def __init__(self, membership: DeviceMembership, files: DeviceState) -> None:
        self._membership = membership
        self._files = files
        self._known = b""
        self.newest = b""
        self.late: LateStart | None = None
        self.held: HeldModels | None = None
        self._begun: OpenedRun | None = None

    def resumed(self) -> Run | None:
        """Return the run that was followed before a restart, if there was one and it can be opened."""
        package = self._files.load_run()
        if package is None:
            return None
        try:
            run, self.held = resume_run(package, self._membership)
        except (UntrustedError, IntegrityError, NotEnrolledError) as error:
            LOG.warning("the stored run can't be resumed", extra={"kv": {"reason": error, "hint": error.hint}})
            return None
        return run

    def begun(self, package: bytes | memoryview, current: Run | None, least_run: int) -> Run | None:
        """Return the run of a package; None if it is known already, or this device must begin it with a checkpoint.

        Args:
            package: the run package from the aggregator.
            current: the run that the device follows now.
            least_run: number of the newest run that the device has ever followed.

        Raises:
            NotEnrolledError: the keys of the plan's version have not arrived.
            UntrustedError: the plan is not signed by the owner, or the run is not newer than an earlier one.
            IntegrityError: task or origins do not fit the plan.
        """
        if sha256(package) == self._known:
            return None
        self.newest = b""
        plan = owners_plan(package, self._membership)
        if current is not None and plan.run_id == current.plan.run_id:
            # After a restart: the stored package has the task in clear, so its digest says nothing.
            self._known = sha256(package)
            return None
        if plan.run < least_run or (current is not None and plan.run <= current.plan.run):
            raise UntrustedError(f"run {plan.run} after run {max(least_run, plan.run)}")
        self.newest = plan.run_id
        check_followable(plan, self._membership)
        self.late = None
        try:
            self._begun = open_run(package, self._membership)
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

    def refuse(self, package: bytes | memoryview, run: Run) -> None:
        """Store a run that this device can't do, with its task in clear and without origins, for `shoal-edge doctor`."""
        self._begun = None
        self._files.save_refused(encode(RunPackage(decode(package, RunPackage).plan, run.bundle.to_bytes(), b"")))

    def keep(self, package: bytes | memoryview) -> None:
        """Store the run that `begun` or `taken` returned last, and erase the secrets before its own."""
        assert self._begun is not None
        self.held = keep_run(self._begun, package, self._membership, self._files)
        self._known, self.late, self._begun = sha256(package), None, None
