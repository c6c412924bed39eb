"""Hostile messages of every kind on every channel: each cell is refused or does nothing, and the run ends with the same bits.

Messages to the aggregator (upload, decline, reminder, presence, the owner's letter and request) and to devices (announcement,
mean, checkpoint, notice, run, roster and its change, control, keys), each of them forged, truncated, oversized, replayed,
reordered, for another fleet, self-signed, and under another mode.
Messages to the owner: tests/unit/shoal/owner/enrolment/test_admission.py. Finer variants: test_hostile_uploads.py,
test_rogue_aggregator.py, test_revocation.py.
"""

import pytest

from crypto.seal.identity import Identity
from shoal import limits
from shoal.protocol.messages import Action, DeclineReason
from tests.helpers.fleets import answers, reasons, thetas
from tests.helpers.floods import claim
from tests.scenarios.hostile.channels import CHANNELS, VICTIM, Scene, opened


def true_one(scene, channel):
    """Return a true message; for keys one that is new, since nothing is read of one that is stored already."""
    return CHANNELS[channel].seal(scene, None, "demo", False) if channel == "keys" else scene.true(channel)[-1]


def forged(scene, channel):
    """One bit of the true message is another."""
    payload = bytearray(true_one(scene, channel))
    payload[len(payload) // 2] ^= 1
    scene.publish(channel, bytes(payload))


def truncated(scene, channel):
    """The true message without its end."""
    scene.publish(channel, true_one(scene, channel)[:-9])


def oversized(scene, channel):
    """One chunk that announces a byte more than any transfer may have."""
    scene.deliver(channel, [claim(CHANNELS[channel].kind, limits.MAX_TRANSFER_BYTES + 1, 0, round_=2)])


def replayed(scene, channel):
    """The oldest true message again."""
    scene.publish(channel, scene.true(channel)[0])


def reordered(scene, channel):
    """Every true message again, the newest first."""
    for payload in reversed(scene.true(channel)):
        scene.publish(channel, payload)


def wrong_fleet(scene, channel):
    """By the right sender, for another fleet."""
    scene.publish(channel, CHANNELS[channel].seal(scene, None, "other", False))


def self_signed(scene, channel):
    """Sign with new keys under the sender's name."""
    names = dict.fromkeys(("upload", "decline", "reminder", "presence"), VICTIM) | dict.fromkeys(
        ("letter", "request", "keys"), "owner"
    )
    stranger = Identity.generate(names.get(channel, "aggregator"))
    scene.publish(channel, CHANNELS[channel].seal(scene, stranger, "demo", False))


def downgraded(scene, channel):
    """As if the run had no mask, by the true device or the true aggregator."""
    scene.publish(channel, CHANNELS[channel].seal(scene, None, "demo", True))


KINDS = {
    "forged": forged,
    "truncated": truncated,
    "oversized": oversized,
    "replayed": replayed,
    "wrong fleet": wrong_fleet,
    "self-signed": self_signed,
    "downgraded mode": downgraded,
    "reordered": reordered,
}
NOT_ITS_SENDERS = "is not its sender's"
TOO_LARGE = "1073741825 bytes is not between"
NOT_THE_AGGREGATOR = {"roster": "who is not this fleet's aggregator", "change": "who is not this fleet's aggregator"}
ELSEWHERE = "in 'other'"
GOES_BACK = "a roster of sequence 6 after 7: refused as a rollback"
NOTHING_SAID = ""
"""What is known already, or is older than what is known and harmless, is passed over without a word."""

EXPECTED = {
    "forged": dict.fromkeys(CHANNELS, NOT_ITS_SENDERS) | NOT_THE_AGGREGATOR,
    "truncated": dict.fromkeys(CHANNELS, NOT_ITS_SENDERS) | NOT_THE_AGGREGATOR | {"keys": "message ends early"},
    "oversized": dict.fromkeys(CHANNELS, TOO_LARGE),
    "replayed": dict.fromkeys(CHANNELS, NOTHING_SAID)
    | {"letter": GOES_BACK, "announcement": "an announcement under roster", "roster": "refused as a rollback"},
    "wrong fleet": dict.fromkeys(CHANNELS, ELSEWHERE)
    | {
        "upload": "of 'other' on",
        "decline": "of 'other' on",
        "reminder": "of 'other' on",
        "presence": "a presence of 'dev-02' of 'other'",
        "letter": "where the owner's roster belongs",
        "request": "where the owner's request belongs",
        "keys": "keys of fleet 'other'",
    },
    "self-signed": dict.fromkeys(CHANNELS, NOT_ITS_SENDERS) | {"keys": "who is not this fleet's"},
    "downgraded mode": {
        "upload": "masked under another key or mode",
        "mean": NOTHING_SAID,
        "run": "the signature on this document/RunPlan is not its sender's",
    },
    "reordered": dict.fromkeys(CHANNELS, NOTHING_SAID)
    | {"letter": GOES_BACK, "announcement": "an announcement under roster", "roster": "refused as a rollback"},
}
NO_MODE = {
    "announcement",
    "checkpoint",
    "decline",
    "notice",
    "reminder",
    "presence",
    "letter",
    "request",
    "roster",
    "change",
    "control",
    "keys",
}
"""Nothing in these depends on the mode."""

ITS_OWN = {("downgraded mode", "upload"), *(("wrong fleet", channel) for channel in ("upload", "decline", "reminder"))}


def test_every_cell_is_filled():
    assert set(EXPECTED) == set(KINDS)
    for kind, row in EXPECTED.items():
        assert set(row) == set(CHANNELS) - (NO_MODE if kind == "downgraded mode" else set())


@pytest.mark.parametrize("channel", CHANNELS)
def test_nothing_hostile_is_believed(tmp_path, caplog, undisturbed, channel):
    """One kind after the other: refused for its own reason by all who hear it, and neither side stands elsewhere than before.

    In the end the run has all contributions, and every device the bits that it would have had.
    """
    scene = Scene(tmp_path / "fleet")
    with scene.fleet:
        for kind, row in EXPECTED.items():
            if channel not in row:
                continue
            before = scene.standing()
            caplog.clear()
            for party in (scene.fleet.service, *(d.runtime for d in scene.fleet.devices.values())):
                party._refusals._known.clear()  # or a reason that another kind has used is logged later
            # Otherwise a reminder so soon after the last one is dropped unopened.
            scene.fleet.service.uploads.answers._reminded_s.clear()
            KINDS[kind](scene, channel)
            found = reasons(caplog)
            if row[channel]:
                assert any(row[channel] in reason for reason in found), (kind, found)
            else:
                assert found == [], kind
            if (kind, channel) in ITS_OWN:  # the device has signed it itself: it is not waited for
                assert scene.service.state.declined == {VICTIM: DeclineReason.UPLOAD}
            elif (kind, channel) != ("reordered", "upload"):  # among those is the one that is waited for
                assert scene.standing() == before, kind
        scene.tap.forgive(scene.rule)
        assert [r["contributed"] for r in scene.fleet.run(60)] == [3, 3, 3, 3]
        assert thetas(scene.fleet) == undisturbed


@pytest.mark.parametrize("channel", CHANNELS)
def test_what_is_true_on_channel_is_believed(tmp_path, caplog, channel):
    """The control: the same message by its rightful sender, for this fleet and in its mode, has an effect."""
    scene = Scene(tmp_path / "fleet")
    with scene.fleet:
        later = scene.fleet.now_s + 1  # the victim has reminded us a moment ago
        scene.fleet.run_until(lambda: scene.fleet.now_s > later, 5)
        before = scene.standing()
        if channel in ("roster", "change"):  # the aggregator forwards signed documents of the owner
            payload = CHANNELS[channel].seal(scene, scene.owner.owner, "demo", False)
        else:
            payload = CHANNELS[channel].seal(scene, None, "demo", False)
        scene.publish(channel, payload)
        if channel in ("mean", "checkpoint"):  # read when an announcement names it
            label = CHANNELS[channel].topic(scene).rpartition("/")[2]
            assert scene.runtime._models._early[label][1] == bytes(opened(scene, payload))
            return
        if channel == "reminder":
            last = answers(scene.fleet, scene.tap, VICTIM)[-1]
            assert (last.action, last.transfer) == (Action.NACK, scene.runtime.session.round.transfer)
            return
        assert scene.standing() != before, reasons(caplog)
