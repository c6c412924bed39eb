"""Brokers that break a promise: no retained messages for wildcards, a lost subscription, lost presences of devices."""

import pytest

from tests.helpers.fleets import LOST, Wiretap, make_fleet


def test_a_device_restarts_at_a_broker_that_sends_nothing_retained_to_wildcards(tmp_path):
    """As RabbitMQ 3.10. The devices come after the run was announced; one is killed later, and the aggregator too."""
    with make_fleet(tmp_path / "fleet", count=5, rounds=6, deadline_s=600.0) as fleet:
        fleet.broker.wildcards = False
        for name in fleet.stage.devices:
            fleet.kill_device(name)
        fleet.settle()
        for name in fleet.stage.devices:
            fleet.revive_device(name)
        fleet.run_until(lambda: fleet.closed() >= 2, 200)
        fleet.kill_device("dev-00")
        fleet.kill_aggregator()
        fleet.revive_aggregator()
        fleet.run_until(lambda: fleet.closed() >= 3 or "dev-00" in fleet.service.status(), 200)
        fleet.revive_device("dev-00")
        records = fleet.run(400)
        assert [r["contributed"] for r in records[-3:]] == [5, 5, 5]


@pytest.mark.parametrize("kind", ["round", "ctl"])
def test_a_subscription_that_the_broker_loses_is_made_again(tmp_path, kind):
    """The device hears no announcement; the aggregator repeats it on the device's own topic, or the device asks again."""
    with make_fleet(tmp_path / "fleet", rounds=6, deadline_s=3600.0) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 2, 200)
        session = fleet.broker._sessions[fleet.client_id("dev-01")]
        for topic_filter in [f for f in session.filters if "/s/round" in f or f"/{kind}" in f]:
            del session.filters[topic_filter]
        assert fleet.run(900)[-1]["contributed"] == 3


def test_presences_that_the_broker_loses_are_read_again_after_a_reconnection(tmp_path):
    tap = Wiretap()
    with make_fleet(tmp_path / "fleet", count=4, faults=tap, rounds=6, deadline_s=600.0) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 2, 200)
        server, away = fleet.client_id("aggregator"), []
        tap.rules.append(lambda p: LOST if p.client == server and p.topic.endswith("/state") and away else None)
        for name in fleet.stage.devices[1:]:
            fleet.broker.disconnect(fleet.client_id(name))
        fleet.settle()
        away.append(True)
        fleet.broker.disconnect(server)
        for name in fleet.stage.devices[1:]:
            fleet.broker.reconnect(fleet.client_id(name))
        fleet.settle()
        away.clear()
        fleet.broker.reconnect(server)
        fleet.settle()
        assert len(fleet.service.state.online) == 4
        assert fleet.run(200)[-1]["contributed"] == 4


def test_an_upload_is_a_sign_of_life(tmp_path):
    """A device whose presences never arrive is there as soon as its upload is, and `status` says the same."""
    tap = Wiretap()
    with make_fleet(tmp_path / "fleet", faults=tap, rounds=6, deadline_s=600.0) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 2, 200)
        server, client = fleet.client_id("aggregator"), fleet.client_id("dev-01")
        # Its upload is on the way when the connection breaks.
        tap.rules.append(lambda p: (3.0,) if p.client == client and p.topic.endswith("/up") else None)
        fleet.run_until(lambda: fleet.service.state.waiting == ("dev-01",), 200)
        fleet.broker.disconnect(client)
        fleet.broker.pump()
        facts = fleet.service.watch.devices
        assert facts.devices["dev-01"].online is False
        tap.rules[:] = [lambda p: LOST if p.client == server and p.topic.endswith("dev-01/state") else None]
        fleet.broker.reconnect(client)
        fleet.run_until(lambda: "dev-01" in fleet.service.state.online, 60)
        told = facts.devices["dev-01"]
        assert told.online
        assert told.since_s >= told.last_upload_s
        assert fleet.run(200)[-1]["contributed"] == 3
