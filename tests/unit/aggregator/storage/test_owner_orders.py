"""The file of the owner's orders and of the number of its last request."""

import pytest

from aggregator.rounds.state import Order
from aggregator.storage.signed_runs import ORDERS_FILE, OwnerOrders, read_orders
from shoal.errors import ConfigError, IntegrityError

RUN = b"r" * 16


def test_without_a_file_every_run_goes_on(tmp_path):
    orders = OwnerOrders(tmp_path)
    assert (orders.record.accepted, orders.of(RUN)) == (0, Order.GO)
    assert not (tmp_path / ORDERS_FILE).exists()


def test_next_process_finds_the_order(tmp_path):
    """A number and its order are found by the next process."""
    OwnerOrders(tmp_path).accept(4, RUN, Order.PAUSE)
    again = OwnerOrders(tmp_path)
    assert (again.record.accepted, again.of(RUN), again.of(b"s" * 16)) == (4, Order.PAUSE, Order.GO)
    again.accept(5)
    assert read_orders(tmp_path).of(RUN) is Order.PAUSE
    again.accept(6, RUN, Order.GO)
    assert read_orders(tmp_path).orders == {}


def test_a_stop_is_not_taken_back(tmp_path):
    orders = OwnerOrders(tmp_path)
    orders.accept(1, RUN, Order.STOP_NOW)
    orders.accept(2, RUN, Order.STOP)
    assert orders.of(RUN) is Order.STOP_NOW


def test_failed_write_changes_nothing(tmp_path, monkeypatch):
    """A file that can't be written changes nothing."""
    orders = OwnerOrders(tmp_path)

    def refuse(*_args, **_options):
        raise ConfigError("the disk is full")

    monkeypatch.setattr("aggregator.storage.signed_runs.write_atomic", refuse)
    with pytest.raises(ConfigError):
        orders.accept(1, RUN, Order.PAUSE)
    assert (orders.record.accepted, orders.of(RUN)) == (0, Order.GO)


@pytest.mark.parametrize(
    "data", [b"", b"[]", b'{"accepted": "1", "orders": {}}', b'{"accepted": 1, "orders": {"00": "fly"}}']
)
def test_a_damaged_file_is_named(tmp_path, data):
    path = tmp_path / ORDERS_FILE
    path.write_bytes(data)
    path.chmod(0o600)
    with pytest.raises(IntegrityError, match=r"orders\.json is damaged"):
        OwnerOrders(tmp_path)
