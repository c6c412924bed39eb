"""A device that was installed again takes its old place in the middle of a run, and a run is for labelled devices alone."""

import pytest

from edge_client.membership import DeviceMembership, init, join
from shoal.errors import NotEnrolledError, UntrustedError
from shoal.membership.directory import ROSTER_FILE
from shoal.membership.grants import open_card
from tests.helpers.fleets import (
    device_identity,
    grouped_data,
    inject,
    make_fleet,
    names,
    open_upload,
    reasons,
    seal_upload,
    uploads_of,
)

GONE = "dev-03"


def replace(fleet, batch):
    """Lose the directory of GONE, let the owner take another one in its place, and start that; return the lost one."""
    fleet.kill_device(GONE)
    place, owner = fleet.stage.device_dir(GONE), fleet.stage.fleet
    lost = place.rename(place.with_name("lost"))
    card = init(place, GONE).read_bytes()
    owner.burn(open_card(card))
    join(place, owner.add_device(card).read_bytes(), owner.fingerprint)
    fleet.publish()
    fleet.revive_device(GONE, batch)
    return lost


@pytest.mark.parametrize("case", ["a member", "revoked before", "while the aggregator is away"])
def test_new_device_goes_on_in_the_run(tmp_path, case, caplog, tap):
    """Its keys are new, its name and index are old; what the old keys sign and open is nothing."""
    with make_fleet(tmp_path / "fleet", faults=tap, count=4, rounds=7, quorum=1.0) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 2, 10)
        owner, old = fleet.stage.fleet, device_identity(fleet, GONE)
        if case == "revoked before":
            owner.revoke(GONE)
            fleet.publish()
            fleet.run_until(lambda: fleet.closed() >= 4, 60)
        if case == "while the aggregator is away":
            fleet.kill_aggregator()
        sequence = owner.roster.sequence
        lost = replace(fleet, grouped_data(4)[GONE])
        assert owner.roster.sequence == sequence + 1
        assert tuple(d.name for d in owner.roster.devices) == names(4)
        assert (owner.roster.active_count, owner.roster.revoked) == (4, ())
        if case == "while the aggregator is away":
            fleet.revive_aggregator()
        stale = open_upload(fleet, "dev-00", uploads_of(fleet, tap, "dev-00")[-1])
        inject(fleet, GONE, seal_upload(fleet, GONE, *stale, signer=old))
        records = fleet.run(200)
        assert records[-1]["final"]
        assert set(records[-2]["norms"]) == set(names(4))
        assert fleet.model(GONE).theta.tobytes() == fleet.model("dev-00").theta.tobytes()
        with pytest.raises(NotEnrolledError):
            DeviceMembership(lost).version_key(owner.roster.keys_since)
        with pytest.raises(UntrustedError, match="was replaced"):
            owner.add_device((lost / f"{GONE}.card").read_bytes())
        assert any("the signature on this upload is not its sender's" in reason for reason in reasons(caplog))
        (lost / ROSTER_FILE).write_bytes(owner.roster_bytes)
        assert not DeviceMembership(lost).listed


def test_run_is_for_one_label(tmp_path):
    """Others take no part and ask for nothing; a device that gets the label joins, and one that loses it leaves."""
    stage = make_fleet(tmp_path / "fleet", count=5, rounds=1).stage
    owner = stage.fleet
    owner.label(["dev-00", "dev-01", "dev-02"], {"site": "berlin"})
    stage.carry_roster()
    with make_fleet(tmp_path / "fleet", grouped_data(5), stage=stage, rounds=9, only="site=berlin") as fleet:
        fleet.run_until(lambda: fleet.closed() >= 3, 60)
        assert set(fleet.records()[-1]["norms"]) == {"dev-00", "dev-01", "dev-02"}
        session = fleet.devices["dev-03"].runtime.session
        assert (session.plan, session.missing, session.others) == (None, (), fleet.plan.run_id)
        owner.label(["dev-03"], {"site": "berlin"})
        owner.label(["dev-00"], {"site": ""})
        fleet.publish()
        records = fleet.run(200)
        assert set(records[-2]["norms"]) == {"dev-01", "dev-02", "dev-03"}
        assert fleet.model("dev-03").theta.tobytes() == fleet.model("dev-01").theta.tobytes()
