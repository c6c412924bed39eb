"""A thief with a device's whole directory, and a record of all that the broker carried, opens no earlier delivery of secrets."""

import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from shoal_lab.loopback.fleet import BROKER_URL

from crypto.seal.envelope import SealError, open_from_member, read_head
from crypto.seal.identity import Identity
from crypto.seal.receiving import ReceivingSecrets
from shoal import limits
from shoal.membership import grants
from shoal.membership.directory import KEY_FILE, RECEIVING_FILE
from shoal.protocol.chunking import ChunkKind, parse
from shoal.protocol.codec import decode
from shoal.protocol.documents import DeviceGrant, GrantFile
from shoal.simulation.process_fleet import Stage
from tests.helpers.fleets import Wiretap, make_fleet, names, whole

VICTIM = "dev-01"


def keys_in(directory):
    """Return every private X25519 key that a thief finds in a device's directory."""
    found = [Identity.load(directory / KEY_FILE).seal_private]
    found += ReceivingSecrets.load(directory / RECEIVING_FILE).privates
    # Any 32 bytes of a small file might be a key that is left over.
    for path in directory.iterdir():
        data = path.read_bytes() if path.is_file() and path.stat().st_size <= 512 else b""
        found += [X25519PrivateKey.from_private_bytes(data[at : at + 32]) for at in range(len(data) - 31)]
    return found


def recorded(fleet, tap):
    """Return every grant for the victim that was carried by hand or by the broker."""
    files = [(fleet.stage.fleet.path / "grants" / f"{VICTIM}.grant").read_bytes()]
    sent = [p.payload for p in tap.sent(ending=f"/s/keys/{VICTIM}") if p.payload]
    return files + whole([p for p in sent if parse(p)[0].kind is ChunkKind.GRANT])


def opened(fleet, deliveries, private):
    """Return the grants in the deliveries that one private key opens."""
    identity = Identity.load(fleet.stage.device_dir(VICTIM) / KEY_FILE)
    found = []
    for data in deliveries:
        file = decode(data, GrantFile)
        head, at = read_head(file.sealed)
        try:
            plain, _ = open_from_member(identity, file.sealed, head, at, file.owner.sign_key, private=private)
        except SealError:
            continue
        found.append(decode(plain, DeviceGrant))
    return found


def under_the_seal_key(monkeypatch):
    """Let owner and devices use the devices' static seal key for deliveries, as before there were receiving keys."""
    real = grants.open_from_member
    monkeypatch.setattr(grants, "sealing_key", lambda card, _label: card.member.seal_key)
    monkeypatch.setattr(grants, "open_from_member", lambda *args, **_receiving: real(*args))


@pytest.mark.parametrize("sealing", ["receiving keys", "seal key"])
def test_thief_opens_no_stored_delivery(tmp_path, monkeypatch, sealing):
    """With the static seal key the same thief opens all of them, so the attack can succeed."""
    if sealing == "seal key":
        under_the_seal_key(monkeypatch)
    tap, stage = Wiretap(), Stage(tmp_path / "fleet", BROKER_URL, names(3))
    with make_fleet(tmp_path / "fleet", faults=tap, stage=stage, rounds=60) as fleet:
        owner = fleet.stage.fleet
        deliveries, secrets = recorded(fleet, tap), [owner.secrets]
        for rounds in (1, 3):
            fleet.run_until(lambda n=rounds: fleet.closed() >= n, 20)
            owner.rotate()
            fleet.publish()
            secrets.append(owner.secrets)
            fleet.run_until(lambda: fleet.service.state.held.key_version == owner.roster.keys_since, 60)
        deliveries += recorded(fleet, tap)
        directory = fleet.stage.device_dir(VICTIM)
        stored = b"".join(p.read_bytes() for p in directory.iterdir() if p.is_file())
        assert secrets[2].broadcast_key in stored
        old = {secret for s in secrets[:2] for secret in (s.broadcast_key, s.version_secret)}
        assert not any(secret in stored for secret in old), "the device has erased the secrets themselves"
        stolen = {grant.version_secret for key in keys_in(directory) for grant in opened(fleet, deliveries, key)}
        assert len(deliveries) >= 4
        assert stolen == (set() if sealing == "receiving keys" else {s.version_secret for s in secrets})


def test_off_during_two_changes_opens_both(tmp_path):
    """The broker has queued two deliveries for it, and the first one's key is erased before the second is opened."""
    with make_fleet(tmp_path / "fleet", count=5, rounds=400, quorum=0.5) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 1, 10)
        fleet.kill_device(VICTIM)
        owner = fleet.stage.fleet
        for name in ("dev-03", "dev-04"):
            owner.revoke(name)
            fleet.publish()
            fleet.run_until(lambda: fleet.service.state.held.key_version == owner.roster.keys_since, 60)
        fleet.revive_device(VICTIM)
        membership = fleet.devices[VICTIM].runtime._membership
        fleet.run_until(lambda: membership.grant.broadcast_key == owner.secrets.broadcast_key, 60)
        assert membership.receiving.first == 4


def test_keys_are_published_on_connecting(tmp_path):
    """A broker that has lost the notice gets it back."""
    with make_fleet(tmp_path / "fleet", count=3, rounds=20) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 1, 10)
        topic = f"shoal/v1/demo/d/{VICTIM}/receiving"
        first = fleet.broker.retained.pop(topic)
        fleet.broker.disconnect(fleet.client_id(VICTIM))
        fleet.broker.reconnect(fleet.client_id(VICTIM))
        fleet.settle()
        assert fleet.broker.retained[topic] == first


def test_erased_key_is_reported_and_replaced(tmp_path, caplog, tap):
    """All notices of the device are lost, until its keys don't last; then it connects again, and the owner publishes again."""
    with make_fleet(tmp_path / "fleet", faults=tap, count=3, rounds=4000, quorum=0.5) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 1, 10)
        rule = tap.lose(client=fleet.client_id(VICTIM), ending="/receiving")
        owner, membership = fleet.stage.fleet, fleet.devices[VICTIM].runtime._membership
        for _ in range(limits.RECEIVING_KEYS):
            owner.rotate()
            fleet.publish()
            assert membership.newest_generation == owner.roster.keys_since
        owner.rotate()
        fleet.publish()
        assert membership.newest_generation < owner.roster.keys_since
        (refusal,) = [
            r.kv for r in caplog.records if "sealed to receiving key" in str(getattr(r, "kv", {}).get("reason"))
        ]
        assert refusal["reason"].startswith(
            f"a grant sealed to receiving key {limits.RECEIVING_KEYS + 1} of 'dev-01', which is erased"
        )
        assert "`shoal-fleet publish`" in refusal["hint"]
        tap.forgive(rule)
        fleet.broker.disconnect(fleet.client_id(VICTIM))
        fleet.broker.reconnect(fleet.client_id(VICTIM))
        fleet.settle()
        fleet.publish()
        assert membership.newest_generation == owner.roster.keys_since
