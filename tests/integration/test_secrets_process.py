"""After a full run with real programs on a guarded mosquitto, only its holders have a secret, and other processes can't read it.

The aggregator's directory and memory, every log, command line and environment, and the broker's own files are searched for
the bytes of keys, origins and models, raw and as text would spell them.
"""

from __future__ import annotations

import base64
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from aggregator.storage.store import read_records
from crypto.mask.derivation import derive
from crypto.mask.kdf import SECRET_BYTES, expand
from crypto.mask.modes import registry
from crypto.seal.identity import Identity
from crypto.seal.passphrase import Lock
from crypto.seal.receiving import ReceivingSecrets
from edge_client import membership as enrolment
from edge_client.membership import DeviceMembership
from edge_client.storage.state import DeviceState
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.runs.plan import run_chain
from shoal.protocol.enrolment import Token
from shoal.protocol.recipe import LocalTraining, Recipe
from shoal.transport.local_broker import find_mosquitto, free_port
from tests.helpers.places import Place, start_generated
from tests.helpers.processes import command_line, core_limits, found_in_files, found_in_memory, inspectable
from tests.helpers.tasks import logistic_bundle, samples

pytestmark = [pytest.mark.broker, pytest.mark.process, pytest.mark.timeout(300)]
PASSPHRASE = b"correct horse battery staple"
INPUTS, CLASSES = 9, 4
DEVICES = ("dev-1", "dev-2", "dev-3")
ROUNDS = 4
STATES_HELD = 3
"""Training rounds; round 0 seals the run package, and a final round follows."""
WINDOW = 32
"""Bytes: eight coordinates in a row are no accident."""


class Aftermath:
    """A fleet whose run is over and whose programs are still there."""

    def __init__(self, home):
        self.home = home
        self.place = Place(home, SHOAL_PASSPHRASE_FILE=str(home / "passphrase"))
        (home / "passphrase").write_bytes(PASSPHRASE)
        (home / "passphrase").chmod(0o600)
        self.port = free_port()
        self.broker = None
        self.lines = []

    def owner(self):
        return FleetDirectory(self.home / "owner", Lock(PASSPHRASE))

    def prepare(self):
        """Make the fleet, its aggregator and its broker with the programs, as a person would."""
        self.place.make_fleet(f"mqtts://localhost:{self.port}", DEVICES, of_owner=["--passphrase"])
        (self.home / "mosquitto").mkdir()
        self.broker = start_generated(self.home / "broker", self.home / "mosquitto", self.port)

    def add(self, name):
        """Let a device join by card and grant."""
        owner = self.owner()
        grant = owner.add_device(enrolment.init(self.home / name, name).read_bytes())
        enrolment.join(self.home / name, grant.read_bytes(), owner.fingerprint)

    def train(self):
        """Run FedAvg of a few rounds from random origins, all programs talkative, and leave them running."""
        start = self.place.start
        start("server", "shoal-aggregator", "serve", "server", "--log", "debug")
        self.add("dev-2")
        self.add("dev-3")
        self.lines.append(self.place.enrol("dev-1"))
        for seed, name in enumerate(DEVICES):
            x, y = samples(60, INPUTS, CLASSES, seed=seed)
            np.savez(self.home / f"{name}.npz", x=x, y=y)
            options = ("--data", f"{name}.npz", "--log", "debug")
            start(name, "shoal-edge", "run", name, *options)
        start("watch", "shoal-fleet", "devices", "owner", "--watch")
        bundle = logistic_bundle(INPUTS, CLASSES)
        local = LocalTraining(epochs=1, batch_size=16, lr=0.2)
        options = Recipe("fedavg", mode="permutation", rounds=ROUNDS, local=local, seed=1)
        self.origins = np.random.default_rng(2).standard_normal((1, bundle.length)).astype(np.float32)
        self.plan = self.place.sign(self.owner(), bundle, options, self.origins)
        self.place.until(lambda: self.finished(1) and self.has_models(), "server")

    def finished(self, run):
        records = read_records(self.home / "server" / f"run-{run:06d}")
        return bool(records) and records[-1]["final"]

    def has_models(self):
        ended = [(DeviceState(self.home / d).load_status() or {}).get("finished") for d in DEVICES]
        return all(ended) and "enrolled dev-3" in self.place.log("watch")

    def pids(self):
        return {name: p.pid for name, p in self.place.running.items() if p.poll() is None}

    def secrets_of_all(self):
        """Return the secrets that only their holders may have: name -> bytes."""
        owner = self.owner()
        found = {
            "key version's secret": owner.secrets.version_secret,
            "key version's secret of the next run": self.next_version(owner),
            "owner's signing key": owner.owner.sign_private.private_bytes_raw(),
            "owner's seal key": owner.owner.seal_private.private_bytes_raw(),
            "broker users' secret": (self.home / "owner" / "broker.key").read_bytes(),
            "passphrase": PASSPHRASE,
            **self.of_the_rounds(owner),
            **windows("origin", self.origins[0]),
        }
        for name in DEVICES:
            identity = Identity.load(self.home / name / "identity.key")
            found[f"{name}'s signing key"] = identity.sign_private.private_bytes_raw()
            found[f"{name}'s seal key"] = identity.seal_private.private_bytes_raw()
            for i, key in enumerate(ReceivingSecrets.load(self.home / name / "receiving.key").privates):
                found[f"{name}'s receiving key {i}"] = key.private_bytes_raw()
            found[f"{name}'s password"] = owner.users.password(name).encode()
            found |= windows(f"{name}'s model", DeviceState(self.home / name).load_model().theta)
        for line in self.lines:
            found[f"token {len(found)}"] = Token.from_line(line).secret
        return found

    def next_version(self, owner):
        """Return the secret of the key version for the run after this one, which devices store."""
        version = owner.version_key
        version.skip_to_run(self.plan.run + 1)
        return version.reveal()

    def of_the_rounds(self, owner):
        """Return the chain's secret and all keys of every round, and of the round after the last one, the chain's secret."""
        chain, found = run_chain(owner, self.plan), {}
        for round_ in range(ROUNDS + 2):
            found[f"chain at round {round_}"] = chain.reveal()
            keys = chain.take()
            parts = {"mask secret": keys.mask.reveal(), "content key": keys.content, "digest key": keys.digest_key}
            found |= {f"{name} of round {round_}": raw for name, raw in (parts | self.of_the_mask(keys)).items()}
        found[f"chain at round {chain.next_round}"] = chain.reveal()
        return found

    def of_the_mask(self, round_keys):
        """Return every key that a round's mask is made from, and the permutation in the device's representation."""
        plan, keys = self.plan, {}
        context = round_keys.context(plan.task_digest, plan.recipe.mode, plan.mask_segments)
        (segment,) = plan.mask_segments

        def subkey(purpose):
            field = f"{segment.name}:{segment.length}".encode()
            fields = (plan.fleet.encode(), plan.run_id, context.times, plan.task_digest, field, purpose.encode())
            keys[f"subkey {purpose}"] = expand(round_keys.mask.reveal(), SECRET_BYTES, *fields)
            return keys[f"subkey {purpose}"]

        again = registry.find(plan.recipe.mode).build(subkey, segment.length)
        ramp = np.arange(segment.length, dtype=np.float32)
        order, true = np.empty_like(ramp), np.empty_like(ramp)
        again.apply(ramp, order)
        derive(round_keys.mask, context).apply(ramp, true)
        assert keys
        assert np.array_equal(order, true), "the subkeys are not those that devices derive"
        tables = {f"permutation as {kind}": order.astype(kind).tobytes() for kind in ("<i4", "<i8", "<f4")}
        return keys | tables


def windows(what, vector):
    """Return pieces of a vector (d,) as bytes in memory; finding one means finding a part of the vector."""
    raw = vector.astype("<f4").tobytes()
    return {f"{what} from byte {at}": raw[at : at + WINDOW] for at in range(0, len(raw) - WINDOW + 1, WINDOW)}


def spelled(secrets):
    """Return the secrets as they are and as text would spell them."""
    found = dict(secrets)
    for name, raw in secrets.items():
        if "from byte" in name:
            continue
        found[f"{name}, hex"] = raw.hex().encode()
        found[f"{name}, base64"] = base64.b64encode(raw).rstrip(b"=")
        found[f"{name}, base64url"] = base64.urlsafe_b64encode(raw).rstrip(b"=")
        found[f"{name}, repr"] = repr(raw)[2:-1].encode()
    return found


@pytest.fixture(scope="module")
def after(tmp_path_factory):
    if find_mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    made = Aftermath(tmp_path_factory.mktemp("aftermath"))
    try:
        made.prepare()
        made.train()
        yield made
    finally:
        made.place.finish()
        if made.broker is not None:
            made.broker.terminate()
            made.broker.wait(10)


@pytest.fixture(scope="module")
def forbidden(after):
    return spelled(after.secrets_of_all())


def test_the_run_was_a_run(after):
    """The control of all that follows: three devices took part under a mask, to the end."""
    records = read_records(after.home / "server" / "run-000001")
    assert [r["contributed"] for r in records] == [3] * 5
    assert after.plan.recipe.mode == "permutation"
    assert set(after.pids()) == {"server", "watch", *DEVICES}


def test_aggregators_disk_holds_no_secret(after, forbidden):
    """Nor do the files given to it; its own keys and the broadcast key are there."""
    files = sorted((after.home / "server").rglob("*"))
    assert len(files) > 8
    assert found_in_files(files, forbidden) == set()
    own = {
        "broadcast": after.owner().secrets.broadcast_key,
        "seal": Identity.load(after.home / "server" / "identity.key").seal_private.private_bytes_raw(),
    }
    assert {name for _, name in found_in_files(files, own)} == set(own)


def test_aggregators_memory_holds_no_secret(after, forbidden):
    """The search works: it finds the broadcast key and the run's id, which are there."""
    broadcast = after.owner().secrets.broadcast_key
    known = {"broadcast key": broadcast, "run id": after.plan.run_id}
    assert found_in_memory(after.pids()["server"], {**forbidden, **known}) == set(known)


@pytest.mark.skipif(os.geteuid() != 0, reason="nobody but root can look into a device's memory")
def test_search_finds_secrets_where_they_are(after, forbidden):
    """A device's memory, read as root: the secrets of what is still to come are there."""
    found = found_in_memory(after.pids()["dev-1"], forbidden)
    last = ROUNDS + 1
    assert "key version's secret of the next run" in found
    assert {f"mask secret of round {last}", f"content key of round {last}", f"chain at round {last + 1}"} <= found
    assert not any(name.startswith(("owner's", "dev-2's s", "passphrase")) for name in found)


def test_devices_and_owner_resist_inspection(after):
    """They can't be inspected, but the aggregator can: it holds nothing that is not in its files. None leaves a core file."""
    assert {name for name, pid in after.pids().items() if inspectable(pid)} == {"server"}
    limits = {name: core_limits(pid) for name, pid in after.pids().items()}
    assert set(limits.values()) == {("0", "0")}, limits


def test_no_output_or_argument_shows_secret(after, forbidden):
    """All logs are at debug level; the broadcast key must not be shown either."""
    text = forbidden | spelled({"broadcast key": after.owner().secrets.broadcast_key})
    logs = sorted(after.home.glob("*.log"))
    assert {"server.log", "dev-1.log", "watch.log", "enrol-dev-1.log", "init.log"} <= {p.name for p in logs}
    assert found_in_files(logs, text) == set()
    assert not [p for p in logs if b"Traceback" in p.read_bytes()]
    seen = {name: command_line(pid) for name, pid in after.pids().items()}
    assert b"edge_client.program" in seen["dev-1"]
    assert not [(who, name) for who, line in seen.items() for name, raw in text.items() if raw in line]


@pytest.mark.skipif(os.geteuid() != 0, reason="nobody but root can read a device's environment")
def test_no_environment_holds_a_secret(after, forbidden):
    for name, pid in after.pids().items():
        environment = Path(f"/proc/{pid}/environ").read_bytes()
        assert b"SHOAL_PASSPHRASE_FILE=" in environment, name
        assert not [needle for needle, raw in forbidden.items() if raw in environment], name


def test_what_broker_keeps_holds_no_secret(after, forbidden):
    """Retained messages, sessions, its log, and the files that the owner made for it."""
    after.broker.send_signal(10)  # SIGUSR1: mosquitto writes its database
    database = after.home / "broker" / "mosquitto.db"
    after.place.until(lambda: database.exists() and b"shoal/v1/reef/s/plan" in database.read_bytes(), "server")
    secret = forbidden | spelled({"broadcast key": after.owner().secrets.broadcast_key})
    files = [*(after.home / "mosquitto").rglob("*"), *(after.home / "broker").glob("*")]
    assert found_in_files(files, secret) == set()


def test_every_file_is_private(after):
    """0700 and 0600, also of files written during the run; others read a card and the model in use, if their folder lets them."""
    for party in ("owner", "server", *DEVICES, "broker"):
        root = after.home / party
        shared = {root / "model.onnx", root / "model.json", root / "in-use", *(root / "in-use").rglob("*")}
        paths = [path for path in (root, *root.rglob("*")) if path not in shared]
        assert len(paths) > 5
        for path in paths:
            mode = stat.S_IMODE(path.stat().st_mode)
            assert mode == (0o700 if path.is_dir() else 0o600) or path.suffix == ".card", f"{path} {mode:04o}"


def test_each_device_holds_only_its_own_keys(after):
    """Two devices share the fleet's secrets and nothing else."""
    files = sorted((after.home / "dev-1").rglob("*"))
    other = Identity.load(after.home / "dev-2" / "identity.key")
    owner = after.owner()
    strange = {
        "sign": other.sign_private.private_bytes_raw(),
        "seal": other.seal_private.private_bytes_raw(),
        "owner": owner.owner.sign_private.private_bytes_raw(),
        "password": owner.users.password("dev-2").encode(),
    }
    assert found_in_files(files, strange) == set()
    assert DeviceMembership(after.home / "dev-1").grant.version_secret == after.next_version(owner)


def test_devices_erased_past_rounds_keys(after):
    """Those of rounds whose means they have applied, and all that they could be derived from. No mean follows the last round.

    Every state that a device holds has the key of its digest: the newest one, in a small fleet the last certified
    one, and the one that it could give to the owner with its certificate.
    """
    last, owner = ROUNDS + 1, after.owner()
    secrets = {"key version's secret": owner.secrets.version_secret, **after.of_the_rounds(owner)}
    for device in DEVICES:
        found = {name for _, name in found_in_files(sorted((after.home / device).rglob("*")), secrets)}
        digests = {name for name in found if name.startswith("digest key of round")}
        stored = {"chain at round": last + 1, "mask secret of round": last, "content key of round": last}
        assert found - digests == {f"{name} {round_}" for name, round_ in stored.items()}, device
        assert f"digest key of round {ROUNDS}" in digests
        assert len(digests) <= STATES_HELD, device
