"""The owner's signed run files in the aggregator's directory, and whether each run is finished.

A run file holds a whole task and can be large, so it is read again only after its stamp has changed.

`OwnerOrders` keeps the owner's orders and its choice of models in the files ``orders.json`` and ``choice.signed``. The orders
for runs and the number of the last request are in one file, so that both become durable together: after a crash the number has
been accepted if and only if the order is in force. A choice of models is durable before its request is accepted; after a crash
in between it is in force, and the same request has the same effect again.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from aggregator.membership import RUNS_DIRECTORY, AggregatorMembership
from aggregator.rounds.state import Order, newest
from aggregator.storage.store import DATABASE, read_key_version, read_last_record, read_plan, readable
from shoal.errors import ConfigError, DocumentError, IntegrityError, ShoalError, UntrustedError
from shoal.membership.signed_plans import open_package
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import RunPackage, RunPlan
from shoal.util.files import read_if_there, write_atomic
from shoal.util.state_codec import decode_state, encode_state

ORDERS_FILE: Final = "orders.json"
CHOICE_FILE: Final = "choice.signed"
ORDER_FILE: Final = "standing.order"
"""The run package of the newest standing order, as the owner's last request has brought it."""
DAMAGED_HINT: Final = (
    "take the file from a backup; without it paused and stopped runs go on, and requests that were recorded in the last ten "
    "minutes could be repeated"
)


@dataclass(frozen=True, slots=True)
class OwnerRecord:
    """Contents of the file.

    Attributes:
        accepted: the highest number of a request that was accepted.
        orders: id of a run in hex -> the owner's order; a run without one goes on.
        restored_at_s: unix seconds at which the directory was restored from a backup; 0 if it never was. Requests that were made
            before are refused, since the number does not tell which of them were carried out.
    """

    accepted: int = 0
    orders: Mapping[str, Order] = field(default_factory=dict)
    restored_at_s: int = 0

    def of(self, run_id: bytes) -> Order:
        """Return the order for a run."""
        return self.orders.get(run_id.hex(), Order.GO)


def read_orders(directory: Path) -> OwnerRecord:
    """Return the orders in an aggregator's directory, from any process.

    Raises:
        IntegrityError: the file is damaged.
        ConfigError: it can't be read.
    """
    path = directory / ORDERS_FILE
    data = read_if_there(path)
    if data is None:
        return OwnerRecord()
    try:
        return decode_state(OwnerRecord, json.loads(data), mixed=True)
    except (ValueError, RecursionError, DocumentError) as error:
        raise IntegrityError(f"{path} is damaged: {error}", hint=DAMAGED_HINT) from error


def write_orders(directory: Path, record: OwnerRecord) -> None:
    """Write the orders of an aggregator that does not run, or of this process, durably.

    Raises:
        ConfigError: the file can't be written; nothing has changed then.
    """
    write_atomic(directory / ORDERS_FILE, json.dumps(encode_state(record).document).encode())


class OwnerOrders:
    """The orders of the running aggregator, which alone writes the file.

    Args:
        directory: the aggregator's.

    Attributes:
        record: what the file says.
        choice: the owner's newest signed `ModelChoice`; empty without one.

    Raises:
        IntegrityError, ConfigError: as `read_orders`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.record = read_orders(directory)
        self.choice = read_if_there(directory / CHOICE_FILE) or b""

    def choose(self, signed: bytes) -> None:
        """Store the owner's choice of models, durably.

        Raises:
            ConfigError: the file can't be written; the earlier choice stays.
        """
        write_atomic(self._directory / CHOICE_FILE, signed)
        self.choice = signed

    def of(self, run_id: bytes) -> Order:
        """Return the order for a run."""
        return self.record.of(run_id)

    def accept(self, sequence: int, run_id: bytes = b"", order: Order = Order.GO) -> None:
        """Record a request, durably, with its order for a run if it names one.

        Raises:
            ConfigError: the file can't be written; nothing has changed then.
        """
        orders = dict(self.record.orders)
        if run_id:
            orders[run_id.hex()] = newest(self.of(run_id), order)
        kept = {run: order for run, order in orders.items() if order is not Order.GO}
        record = dataclasses.replace(self.record, accepted=sequence, orders=kept)
        write_orders(self._directory, record)
        self.record = record


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
        package = decode(path.read_bytes(), RunPackage)
        plan = open_package(package, self._membership.owner_key)
        if plan.fleet != self._membership.fleet:
            raise UntrustedError(f"a run of fleet {plan.fleet!r}")
        return RunFile(path, plan, package.plan)

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

        check_compared(plan, membership.roster.only(plan.recipe.only).active_count)
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
