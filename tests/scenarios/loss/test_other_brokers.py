"""Brokers that break a promise: no retained messages for wildcards, a lost subscription, lost presences of devices."""

from tests.helpers.fleets import (
    LOST,
    make_fleet,
    restart_aggregator,
)


def test_device_restarts_without_wildcards(tmp_path):
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
        restart_aggregator(fleet)
        fleet.run_until(lambda: fleet.closed() >= 3 or "dev-00" in fleet.service.status(), 200)
        fleet.revive_device("dev-00")
        records = fleet.run(400)
        assert [r["contributed"] for r in records[-3:]] == [5, 5, 5]


def handled(fleet, monkeypatch, *, unsubscribe=None, subscribe=None):
    """Let functions of (request, client, filter) handle the requests to the broker."""
    for name, handle in (("unsubscribe", unsubscribe), ("subscribe", subscribe)):
        if handle is not None:
            request = getattr(fleet.broker, name)
            monkeypatch.setattr(
                fleet.broker,
                name,
                lambda client, f, r=request, h=handle, **how: h(lambda: r(client, f, **how), client, f),
            )


def test_subscription_ended_after_the_next(tmp_path, monkeypatch):
    """As aedes, which handles UNSUBSCRIBE after a SUBSCRIBE that follows it. The model must be read again in round 2."""
    with make_fleet(tmp_path / "fleet", rounds=6, deadline_s=600.0) as fleet:
        handled(fleet, monkeypatch, unsubscribe=lambda request, *_: fleet.broker.schedule(0.01, request))
        fleet.run_until(lambda: fleet.closed() >= 1, 200)
        transport = fleet.devices["dev-01"].runtime._transport
        for topic_filter in list(transport.filters):
            transport.subscribe(topic_filter)
        fleet.run_until(lambda now_s=fleet.now_s: fleet.now_s > now_s + 0.02, 10)
        assert set(fleet.broker._sessions[fleet.client_id("dev-01")].filters) >= set(transport.filters)
        assert fleet.run(400)[-1]["contributed"] == 3


def test_restart_of_broker_without_wildcards(tmp_path, monkeypatch):
    """One device restarts in mid-run, and needs the open round, its models and the roster."""
    with make_fleet(tmp_path / "fleet", count=5, rounds=6, deadline_s=600.0) as fleet:

        def subscribe(request, _client, topic_filter):
            kept = fleet.broker.retained
            if "+" in topic_filter or "#" in topic_filter:
                fleet.broker.retained = {}
            request()
            fleet.broker.retained = kept

        handled(fleet, monkeypatch, subscribe=subscribe)
        fleet.run_until(lambda: fleet.closed() >= 2, 200)
        fleet.kill_device("dev-00")
        fleet.run_until(lambda: "dev-00" in fleet.service.status(), 200)
        fleet.revive_device("dev-00")
        assert [r["contributed"] for r in fleet.run(400)[-3:]] == [5, 5, 5]


def test_lost_subscription_uses_own_topic(tmp_path, monkeypatch):
    """The broker acknowledges the device's SUBSCRIBE, and forgets it."""
    with make_fleet(tmp_path / "fleet", rounds=6, quorum=1.0, deadline_s=600.0) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 2, 200)
        client = fleet.client_id("dev-01")
        handled(fleet, monkeypatch, subscribe=lambda r, c, f: None if c == client and "/s/round" in f else r())
        session = fleet.broker._sessions[client]
        lost = [f for f in session.filters if "/s/round" in f]
        assert lost
        for topic_filter in lost:
            del session.filters[topic_filter]
        assert fleet.run(900)[-1]["contributed"] == 3


def test_lost_presences_are_read_again(tmp_path, tap):
    """Presences that the broker loses are read again after a reconnection."""
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


def test_an_upload_is_a_sign_of_life(tmp_path, tap):
    """A device whose presences never arrive is there as soon as its upload is, and `status` says the same."""
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
