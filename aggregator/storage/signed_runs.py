"""The owner's signed run files in the aggregator's directory, and whether each run is finished.

A run file holds a whole task and can be large, so it is read again only after its stamp has changed.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from aggregator.membership import RUNS_DIRECTORY, AggregatorMembership
from aggregator.rounds.orders import Order
from aggregator.storage.corruption import readable
from aggregator.storage.run_status import read_key_version, read_last_record, read_plan
from aggregator.storage.store import DATABASE
from shoal.errors import ConfigError, ShoalError, UntrustedError
from shoal.membership.plans import open_plan
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import RunPackage, RunPlan

LOG = logging.getLogger("shoal.aggregator")
CHANGED_HINT: Final = "put the owner's file back or replace it; the aggregator reads it again without a restart"

Stamp = tuple[int, int, int, int]
"""A file's inode, size in bytes, and times of modification and of change in ns. Equal stamps mean an unchanged file."""


@dataclass(frozen=True, slots=True)
class RunFile:
    """A run file of the owner.

    Attributes:
        path: the file.
        plan: the run plan.
        signed: the encoded plan with the owner's signature.
    """

    path: Path
    plan: RunPlan
    signed: bytes


def log_refused(name: str, reason: str) -> None:
    """Log that a file is no valid run of the owner."""
    LOG.warning("run file refused", extra={"kv": {"file": name, "reason": reason}})


class RunFiles:
    """The directory of run files."""

    def __init__(self, membership: AggregatorMembership, complain: Callable[[str, str], None] = log_refused) -> None:
        """Read nothing yet.

        Args:
            membership: the aggregator's, which has the directory and the owner's key.
            complain: called with the name of a file that is no valid run of the owner, and the reason.
        """
        self._membership = membership
        self._complain = complain
        self._known: dict[Path, tuple[Stamp, RunFile | str]] = {}
        self._over: dict[bytes, Stamp] = {}

    def all(self) -> list[RunFile]:
        """Return the valid runs of the owner in order of their numbers, and report all other files to ``complain``."""
        paths = sorted((self._membership.directory / RUNS_DIRECTORY).glob("*.run"))
        self._known = {path: self._known[path] for path in paths if path in self._known}
        found = []
        for path in paths:
            try:
                run = self._look(path)
            except OSError as error:
                run = str(error)
            if isinstance(run, str):
                self._complain(path.name, run)
            else:
                found.append(run)
        return sorted(found, key=lambda r: r.plan.run)

    def _look(self, path: Path) -> RunFile | str:
        """Return the run in a file, or the reason why it is no valid run of the owner."""
        stamp = _stamp(path)
        known = self._known.get(path)
        if known is None or known[0] != stamp:
            try:
                known = stamp, self._read(path)
            except ShoalError as error:
                known = stamp, str(error)  # the text only: the error's traceback would hold its frames in memory
            self._known[path] = known
        return known[1]

    def _read(self, path: Path) -> RunFile:
        signed = decode(path.read_bytes(), RunPackage).plan
        plan = open_plan(signed, self._membership.owner_key)
        if plan.fleet != self._membership.fleet:
            raise UntrustedError(f"a run of fleet {plan.fleet!r}")
        return RunFile(path, plan, signed)

    def package(self, run: RunFile) -> bytes:
        """Return the contents of a run file: plan, task and sealed origins.

        Raises:
            ConfigError: the file can't be read any more.
            UntrustedError: it was replaced by another run.
            WireError: it was replaced by something that is no run.
        """
        try:
            package = run.path.read_bytes()
            if decode(package, RunPackage).plan != run.signed:
                raise UntrustedError(f"{run.path.name} holds another run than before", hint=CHANGED_HINT)
        except OSError as error:
            self._known.pop(run.path, None)
            raise ConfigError(f"{run.path.name} can't be read: {error.strerror}", hint=CHANGED_HINT) from error
        except ShoalError:
            self._known.pop(run.path, None)
            raise
        return package

    def is_over(self, plan: RunPlan) -> bool:
        """Return `is_finished` of a run, without opening its database again if that has not changed.

        Raises:
            UntrustedError, IntegrityError: as `is_finished`.
        """
        try:
            stamp = _stamp(directory_of(self._membership, plan.run) / DATABASE)
        except OSError:
            return is_finished(self._membership, plan)
        if self._over.get(plan.run_id) == stamp:
            return True
        # Only True is cached: a final record in the write-ahead log does not change the stamp of the database.
        if not is_finished(self._membership, plan):
            return False
        self._over[plan.run_id] = stamp
        return True


def directory_of(membership: AggregatorMembership, run: int) -> Path:
    """Return the path of a run's directory, which need not exist."""
    return membership.directory / f"run-{run:06d}"


def check_assignment(membership: AggregatorMembership, plan: RunPlan) -> None:
    """Check that the run can be taken up: no later one was started here, and its workers can compare the fleet's updates.

    Devices take part in runs of rising numbers only. A run that was begun goes on even if the roster has grown.

    Raises:
        UntrustedError: a later run was started.
        TooManyComparedError: the run has not begun, and would compare too many updates (`check_compared`).
    """
    if plan.workers and read_plan(directory_of(membership, plan.run)) is None:
        from aggregator.strategies.registry import check_compared

        check_compared(plan, len(membership.roster.active()))
    numbers = (p.parent.name.removeprefix("run-") for p in membership.directory.glob(f"run-*/{DATABASE}"))
    newest = max((int(number) for number in numbers if number.isdecimal()), default=0)
    if plan.run < newest:
        raise UntrustedError(
            f"run {plan.run} is older than run {newest}, which was begun here, and devices refuse it",
            hint="have the owner sign it again: shoal-fleet run start",
        )


def is_finished(membership: AggregatorMembership, plan: RunPlan) -> bool:
    """Return whether the final round of a run is recorded.

    Raises:
        UntrustedError: a different run with the same number was started here before.
        IntegrityError: the run's directory is damaged.
    """
    directory = directory_of(membership, plan.run)
    held = read_plan(directory)
    if held is not None and held != encode(plan):
        raise UntrustedError(
            f"run {plan.run} is another one than the run {plan.run} that was begun here before",
            hint=f"have the owner sign it again, under a new number: shoal-fleet run. {directory} holds the other run",
        )
    last = read_last_record(directory)
    with readable(directory):
        return last is not None and bool(last["final"])


def is_void(membership: AggregatorMembership, plan: RunPlan, order: Order) -> bool:
    """Return whether the owner has stopped a run before its first round: it is over without a final round.

    Raises:
        IntegrityError: the run's directory is damaged.
    """
    return order.stops and read_key_version(directory_of(membership, plan.run)) is None


def _stamp(path: Path) -> Stamp:
    stat = path.stat()
    return stat.st_ino, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns
