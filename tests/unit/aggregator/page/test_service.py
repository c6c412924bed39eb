"""The page as the daemon starts, feeds and ends it."""

import dataclasses
import logging
import sys
import threading
import urllib.request

import pytest

from aggregator.config import AggregatorConfig
from aggregator.membership import AggregatorMembership
from aggregator.page import feed as feed_module
from aggregator.page import server
from aggregator.page.server import FleetPage
from shoal.errors import ConfigError, WireError
from shoal.simulation.process_fleet import Stage
from tests.helpers.pages import facts
from tests.helpers.waiting import until


@pytest.fixture(scope="module")
def membership(tmp_path_factory):
    stage = Stage(tmp_path_factory.mktemp("stage"), "mqtt://localhost", ("dev-0", "dev-1"))
    return AggregatorMembership(stage.aggregator_dir)


@pytest.fixture
def config(membership):
    return AggregatorConfig(membership.directory, http="127.0.0.1:0")


class Sent:
    """Takes the place of a connection, and may be full."""

    def __init__(self, full=False):
        self.topics, self.full = [], full

    def publish(self, topic, payload, **options):
        assert payload
        assert set(options) <= {"retain", "qos"}
        if self.full:
            raise WireError("the queue is full")
        self.topics.append(topic)


def kept_up(page, membership, times=1):
    found = facts(membership.roster.active(), 1)
    for at_s in range(times):
        page.keep_up(lambda: found, lambda: None, float(at_s))


def test_page_comes_from_the_loop(config, membership, caplog):
    """The page is served from what the loop hands over."""
    caplog.set_level(logging.INFO)
    page = FleetPage(config, membership, Sent())
    page.start()
    try:
        kept_up(page, membership)
        with urllib.request.urlopen(f"http://127.0.0.1:{page.server.port}/") as answer:
            assert b'"title":"demo"' in answer.read()
    finally:
        page.close()
    assert any(r.message == "fleet page" for r in caplog.records)
    assert not any(t.name == "fleet-page" for t in threading.enumerate())


def test_loop_hands_over_once_in_a_second(config, membership):
    page = FleetPage(config, membership, Sent())
    calls = []

    def given():
        calls.append(1)
        return facts(membership.roster.active(), 1)

    for tenth in range(25):
        page.keep_up(given, lambda: None, tenth / 10)
    page.close()
    assert len(calls) == 3


def test_without_an_address_nothing_is_done(config, membership):
    page = FleetPage(dataclasses.replace(config, http=""), membership, Sent())
    page.start()
    page.keep_up(lambda: pytest.fail("nobody asks"), lambda: None, 0.0)
    page.close()
    assert page.server is None


def test_sensors_are_published_in_a_thread(config, membership, monkeypatch, caplog):
    """Sensors are published in a thread and a full queue is logged once."""
    monkeypatch.setattr(server, "UPDATE_S", 0.01)
    monkeypatch.setattr(feed_module, "UPDATE_S", 0.0)
    transport = Sent(full=True)
    page = FleetPage(dataclasses.replace(config, http="", home_assistant="homeassistant"), membership, transport)
    kept_up(page, membership)
    page.start()
    try:
        until(lambda: caplog.records)
        transport.full = False
        until(lambda: "homeassistant/shoal_demo/state" in transport.topics)
    finally:
        page.close()
    assert [r.message for r in caplog.records] == ["Home Assistant's sensors can't be published"]


def test_missing_client_says_what_to_install(config, membership, monkeypatch):
    """Without prometheus client the error says what to install."""
    monkeypatch.delitem(sys.modules, "aggregator.page.metrics", raising=False)
    monkeypatch.setitem(sys.modules, "prometheus_client", None)
    with pytest.raises(ConfigError, match="needs prometheus-client") as caught:
        FleetPage(config, membership, Sent())
    assert "shoal[aggregator]" in caught.value.hint


def test_open_address_is_warned_of(config, membership, tmp_path, caplog):
    """An address open to others needs a token and is warned of."""
    with pytest.raises(ConfigError, match="needs a token"):
        FleetPage(dataclasses.replace(config, http="0.0.0.0:0"), membership, Sent())
    token = tmp_path / "token"
    token.touch(0o600)
    token.write_text("0123456789abcdef")
    FleetPage(dataclasses.replace(config, http="0.0.0.0:0", http_token=token), membership, Sent()).close()
    (warning,) = caplog.records
    assert warning.message == "the fleet page is open to other machines, without TLS"
    assert "0123456789abcdef" not in str(warning.__dict__)
