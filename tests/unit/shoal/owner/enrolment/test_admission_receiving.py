"""Receiving keys at the broker: the owner seals to the newest that a rostered device has signed, and never to older ones."""

import dataclasses

import pytest

from crypto.seal.identity import Identity, sign_document
from edge_client.protocol.presence import receiving_notice
from shoal import limits
from shoal.errors import UntrustedError
from shoal.membership.grants import ErasedKeyError, peek_grant
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol.chunking import ChunkKind, split
from shoal.protocol.documents import ReceivingNotice
from tests.helpers.enrolments import TOPICS
from tests.helpers.receiving import RECEIVING


@pytest.fixture
def device(scene):
    return scene.enrol("dev-1")


def offer(scene, device):
    """Leave the device's notice at the broker, as it does when it connects."""
    topic, payload = receiving_notice(device)
    scene.leave(topic, payload)
    return payload


def forge(scene, notice, signer, name="dev-1"):
    (chunk,) = split(sign_document(signer, notice), kind=ChunkKind.RECEIVING, round=0)
    scene.leave(TOPICS.receiving(name), chunk)


def delivered(scene, name="dev-1"):
    """Let the owner publish keys; return what the broker then retains for a device."""
    scene.sit().publish_keys()
    scene.broker.pump()
    return scene.broker.retained[TOPICS.keys(name)][52:]


def number(scene):
    return peek_grant(delivered(scene)).receiving


def test_sealed_to_the_newest_keys(scene, device):
    """A delivery is sealed to the newest keys and they are remembered."""
    assert device.receiving.first == 2
    assert number(scene) == 1, "the owner knows the card alone"
    offer(scene, device)
    assert number(scene) == 2
    scene.leave(TOPICS.receiving("dev-1"), b"")
    assert number(scene) == 2
    assert FleetDirectory(scene.owner.path).receiving.of("dev-1").receiving == device.receiving.public


def test_each_delivery_has_its_own_key(scene, device):
    """Each delivery is sealed to another key."""
    for _ in range(12):
        offer(scene, device)
        scene.owner.rotate()
        first = device.receiving.first
        assert device.take_grant(delivered(scene))
        assert device.receiving.first > first
    assert scene.complaints == []


def test_repeated_notice_locks_nobody_out(scene, device):
    """An old notice that the broker repeats locks nobody out."""
    old = offer(scene, device)
    for _ in range(2):
        scene.owner.rotate()
        assert device.take_grant(delivered(scene))
        offer(scene, device)
    scene.sit().publish_keys()
    scene.leave(TOPICS.receiving("dev-1"), old)
    scene.owner.rotate()
    assert device.take_grant(delivered(scene))
    assert "receiving keys of dev-1 from number 2 on, and it has published those from 4 on" in scene.complaints[-1]


def test_withheld_notice_is_made_good(scene, device):
    """A notice that is withheld is made good by the next publication."""
    offer(scene, device)
    for _ in range(limits.RECEIVING_KEYS):
        scene.owner.rotate()
        assert device.take_grant(delivered(scene))
    scene.owner.rotate()
    with pytest.raises(ErasedKeyError) as caught:
        device.take_grant(delivered(scene))
    assert "shoal-fleet publish" in caught.value.hint
    assert "dev-1 has published no receiving keys for a long time" in scene.complaints[-1]
    offer(scene, device)
    assert device.take_grant(delivered(scene))


def test_forged_notices_are_refused(scene, device):
    notice = ReceivingNotice("reef", "dev-1", dataclasses.replace(RECEIVING.public, first=100))
    other = scene.enrol("dev-2")
    for client in [c for c in scene.broker.connected() if c.startswith("owner-")]:
        scene.broker.disconnect(client)
    for false, signer in (
        (notice, Identity.generate("dev-1")),
        (notice, other.identity),
        (dataclasses.replace(notice, fleet="rock"), device.identity),
        (dataclasses.replace(notice, device="dev-2"), device.identity),
    ):
        forge(scene, false, signer)
        with pytest.raises(UntrustedError):
            scene.sit()
        scene.broker.disconnect(f"owner-{scene._sittings}")
    scene.leave(TOPICS.receiving("dev-1"), b"")
    assert number(scene) == 1


def test_notices_of_others_are_ignored(scene, device):
    """A name that is not in the roster, and a revoked device."""
    notice = ReceivingNotice("reef", "dev-9", RECEIVING.public)
    forge(scene, notice, Identity.generate("dev-9"), "dev-9")
    scene.enrol("dev-2")
    scene.owner.revoke("dev-1")
    offer(scene, device)
    scene.sit().publish_keys()
    assert scene.complaints == []
    assert set(FleetDirectory(scene.owner.path).receiving.devices) == {"dev-1", "dev-2"}


def test_a_request_brings_the_first_keys(scene, device):
    known = scene.owner.receiving.of("dev-1")
    assert (known.receiving.first, known.number) == (1, 1)
    assert device.grant.receiving == 1
