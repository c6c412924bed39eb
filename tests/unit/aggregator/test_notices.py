"""The notice of the owner's orders: what it says, and when it is published."""

import dataclasses

import pytest

from aggregator.membership import AggregatorMembership
from aggregator.publisher import NoticeBoard
from aggregator.rounds.state import Order
from aggregator.storage.signed_runs import OwnerOrders
from crypto.seal.envelope import open_from_group, read_head
from shoal.protocol.chunking import parse
from shoal.protocol.codec import decode
from shoal.protocol.messages import Notice, RunOrder
from shoal.protocol.topics import Topics
from shoal.transport.base import Connected, Disconnected
from tests.helpers.fleets import make_fleet
from tests.helpers.parties import Line


@pytest.fixture(scope="module")
def fleet(tmp_path_factory):
    with make_fleet(tmp_path_factory.mktemp("notices") / "fleet", count=1) as made:
        yield made


class Board:
    """A board on a line that records what is published."""

    def __init__(self, fleet, folder):
        self.plan = fleet.plan
        self.member = AggregatorMembership(fleet.stage.aggregator_dir)
        self.orders = OwnerOrders(folder)
        self.line = Line()
        self.board = NoticeBoard(self.member, self.line, self.orders, lambda: 5000.7)

    def says(self, plan=None):
        """Return the notices published by now, and forget them."""
        self.board.keep_up(plan)
        sent, self.line.sent = self.line.sent, []
        return [self.opened(topic, payload) for topic, payload, retain in sent if retain]

    def opened(self, topic, chunk):
        assert topic == Topics(self.plan.fleet).notice
        _, payload = parse(chunk)
        head, at = read_head(payload)
        return decode(
            open_from_group(self.member.group, payload, head, at, self.member.identity.member.sign_key), Notice
        )


@pytest.fixture
def board(fleet, tmp_path):
    return Board(fleet, tmp_path)


def test_no_run_or_order_is_said_once(board):
    """Without a run or an order it says so once."""
    (notice,) = board.says()
    assert (notice.run, notice.run_id, notice.order, notice.choice) == (0, bytes(16), RunOrder.NONE, b"")
    assert notice.sent_at_s == 5000
    assert board.says() == []


@pytest.mark.parametrize(
    ("order", "word"),
    [(Order.PAUSE, RunOrder.PAUSED), (Order.STOP, RunOrder.STOPPED), (Order.STOP_NOW, RunOrder.STOPPED)],
)
def test_an_order_is_told_with_its_run(board, order, word):
    board.says(board.plan)
    board.orders.accept(7, board.plan.run_id, order)
    (notice,) = board.says(board.plan)
    assert (notice.sequence, notice.run, notice.run_id, notice.order) == (7, 1, board.plan.run_id, word)
    board.orders.accept(8)
    assert board.says(board.plan) == [], "a request that only reads changes nothing"
    (notice,) = board.says(None)
    assert notice.order is RunOrder.NONE


def test_choice_is_passed_on_as_signed(board):
    """A choice of models is passed on as signed."""
    board.orders.choose(b"signed by the owner")
    (notice,) = board.says()
    assert notice.choice == b"signed by the owner"
    assert OwnerOrders(board.orders._directory).choice == b"signed by the owner", "also after a restart"


def test_repeated_for_new_key_or_broker(board):
    """A newer broadcast key and a broker that was away repeat it."""
    board.says()
    board.board.on_event(Connected(session_present=True))
    assert board.says() == []
    board.board.on_event(Disconnected("gone"))
    board.board.on_event(Connected(session_present=False))
    assert len(board.says()) == 1
    board.member.group = dataclasses.replace(board.member.group, secret=bytes(32))
    assert len(board.says()) == 1
