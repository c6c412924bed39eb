"""Counts of the fleet as sensors of Home Assistant, by its MQTT discovery, over the fleet's broker.

Below the prefix stand one retained configuration for each sensor, and one topic with the values:

    PREFIX/sensor/shoal_FLEET/NAME/config    what the sensor is; Home Assistant adds it by itself
    PREFIX/shoal_FLEET/state                 the values as JSON, when they change and every REPEAT_S

The values are counts; no message names a device. They are not sealed: the broker sees them, and all that may read below the
prefix. Home Assistant shows a sensor as unavailable if no values come for EXPIRE_S.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from aggregator.status.record import REVOKED
from shoal.errors import ConfigError
from shoal.version import VERSION

if TYPE_CHECKING:
    from aggregator.page.feed import Snapshot
    from shoal.transport.base import Transport

REPEAT_S: Final = 60.0
EXPIRE_S: Final = 200
PREFIX_FORM: Final = re.compile(r"[A-Za-z0-9_-]{1,64}(/[A-Za-z0-9_-]{1,64}){0,3}")


@dataclass(frozen=True, slots=True)
class Sensor:
    """One sensor.

    Attributes:
        name: its key in the values.
        title: its name for people.
        icon: of Material Design Icons.
        unit: of the value; empty without one.
    """

    name: str
    title: str
    icon: str
    unit: str = ""


SENSORS: Final = (
    Sensor("devices", "Devices", "mdi:devices", "devices"),
    Sensor("devices_online", "Devices online", "mdi:lan-connect", "devices"),
    Sensor("devices_impaired", "Devices that can't take part", "mdi:lan-disconnect", "devices"),
    Sensor("problems", "Problems", "mdi:alert", "problems"),
    Sensor("run", "Run", "mdi:counter"),
    Sensor("phase", "Phase", "mdi:state-machine"),
    Sensor("rounds_closed", "Rounds closed", "mdi:rotate-right", "rounds"),
    Sensor("rounds", "Rounds of the plan", "mdi:rotate-right", "rounds"),
    Sensor("clusters", "Clusters", "mdi:graph", "clusters"),
    Sensor("accuracy", "Accuracy", "mdi:target", "%"),
)


def check_prefix(prefix: str) -> None:
    """Check Home Assistant's discovery prefix.

    Raises:
        ConfigError: it is no plain topic.
    """
    if not PREFIX_FORM.fullmatch(prefix):
        raise ConfigError(f"home_assistant {prefix!r} is no topic prefix", hint="Home Assistant's is homeassistant")


def sensor_topics(fleet: str, prefix: str) -> tuple[str, str]:
    """Return the filters of all topics that the aggregator of a fleet publishes for Home Assistant."""
    return f"{prefix}/sensor/shoal_{fleet}/#", f"{prefix}/shoal_{fleet}/state"


class HomeAssistant:
    """Publishes the sensors and their values.

    Args:
        transport: the aggregator's connection to the broker.
        fleet: the fleet's name.
        prefix: Home Assistant's discovery prefix, ``homeassistant`` unless configured otherwise.

    Raises:
        ConfigError: the prefix is no plain topic.
    """

    def __init__(self, transport: Transport, fleet: str, prefix: str) -> None:
        check_prefix(prefix)
        self._transport, self._prefix = transport, prefix
        self._fleet, self._node = fleet, f"shoal_{fleet}"
        self._announced_since_s: int | None = None
        self._sent: dict[str, Any] = {}
        self._sent_s = 0.0

    def publish(self, snapshot: Snapshot, now_s: float) -> None:
        """Publish the values if they have changed, or REPEAT_S have passed; first the sensors, once for each connection.

        Args:
            snapshot: the state of the fleet.
            now_s: monotonic seconds.

        Raises:
            WireError: the connection's queue is full.
        """
        if snapshot.status.since_s != self._announced_since_s:  # a broker may forget what it retains
            for topic, document in self.configurations():
                self._transport.publish(topic, json.dumps(document).encode(), retain=True)
            self._announced_since_s = snapshot.status.since_s
        values = values_of(snapshot)
        if values != self._sent or now_s - self._sent_s >= REPEAT_S:
            self._transport.publish(self._state_topic, json.dumps(values).encode(), qos=0)
            self._sent, self._sent_s = values, now_s

    @property
    def _state_topic(self) -> str:
        return f"{self._prefix}/{self._node}/state"

    def configurations(self) -> Iterator[tuple[str, dict[str, Any]]]:
        """Yield topic and document of each sensor's discovery message."""
        device = {
            "identifiers": [self._node],
            "name": f"Shoal fleet {self._fleet}",
            "sw_version": VERSION,
            "model": "Shoal",
        }
        for sensor in SENSORS:
            document = {
                "name": sensor.title,
                "unique_id": f"{self._node}_{sensor.name}",
                "state_topic": self._state_topic,
                "value_template": f"{{{{ value_json.{sensor.name} }}}}",
                "icon": sensor.icon,
                "expire_after": EXPIRE_S,
                "device": device,
                **({"unit_of_measurement": sensor.unit} if sensor.unit else {}),
            }
            yield f"{self._prefix}/sensor/{self._node}/{sensor.name}/config", document


def values_of(snapshot: Snapshot) -> dict[str, Any]:
    """Return the value of each sensor; null while it is unknown."""
    status, run = snapshot.status, snapshot.status.run
    members = [d for d in status.devices if d.reason != REVOKED]
    accuracy = (
        next((a for a in reversed(snapshot.runs[0]["points"]["accuracy"]) if a is not None), None)
        if snapshot.runs
        else None
    )
    return {
        "devices": len(members),
        "devices_online": sum(bool(d.online) for d in members) if status.connected else None,
        "devices_impaired": sum(bool(d.reason) for d in members),
        "problems": len(status.problems),
        "run": None if run is None else run.run,
        "phase": None if run is None else run.phase,
        "rounds_closed": None if snapshot.totals is None else snapshot.totals.rounds,
        "rounds": None if run is None else run.rounds,
        "clusters": len(snapshot.clusters),
        "accuracy": None if accuracy is None else round(100 * accuracy, 1),
    }
