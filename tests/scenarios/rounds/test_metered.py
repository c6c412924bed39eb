"""A device in its metered hours: it declines with that reason, fetches nothing, and goes on afterwards."""

import dataclasses
import time

from shoal_lab.loopback.transport import Hop

from tests.helpers.fleets import make_fleet, thetas


def meter(runtime, hours):
    runtime._config = dataclasses.replace(runtime._config, metered=hours)


HOUR = time.localtime().tm_hour
NOW = f"{(HOUR - 6) % 24:02}:00-{(HOUR + 6) % 24:02}:00"


def test_metered_device_declines_meanwhile(tmp_path, tap):
    """A metered device declines and goes on afterwards."""
    with make_fleet(tmp_path / "fleet", rounds=6, quorum=0.5, count=4, faults=tap) as fleet:
        fleet.run_until(lambda: fleet.closed() == 1, 30)
        device = fleet.devices["dev-00"].runtime
        meter(device, NOW)
        fleet.run_until(lambda: fleet.closed() == 2, 30)
        start = len(tap.heard)
        fleet.run_until(lambda: fleet.closed() == 4, 60)
        heard = [p for p in tap.heard[start:] if p.hop is Hop.DOWN and p.client == fleet.client_id("dev-00")]
        assert not [p for p in heard if "/s/model/" in p.topic]
        declined = [r["declined"].get("dev-00") for r in fleet.records()[2:]]
        assert set(declined) == {"metered"}
        device._results.publish(device.session, fleet.now_s, force=True)
        status = device._files.load_status()
        assert f"the link is metered, {NOW}" in status["skipped"]
        meter(device, "")
        fleet.run(60)
        assert len(set(thetas(fleet).values())) == 1
        assert "dev-00" not in fleet.records()[-1]["declined"]


def test_the_final_round_is_urgent(tmp_path):
    """Its figures are the run's result; a device without the newest model takes a checkpoint for it."""
    with make_fleet(tmp_path / "fleet", rounds=3, quorum=0.5, count=4) as fleet:
        meter(fleet.devices["dev-00"].runtime, NOW)
        records = fleet.run(120)
        assert all(r["declined"].get("dev-00") == "metered" for r in records[:-1])
        assert len(set(thetas(fleet).values())) == 1
