"""What the owner's requests do at the aggregator: runs that are stored, ordered and listed."""

import json

import pytest

from aggregator.run_control import RunControl, UnfulfilledError
from aggregator.status.answers import QUEUED, STOPPED_UNBEGUN
from aggregator.status.facts import ConnectionFacts, DeviceStatus, LiveFacts
from aggregator.status.live_file import LIVE_FILE
from aggregator.storage.signed_runs import OwnerOrders
from crypto.seal.identity import Identity, sign_document
from shoal.owner.console.asking import sign_choice
from shoal.owner.keys.vault import run_file
from shoal.protocol.documents import ModelChoice
from shoal.protocol.messages import Vitals
from shoal.protocol.requests import Outcome, RequestAction
from shoal.util.state_codec import encode_state
from shoal.version import VERSION, WIRE
from tests.helpers.owner_requests import request_of
from tests.helpers.run_places import RunPlace


class Desk:
    """An aggregator that serves no run, and an owner with runs that are not here yet."""

    def __init__(self, root):
        self.place = RunPlace(root)
        self.orders = OwnerOrders(self.place.server)
        self.refreshed = 0
        self.control = RunControl(self.place.member, self.orders, lambda: None, self.refresh)
        self.number = 0

    def refresh(self):
        self.refreshed += 1

    def sign(self, **changes):
        """Sign a run, take its file away from the aggregator, and return (plan, package)."""
        plan = self.place.sign(**changes)
        (self.place.server / "runs" / f"{plan.run:06d}.run").unlink()
        return plan, run_file(self.place.owner.path, plan.run).read_bytes()

    def ask(self, action, package=b"", **parts):
        self.number += 1
        page = self.control.carry_out(request_of(action, fleet="reef", sequence=self.number, **parts), package)
        assert self.orders.record.accepted == self.number
        return page

    def hear(self, *devices):
        """Let the facts have devices."""
        up = ConnectionFacts(broker="mqtt://b", connected=True, since_s=1)
        facts = LiveFacts(version=VERSION, connection=up, devices={device.name: device for device in devices})
        (self.place.server / LIVE_FILE).write_text(json.dumps(encode_state(facts).document))

    def one(self, action, package=b"", **parts):
        (entry,) = self.ask(action, package, **parts).runs
        return entry

    def refused(self, action, package=b"", **parts):
        with pytest.raises(UnfulfilledError) as caught:
            self.ask(action, package, **parts)
        assert self.orders.record.accepted == self.number
        return caught.value


@pytest.fixture
def desk(tmp_path):
    return Desk(tmp_path)


def test_the_same_package_twice_is_one_run(desk):
    plan, package = desk.sign()
    first, again = (desk.one(RequestAction.START, package) for _ in range(2))
    assert (first.run, first.run_id, first.phase, first.round) == (plan.run, plan.run_id, QUEUED, 0)
    assert again == first
    (file,) = (desk.place.server / "runs").iterdir()
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (package, 0o600)


@pytest.mark.parametrize("package", [b"", b"junk"])
def test_a_package_that_is_no_run_is_refused(desk, package):
    assert desk.refused(RequestAction.START, package).outcome is Outcome.REFUSED
    assert list((desk.place.server / "runs").iterdir()) == []


@pytest.mark.parametrize(
    ("wire", "hint"),
    [(WIRE + 1, "upgrade the aggregator"), (WIRE - 1, "upgrade the owner's program, and sign the run again")],
    ids=["of later software", "of earlier software"],
)
def test_other_wire_version_is_refused(desk, wire, hint):
    _, package = desk.sign(wire=wire)
    error = desk.refused(RequestAction.START, package)
    assert str(error) == f"a run in wire version {wire}, and this software (shoal {VERSION}) speaks {WIRE}"
    assert (error.outcome, error.hint) == (Outcome.REFUSED, hint)


def test_later_request_is_answered(desk):
    """A request that a later version has is answered."""
    error = desk.refused(200, run=9, now=True)
    assert (error.outcome, str(error)) == (
        Outcome.NOT_NOW,
        f"this aggregator (shoal {VERSION}) does not know the request",
    )
    assert error.hint == "upgrade the aggregator, or use an earlier shoal-fleet"


def test_answer_names_other_versions(desk):
    """The answer names the devices that do not speak the runs wire version."""
    newer = DeviceStatus(name="dev-1", online=True, version="0.9.0", wire=WIRE + 1)
    desk.hear(newer, DeviceStatus(name="dev-2", wire=WIRE))
    _, package = desk.sign()
    entry = desk.one(RequestAction.START, package)
    assert (entry.wire, entry.left_out) == (WIRE, (f"dev-1 (shoal 0.9.0, wire {WIRE + 1})",))
    assert desk.refreshed == 1, "of the facts now"
    assert entry.short == (), "no device has told its memory"


def test_devices_short_of_memory_are_named(desk):
    """A device that reports no memory, or enough, is not named."""
    told = {"dev-1": Vitals(memory_free_bytes=1), "dev-2": Vitals(), "dev-3": Vitals(memory_free_bytes=1 << 30)}
    desk.hear(*(DeviceStatus(name=name, vitals=vitals) for name, vitals in told.items()))
    _, package = desk.sign()
    assert desk.one(RequestAction.START, package).short == ("dev-1 (0 MB free, about 0 needed)",)


def test_a_run_of_another_owner_is_refused(desk, tmp_path):
    (tmp_path / "other").mkdir()
    _, package = Desk(tmp_path / "other").sign()
    assert "no run of this fleet" in str(desk.refused(RequestAction.START, package))


def test_run_of_the_same_number_is_refused(desk):
    """Another run of the same number is refused."""
    _, package = desk.sign()
    _, other = desk.sign(run=1)
    desk.one(RequestAction.START, package)
    error = desk.refused(RequestAction.START, other)
    assert (error.outcome, str(error)) == (Outcome.REFUSED, "another run 1 is here")


def test_run_unfit_for_devices_is_refused(desk):
    """A run that devices would refuse is refused."""
    _, old = desk.sign()
    desk.place.finish(desk.place.sign())
    assert "is older than run 2" in str(desk.refused(RequestAction.START, old))


def test_early_run_takes_all_orders(desk):
    """A run that has not begun is paused resumed and stopped."""
    plan = desk.place.sign()
    assert desk.one(RequestAction.PAUSE, run=1).order == "paused by the owner"
    assert desk.one(RequestAction.RESUME, run=1).order == ""
    stopped = desk.one(RequestAction.STOP, run=1)
    assert (stopped.phase, stopped.order) == (STOPPED_UNBEGUN, "stopped by the owner")
    assert desk.orders.of(plan.run_id).stops
    assert desk.one(RequestAction.STOP, run=1) == stopped
    assert desk.refused(RequestAction.RESUME, run=1).outcome is Outcome.NOT_NOW


def test_a_finished_run_takes_no_order(desk):
    desk.place.finish(desk.place.sign())
    error = desk.refused(RequestAction.PAUSE, run=1)
    assert (error.outcome, str(error)) == (Outcome.NOT_NOW, "run 1 is over")


def test_number_that_is_not_here_is_unknown(desk):
    for action, parts in ((RequestAction.PAUSE, {}), (RequestAction.LOGS, {"records": 1})):
        assert desk.refused(action, run=4, **parts).outcome is Outcome.UNKNOWN


def test_list_has_every_run(desk):
    """The list has every run and names obstacles."""
    desk.place.finish(desk.place.sign())
    begun = desk.place.sign()
    desk.place.sign(run=begun.run)  # another run of a number that was begun
    listed = desk.ask(RequestAction.LIST).runs
    assert [(e.run, e.phase) for e in listed] == [(1, "finished"), (2, QUEUED)]
    assert all(e.stored_at_s for e in listed)


def test_status_reports_the_next_run(desk):
    """Status reports the next run and refreshes the facts first."""
    assert desk.ask(RequestAction.STATUS).run is None
    desk.place.finish(desk.place.sign())
    desk.place.sign()
    desk.ask(RequestAction.PAUSE, run=2)
    run = desk.ask(RequestAction.STATUS).run
    assert (desk.refreshed, run.run, run.order) == (2, 2, "paused by the owner")


def test_choice_is_stored_with_its_run(desk):
    """A choice of models is stored with the run that it names."""
    plan, package = desk.sign()
    desk.one(RequestAction.START, package)
    signed = sign_choice(desk.place.owner, plan.run, print)
    assert desk.one(RequestAction.CHOOSE, signed).run == plan.run
    assert desk.orders.choice == signed
    assert desk.one(RequestAction.CHOOSE, signed).run == plan.run, "sending it again is safe"
    back = sign_choice(desk.place.owner, 0, print)
    assert desk.ask(RequestAction.CHOOSE, back).runs == ()
    assert OwnerOrders(desk.place.server).choice == back, "also after a restart"
    assert desk.refused(RequestAction.CHOOSE, signed).outcome is Outcome.REFUSED
    assert desk.orders.choice == back


def test_foreign_choice_is_refused(desk):
    """A choice that the owner of this fleet has not made is refused."""
    made = ModelChoice(fleet="reef", sequence=9, run=0, run_id=bytes(16), latest=3)
    elsewhere = ModelChoice(fleet="other", sequence=9, run=0, run_id=bytes(16), latest=3)
    for signed in (
        b"junk",
        sign_document(Identity.generate("owner"), made),
        sign_document(desk.place.owner.owner, elsewhere),
    ):
        assert desk.refused(RequestAction.CHOOSE, signed).outcome is Outcome.REFUSED
    assert desk.orders.choice == b""


def test_too_many_comparisons_are_refused(desk, tmp_path, monkeypatch):
    """A run whose workers would compare too many updates is refused."""
    plan = desk.place.sign_for_workers(tmp_path)
    path = desk.place.server / "runs" / f"{plan.run:06d}.run"
    package = path.read_bytes()
    monkeypatch.setattr("aggregator.strategies.registry.MOST_COMPARED", 0)
    (entry,) = desk.ask(RequestAction.LIST).runs
    assert "cfl would compare 1 updates" in entry.obstacle, "its file was carried here by hand"
    path.unlink()
    refused = desk.refused(RequestAction.START, package)
    assert refused.outcome is Outcome.REFUSED
    assert "fedavg" in refused.hint
    assert not path.exists()
