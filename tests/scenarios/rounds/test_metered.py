"""A device in its metered hours: it declines with that reason, fetches nothing, and goes on afterwards."""

from edge_client.metered import Hours
from shoal.transport.faults import Hop
from tests.helpers.fleets import Wiretap, make_fleet, thetas

ALWAYS = Hours(0, 24 * 60)


def test_metered_device_declines_meanwhile(tmp_path):
    """A metered device declines and goes on afterwards."""
    tap = Wiretap()
    with make_fleet(tmp_path / "fleet", rounds=6, quorum=0.5, count=4, faults=tap) as fleet:
        fleet.run_until(lambda: fleet.closed() == 1, 30)
        device = fleet.devices["dev-00"].runtime
        device._metered = ALWAYS
        fleet.run_until(lambda: fleet.closed() == 2, 30)
        start = len(tap.heard)
        fleet.run_until(lambda: fleet.closed() == 4, 60)
        heard = [p for p in tap.heard[start:] if p.hop is Hop.DOWN and p.client == fleet.client_id("dev-00")]
        assert not [p for p in heard if "/s/model/" in p.topic]
        declined = [r["declined"].get("dev-00") for r in fleet.records()[2:]]
        assert set(declined) == {"metered"}
        device._results.publish(device.session, fleet.now_s, force=True)
        status = device._files.load_status()
        assert "the link is metered, 00:00-24:00" in status["skipped"]
        device._metered = None
        fleet.run(60)
        assert len(set(thetas(fleet).values())) == 1
        assert "dev-00" not in fleet.records()[-1]["declined"]


def test_the_final_round_is_urgent(tmp_path):
    """Its figures are the run's result; a device without the newest model takes a checkpoint for it."""
    with make_fleet(tmp_path / "fleet", rounds=3, quorum=0.5, count=4) as fleet:
        fleet.devices["dev-00"].runtime._metered = ALWAYS
        records = fleet.run(120)
        assert all(r["declined"].get("dev-00") == "metered" for r in records[:-1])
        assert len(set(thetas(fleet).values())) == 1
