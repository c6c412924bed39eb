"""The files ``orders.json`` and ``choice.signed`` in the aggregator's directory: the owner's orders, and its choice of models.

The orders for runs and the number of the last request are in one file, so that both become durable together: after a crash the
number has been accepted if and only if the order is in force. A choice of models is durable before its request is accepted;
after a crash in between it is in force, and the same request has the same effect again.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from aggregator.rounds.orders import Order, newest
from shoal.errors import DocumentError, IntegrityError
from shoal.util.files import read_if_there, write_atomic
from shoal.util.state_codec import decode_state, encode_state

ORDERS_FILE: Final = "orders.json"
CHOICE_FILE: Final = "choice.signed"
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

    Raises:
        IntegrityError, ConfigError: as `read_orders`.
    """

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._record = read_orders(directory)
        self._choice = read_if_there(directory / CHOICE_FILE) or b""

    @property
    def choice(self) -> bytes:
        """The owner's newest signed `ModelChoice`; empty without one."""
        return self._choice

    def choose(self, signed: bytes) -> None:
        """Store the owner's choice of models, durably.

        Raises:
            ConfigError: the file can't be written; the earlier choice stays.
        """
        write_atomic(self._directory / CHOICE_FILE, signed)
        self._choice = signed

    @property
    def accepted(self) -> int:
        """The highest number of a request that was accepted."""
        return self._record.accepted

    @property
    def restored_at_s(self) -> int:
        """Time at which the directory was restored from a backup, unix seconds; 0 if it never was."""
        return self._record.restored_at_s

    def of(self, run_id: bytes) -> Order:
        """Return the order for a run."""
        return self._record.of(run_id)

    def accept(self, sequence: int, run_id: bytes = b"", order: Order = Order.GO) -> None:
        """Record a request, durably, with its order for a run if it names one.

        Raises:
            ConfigError: the file can't be written; nothing has changed then.
        """
        orders = dict(self._record.orders)
        if run_id:
            orders[run_id.hex()] = newest(self.of(run_id), order)
        kept = {run: order for run, order in orders.items() if order is not Order.GO}
        record = dataclasses.replace(self._record, accepted=sequence, orders=kept)
        write_orders(self._directory, record)
        self._record = record
