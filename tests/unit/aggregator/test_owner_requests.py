"""The owner's requests at the aggregator: answers, replays, forgeries, and requests that come late."""

import dataclasses
import json
import time

import pytest

from aggregator.membership import AggregatorMembership
from aggregator.owner_requests import OwnerRequests
from aggregator.run_control import RunControl
from aggregator.storage.backup import restore, save
from aggregator.storage.signed_runs import OwnerOrders
from crypto.seal.envelope import SealError
from crypto.seal.identity import Identity
from shoal import limits
from shoal.errors import StorageError, UntrustedError, WireError
from shoal.protocol import channels
from shoal.protocol.chunking import split
from shoal.protocol.requests import REQUEST_LIFE_S, Outcome, RequestAction
from tests.helpers.owner_requests import chunks_of, opened, request_of, seal_request
from tests.helpers.parties import TOPICS, Line, Parties

LIST = RequestAction.LIST


class Desk:
    """An aggregator without a run, whose answers are recorded."""

    def __init__(self, parties):
        self.parties = parties
        self.line = Line()
        self.start()

    def start(self):
        """Start the aggregator from its directory."""
        member = AggregatorMembership(self.parties.server.directory)
        self.orders = OwnerOrders(member.directory)
        control = RunControl(member, self.orders, lambda: None)
        self.requests = OwnerRequests(member, self.line, self.orders, control)

    def seal(self, request, package=b"", **options):
        aggregator = self.parties.owner.roster.aggregator
        return seal_request(self.parties.owner, aggregator, request, package, **options)

    def take(self, sealed, **options):
        """Hand over a sealed request; return the answer and its document, None without one."""
        self.line.sent.clear()
        for chunk in chunks_of(sealed, **options):
            assert self.requests.take(TOPICS.owner_request, chunk, 0.0)
        sent = [payload for topic, payload, retain in self.line.sent if topic == TOPICS.owner_answer and not retain]
        return opened(sent, self.parties.owner) if sent else None

    def ask(self, action=LIST, **parts):
        return self.take(self.seal(request_of(action, fleet="reef", **parts)))


@pytest.fixture
def desk(tmp_path):
    return Desk(Parties(tmp_path, "dev-1"))


def test_it_subscribes_to_the_requests_alone(desk):
    desk.requests.subscribe()
    assert desk.line.filters == [TOPICS.owner_request]
    assert not desk.requests.take(TOPICS.up("dev-1"), b"anything", 0.0)


def test_recorded_request_has_no_effect(desk):
    """A request is answered under its own id; if it was recorded, it has no effect again, also after a restart."""
    sealed = desk.seal(request_of(LIST, fleet="reef", sequence=3))
    answer, body = desk.take(sealed)
    assert (answer.outcome, answer.request, answer.accepted) == (Outcome.DONE, sealed.transfer_id, 3)
    assert json.loads(body) == {"runs": [], "records": [], "schedule": None}
    for _ in range(2):
        answer, body = desk.take(sealed)
        assert (answer.outcome, answer.accepted, body) == (Outcome.REPLAYED, 3, b"")
        assert "restored from a backup" in answer.hint
        desk.start()
    assert desk.ask(sequence=2)[0].outcome is Outcome.REPLAYED
    assert desk.ask(sequence=4)[0].outcome is Outcome.DONE


def test_late_request_uses_no_number(desk):
    """A request that comes late has no effect and uses up no number."""
    answer, _ = desk.ask(sequence=9, expires_at_s=int(time.time()) - 5)
    assert (answer.outcome, answer.accepted) == (Outcome.EXPIRED, 0)
    assert "by the aggregator's clock" in answer.reason
    answer, _ = desk.ask(RequestAction.PAUSE, run=7, sequence=2)
    assert (answer.outcome, answer.accepted) == (Outcome.UNKNOWN, 2), "a refused one uses up its number"


def test_request_after_a_restore(desk, tmp_path):
    """A broker that has recorded it sends it again within its ten minutes; the owner's next one is carried out."""
    save(desk.parties.server.directory, tmp_path / "file")
    recorded = desk.seal(request_of(LIST, fleet="reef", sequence=3))
    assert desk.take(recorded)[0].outcome is Outcome.DONE
    restore(tmp_path / "file", tmp_path / "again")
    desk.parties.server = AggregatorMembership(tmp_path / "again")
    desk.start()
    for _ in range(2):
        answer, body = desk.take(recorded)
        assert (answer.outcome, answer.accepted, body) == (Outcome.EXPIRED, 0, b"")
        assert "before the aggregator was restored from a backup" in answer.reason
    made_later = request_of(LIST, fleet="reef", sequence=4, expires_at_s=int(time.time()) + REQUEST_LIFE_S)
    assert desk.take(desk.seal(made_later))[0].outcome is Outcome.DONE
    desk.start()
    assert desk.take(recorded)[0].outcome is Outcome.REPLAYED


def test_full_disk_is_answered(desk, monkeypatch):
    """A full disk is answered and ends nothing."""

    def refuse(*_args, **_options):
        raise StorageError("the disk is full", hint="free some space")

    monkeypatch.setattr("aggregator.storage.signed_runs.write_atomic", refuse)
    answer, _ = desk.ask()
    assert (answer.outcome, answer.reason, answer.hint) == (Outcome.FAILED, "the disk is full", "free some space")


def test_request_in_pieces_is_carried_out(desk):
    """A request in pieces is carried out once all are there."""
    sealed = desk.seal(request_of(RequestAction.START, fleet="reef"), b"x" * 5000)
    answer, _ = desk.take(sealed, chunk_bytes=1024)
    assert answer.outcome is Outcome.REFUSED
    assert answer.reason.startswith("no run of this fleet")


@pytest.mark.parametrize(
    "forgery", ["signer", "recipient", "purpose", "fleet", "inner fleet", "altered", "another key"]
)
def test_forged_request_gets_no_answer(desk, forgery):
    """A forged request is neither carried out nor answered."""
    stranger = Identity.generate("owner")
    right = channels.REQUEST.head("reef", "owner", "aggregator")
    options = {
        "signer": {"signer": stranger},
        "recipient": {"head": dataclasses.replace(right, recipient="dev-1")},
        "purpose": {"head": dataclasses.replace(right, purpose="roster")},
        "fleet": {"head": dataclasses.replace(right, fleet="atoll")},
    }.get(forgery, {})
    fleet = "atoll" if forgery == "inner fleet" else "reef"
    head = {"head": right} if forgery == "inner fleet" else {}
    sealed = desk.seal(request_of(LIST, fleet=fleet), **options, **head)
    if forgery == "altered":
        data = bytearray(sealed.payload)
        data[-100] ^= 1
        sealed = dataclasses.replace(sealed, payload=bytes(data))
    if forgery == "another key":
        sealed = seal_request(desk.parties.owner, stranger.member, request_of(LIST, fleet="reef"), head=right)
    with pytest.raises((UntrustedError, SealError)):
        desk.take(sealed)
    assert (desk.line.sent, desk.orders.record.accepted) == ([], 0)


def test_large_request_is_refused_at_once(desk):
    """A request above the limit is refused by its first chunk."""
    (chunk, *_) = split(bytes(limits.MAX_REQUEST_BYTES + 1), kind=channels.REQUEST.kind, round=0)
    with pytest.raises(WireError, match="is above"):
        desk.requests.take(TOPICS.owner_request, chunk, 0.0)


def test_unusable_key_is_refused(desk):
    """A key that nothing can be sealed to is refused."""
    request = dataclasses.replace(request_of(LIST, fleet="reef"), answer_key=bytes(32))
    with pytest.raises(WireError, match="a key that nothing can be sealed to"):
        desk.take(desk.seal(request))


def test_a_large_request_waits_on_the_disk(desk, monkeypatch):
    """Chunks beyond the memory limit go to a file until the request is whole."""
    monkeypatch.setattr(desk.requests._chunks, "_memory_bytes", 1 << 12)
    sealed = desk.seal(request_of(RequestAction.START, fleet="reef"), bytes(1 << 16))
    *most, last = chunks_of(sealed, chunk_bytes=1024)
    for chunk in most:
        desk.requests.take(TOPICS.owner_request, chunk, 0.0)
        assert desk.requests._chunks.held_bytes < 1 << 14
    desk.requests.take(TOPICS.owner_request, last, 0.0)
    answer, _ = opened([payload for _, payload, _ in desk.line.sent], desk.parties.owner)
    assert answer.outcome is Outcome.REFUSED
    desk.requests.close()
