"""What the daemon records of its broker and its devices, and from which messages."""

import pytest

from aggregator.status.facts import DeviceStatus
from aggregator.status.watch import SETTLED_S, ConnectionWatch, DeviceWatch, FleetWatch
from shoal.protocol.messages import DeclineReason, Presence
from shoal.transport.base import Connected, Disconnected, Message, Unreached
from shoal.version import WIRE


class Clock:
    def __init__(self):
        self.now_s = 5000.5

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def devices(clock):
    return DeviceWatch(clock)


def says(online, sent_at_s=5000, version="0.1.0"):
    return Presence("reef", "dev-1", 7, online, version, sent_at_s)


def come(devices, presence, *, retained=False, settled=True):
    devices.came(presence, retained=retained, settled=settled)
    return devices.devices["dev-1"]


def test_a_device_comes_and_goes(devices, clock):
    here = come(devices, says(True))
    assert here == DeviceStatus(
        name="dev-1",
        online=True,
        since_s=5000,
        last_seen_s=5000,
        version="0.1.0",
        clock_ahead_s=0,
        model_run=0,
        wire=WIRE,
    )
    clock.now_s = 5004
    assert come(devices, says(True)).since_s == 5000, "said twice after each connection"
    clock.now_s = 5100
    gone = come(devices, says(False))
    assert (gone.online, gone.since_s, gone.last_seen_s) == (False, 5100, 5004), "a will is the broker's word"


def test_guess_is_said_until_it_is_none(devices):
    """A device says that its model is a guess until it says no more."""
    assert come(devices, Presence("reef", "dev-1", 7, True, doubted=True)).doubted
    assert come(devices, says(False)).doubted, "a will is the broker's word"
    assert not come(devices, says(True)).doubted


def test_retained_presence_has_no_time(devices):
    """A retained presence is true and says nothing of the time."""
    here = come(devices, says(True, sent_at_s=4000), retained=True)
    assert here == DeviceStatus(name="dev-1", online=True, version="0.1.0", model_run=0, wire=WIRE)


@pytest.mark.parametrize(
    ("sent_at_s", "settled", "ahead_s"),
    [(5700, True, 700), (5700, False, 700), (4300, True, -700), (4300, False, None), (0, True, None)],
    ids=["ahead", "ahead, though it may be late", "behind", "perhaps late", "of an earlier version"],
)
def test_clock_is_compared_when_fresh(devices, sent_at_s, settled, ahead_s):
    """A clock is compared where the message is fresh."""
    assert come(devices, says(True, sent_at_s), settled=settled).clock_ahead_s == ahead_s


@pytest.mark.parametrize("version", ["\x1b[2J", "1" * 33, "1.0\n", ""])
def test_missing_version_is_not_recorded(devices, version):
    """A version that is none is not recorded."""
    assert come(devices, says(True, version=version)).version == ""


def test_replaced_keys_mean_absence(devices, clock):
    """A presence under replaced keys is an absence."""
    come(devices, says(True))
    clock.now_s = 5050
    devices.went("dev-1")
    devices.went("dev-1")
    assert (devices.devices["dev-1"].online, devices.devices["dev-1"].since_s) == (False, 5050)


@pytest.mark.parametrize("ends", ["an upload", "a new start"])
def test_decline_stands_until_an_upload(devices, clock, ends):
    """A decline stands until the device uploads or starts again."""
    come(devices, says(True))
    devices.declined("dev-1", DeclineReason.DISK)
    assert come(devices, says(True)).declined == "disk"
    assert come(devices, says(False)).declined == "disk"
    clock.now_s = 6000
    if ends == "an upload":
        devices.uploaded("dev-1")
        assert devices.devices["dev-1"].last_upload_s == 6000
    else:
        come(devices, says(True))
    assert (devices.devices["dev-1"].declined, devices.devices["dev-1"].last_seen_s) == ("", 6000)


def test_only_times_of_an_earlier_life():
    """Of an earlier daemon only the times are true."""
    before = DeviceStatus(
        name="dev-1", online=True, since_s=1, last_seen_s=2, last_upload_s=3, version="0.1.0", declined="data"
    )
    known = DeviceWatch(known={"dev-1": before}).devices
    assert known == {"dev-1": DeviceStatus(name="dev-1", last_seen_s=2, last_upload_s=3, version="0.1.0")}


def test_connection_begins_and_ends(clock):
    """A connection begins ends and comes back."""
    watch = ConnectionWatch("mqtt://reef:1883", clock)
    assert (watch.facts.connected, watch.facts.reason, watch.settled) == (False, "", False)
    watch.on_event(Connected(session_present=False))
    assert (watch.facts.connected, watch.facts.lost_s, watch.settled) == (True, None, False)
    clock.now_s += SETTLED_S + 1
    assert watch.settled
    watch.on_event(Message("t", b"x"))
    watch.sends(4096)
    watch.on_event(Disconnected(""))
    assert watch.facts.chunk_bytes == 4096
    lost_s = int(clock.now_s)
    assert (watch.facts.connected, watch.facts.since_s, watch.facts.lost_s) == (False, lost_s, lost_s)
    assert watch.facts.reason == "the connection ended"
    clock.now_s += 30
    watch.on_event(Disconnected("again"))
    assert watch.facts.since_s == lost_s, "failed attempts prolong it"
    watch.on_event(Connected(session_present=True))
    assert (watch.facts.connected, watch.facts.since_s, watch.facts.lost_s) == (True, lost_s + 30, lost_s)
    assert watch.facts.reason == ""


def test_attempts_and_certificates(clock):
    """The newest attempt's reason; the CA's end is known before any connection, the broker's with each."""
    watch = ConnectionWatch("mqtts://reef:8883", clock)
    watch.expires({"ca": 9000})
    watch.on_event(Unreached("the broker's certificate is not valid yet"))
    assert (watch.facts.connected, watch.facts.reason) == (False, "the broker's certificate is not valid yet")
    watch.on_event(Connected(session_present=False, expires_at_s=8000))
    assert (watch.facts.reason, watch.facts.expires) == ("", {"ca": 9000, "broker": 8000})


def test_early_presences_may_be_late(clock):
    """Right after a connection presences may be late."""
    watch = FleetWatch("mqtt://reef:1883", clock)
    watch.connection.on_event(Connected(session_present=True))
    watch.came(says(True, 4000), retained=False)
    assert watch.devices.devices["dev-1"].clock_ahead_s is None
    clock.now_s += SETTLED_S + 1
    watch.came(says(True, 4000), retained=False)
    assert watch.devices.devices["dev-1"].clock_ahead_s == -1011
