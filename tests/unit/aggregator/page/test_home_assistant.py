"""Home Assistant's sensors: discovery, values, and how often they are published."""

import json

import pytest

from aggregator.page.home_assistant import REPEAT_S, SENSORS, HomeAssistant
from shoal.errors import ConfigError


class Sent:
    """Takes the place of a connection."""

    def __init__(self):
        self.messages = []

    def publish(self, topic, payload, *, retain=False, qos=1):
        assert qos == int(retain)
        self.messages.append((topic, json.loads(payload), retain))


def test_sensors_are_announced_once(place):
    """Sensors are announced once and retained."""
    place.publish(closed=2, changes={"dev-001": {"online": False}})
    sent = Sent()
    HomeAssistant(sent, "reef", "homeassistant").publish(place.feed.current(), 0.0)
    *configurations, (topic, values, retained) = sent.messages
    assert len(configurations) == len(SENSORS)
    assert all(kept for _, _, kept in configurations)
    first_topic, first, _ = configurations[0]
    assert first_topic == "homeassistant/sensor/shoal_reef/devices/config"
    assert first["state_topic"] == topic == "homeassistant/shoal_reef/state"
    assert first["value_template"] == "{{ value_json.devices }}"
    assert len({document["unique_id"] for _, document, _ in configurations}) == len(SENSORS)
    assert (retained, values["devices_online"], values["devices_impaired"]) == (False, 3, 1)
    assert (values["rounds_closed"], values["clusters"], values["phase"]) == (2, 1, "round")
    assert set(values) == {sensor.name for sensor in SENSORS}


def test_changed_values_are_repeated(place):
    """Values are repeated when they change and now and then."""
    place.publish()
    sent = Sent()
    sensors = HomeAssistant(sent, "reef", "ha")
    for at_s in (0.0, 1.0, 2.0):
        sensors.publish(place.feed.current(), at_s)
    assert len(sent.messages) == len(SENSORS) + 1
    place.publish(closed=1)
    sensors.publish(place.feed.current(), 3.0)
    assert len(sent.messages) == len(SENSORS) + 2
    sensors.publish(place.feed.current(), 3.0 + REPEAT_S)
    assert len(sent.messages) == len(SENSORS) + 3


def test_number_online_is_unknown(place):
    """Without the broker the number online is unknown."""
    place.publish(connected=False)
    sent = Sent()
    HomeAssistant(sent, "reef", "ha").publish(place.feed.current(), 0.0)
    assert sent.messages[-1][1]["devices_online"] is None
    assert not any(device in str(sent.messages) for device in place.devices), "no message names a device"


@pytest.mark.parametrize("prefix", ["", "#", "a/#", "a//b", "/a", "a/", "a+b", "$SYS", "ü", "a" * 65])
def test_unfit_prefix_is_refused(prefix):
    """A prefix that is no plain topic is refused."""
    with pytest.raises(ConfigError, match="no topic prefix"):
        HomeAssistant(Sent(), "reef", prefix)
