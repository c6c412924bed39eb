"""Key versions that follow one another while a run goes on: several changes at once, absent devices, and an owner that dies."""

import pytest
from shoal_lab.loopback.transport import Hop

from edge_client.membership import DeviceMembership
from shoal.owner.enrolment.admission import Registrar
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol.topics import TopicKind, Topics
from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    grouped_data,
    make_fleet,
    names,
    open_upload,
    restart_aggregator,
    restart_device,
    uploads_of,
)

OPTIONS = {"quorum": 0.5, "deadline_s": 30.0}


def closed(fleet, count):
    """Run until ``count`` more rounds have closed."""
    done = len(fleet.records())
    fleet.run_until(lambda: fleet.closed() >= done + count, 200)


def one_model(fleet, members):
    """Run to the end, and return the records after a check that all ``members`` end with the same bits."""
    records = fleet.run(600)
    assert len({fleet.model(name).theta.tobytes() for name in members}) == 1
    assert set(records[-1]["clusters"]) == set(members)
    return records


def trained_after(records, round_, name):
    return [r["round"] for r in records if r["round"] > round_ and name in r["norms"]]


def versions(fleet, tap):
    """Return round -> key version under which dev-00 has masked its update."""
    headers = [open_upload(fleet, "dev-00", sealed)[0] for sealed in uploads_of(fleet, tap, "dev-00")]
    return {header.round: header.key_version for header in headers}


@pytest.mark.parametrize("published", ["each", "together"])
def test_two_revocations_in_a_row(tmp_path, published):
    """Before a round is announced under the first one's version, the second one's is drawn."""
    with make_fleet(tmp_path / "fleet", count=6, rounds=8, **OPTIONS) as fleet:
        closed(fleet, 2)
        for name in ("dev-04", "dev-05"):
            fleet.stage.fleet.revoke(name)
            if published == "each":
                fleet.publish()
        fleet.publish()
        at = len(fleet.records())
        closed(fleet, 1)
        assert fleet.service.state.held.key_version == fleet.stage.fleet.roster.keys_since
        records = one_model(fleet, names(4))
        for name in ("dev-04", "dev-05"):
            assert fleet.devices[name].runtime.revoked
            assert not trained_after(records, at + 1, name)
        for name in names(4):
            assert trained_after(records, at, name) == list(range(at + 1, 10)), name


@pytest.mark.parametrize("rounds", with_long([1, 4], 4))
def test_away_over_several_versions(tmp_path, rounds):
    """After a few rounds the retained means are gone, and it needs a checkpoint; each version's delivery is on the broker."""
    with make_fleet(tmp_path / "fleet", count=6, rounds=3 * rounds + 7, **OPTIONS) as fleet:
        closed(fleet, 2)
        fleet.kill_device("dev-01")
        for change in (lambda o: o.rotate(), lambda o: o.revoke("dev-05"), lambda o: o.rotate()):
            change(fleet.stage.fleet)
            fleet.publish()
            closed(fleet, rounds)
        back = len(fleet.records())
        fleet.revive_device("dev-01")
        records = one_model(fleet, names(5))
        assert trained_after(records, back, "dev-01")[0] <= back + 3, "a round may be open, and one orders a checkpoint"


def test_half_of_the_fleet_is_new(tmp_path):
    """Three of six are revoked, and three join: they hold nothing of the rounds before, and end with the same model."""
    data = grouped_data(9)
    first = {name: data[name] for name in names(6)}
    with make_fleet(tmp_path / "fleet", first, rounds=14, min_contributors=2, **OPTIONS) as fleet:
        closed(fleet, 2)
        for name in ("dev-03", "dev-04", "dev-05"):
            fleet.stage.fleet.revoke(name)
        fleet.publish()
        for name in ("dev-06", "dev-07", "dev-08"):
            fleet.add_device(name, data[name])
        began = len(fleet.records())
        members = [*names(3), "dev-06", "dev-07", "dev-08"]
        records = one_model(fleet, members)
        for name in members:
            assert trained_after(records, began, name)[0] <= began + 4, name
        restart_device(fleet, "dev-06")
        assert fleet.devices["dev-06"].runtime.following == fleet.plan.run


def test_a_rotation_beside_an_admission(tmp_path, tap):
    """The newcomer's grant has the version of its admission; the one that is drawn next reaches it as it does all others."""
    data = grouped_data(5)
    first = {name: data[name] for name in names(4)}
    with make_fleet(tmp_path / "fleet", first, rounds=12, faults=tap, **OPTIONS) as fleet:
        closed(fleet, 2)
        owner = fleet.stage.fleet
        fleet.stage.add_device("dev-04")
        admitted = owner.roster.keys_since
        owner.rotate()
        fleet.publish()
        fleet.revive_device("dev-04", data["dev-04"])
        began = len(fleet.records())
        records = one_model(fleet, names(5))
        assert trained_after(records, began, "dev-04")[0] <= began + 4
        assert owner.roster.keys_since > admitted
        assert all(v == owner.roster.keys_since for r, v in versions(fleet, tap).items() if r > began + 1)


@pytest.mark.parametrize("published", ["nothing", "the roster"])
def test_owner_dies_before_publishing(tmp_path, published, tap):
    """Its directory has the new version; the fleet works on under the old one, or waits, until the owner publishes it."""
    with make_fleet(tmp_path / "fleet", count=4, rounds=10, faults=tap, **OPTIONS) as fleet:
        closed(fleet, 2)
        before = fleet.stage.fleet.roster.keys_since
        fleet.stage.fleet.revoke("dev-03")
        if published == "the roster":
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(Registrar, "publish_keys", lambda *_: None)
                fleet.publish()
            fleet.settle()
        else:
            closed(fleet, 2)
            assert set(versions(fleet, tap).values()) == {before}
        at = len(fleet.records())
        again = FleetDirectory(fleet.stage.fleet.path)
        assert again.roster.keys_since > before
        assert again.version_key.number == again.roster.keys_since
        fleet.stage.fleet = again
        fleet.publish()
        records = one_model(fleet, names(3))
        assert not trained_after(records, at + 1, "dev-03")
        assert all(v == again.roster.keys_since for r, v in versions(fleet, tap).items() if r > at + 1)


@pytest.mark.parametrize(
    ("restarts", "delay_s"),
    [
        pytest.param(False, 0.5, id="within a round"),
        pytest.param(False, 5.0, id="before the deadline", marks=pytest.mark.long),
        pytest.param(False, 100.0, id="after the deadline"),
        pytest.param(True, 0.5, id="over a restart, within a round", marks=pytest.mark.long),
        pytest.param(True, 5.0, id="over a restart, before the deadline"),
        pytest.param(True, 100.0, id="over a restart, after the deadline", marks=pytest.mark.long),
    ],
)
def test_device_keys_newer_than_aggregators(tmp_path, delay_s, restarts, tap):
    """They decline the open round. Once the aggregator has the newer keys it closes that round and opens one under them."""
    with make_fleet(tmp_path / "fleet", count=5, rounds=10, faults=tap, **OPTIONS) as fleet:
        closed(fleet, 2)
        server = fleet.client_id("aggregator")
        for topic in (Topics(fleet.plan.fleet).keys("aggregator"), Topics(fleet.plan.fleet).at(TopicKind.OWNER_ROSTER)):
            tap.delay(delay_s, hop=Hop.DOWN, client=server, holding=topic)
        fleet.stage.fleet.rotate()
        fleet.publish()
        drawn = fleet.stage.fleet.roster.keys_since
        directories = [fleet.stage.device_dir(name) for name in names(5)]
        fleet.run_until(lambda: all(DeviceMembership(d).newest_generation == drawn for d in directories), 60)
        if restarts:
            restart_aggregator(fleet)
        records = one_model(fleet, names(5))
        assert len(records) == 11
        assert {r for r, v in versions(fleet, tap).items() if v == drawn} >= set(range(6, 11))
