"""The whole life of a fleet's keys in one run, with real programs on mosquitto, some of which are killed while the keys change.

init, token, enrol four, train, a newcomer, rotate, revoke, train on.
"""

from __future__ import annotations

import signal

import numpy as np
import pytest

from aggregator.storage.store import read_records
from crypto.mask.schedule import VersionKey
from crypto.seal.envelope import GroupKey, SealError, open_from_group, read_head
from edge_client.membership import DeviceMembership
from shoal.owner.keys.directory import FleetDirectory
from shoal.protocol.reassembly import Reassembler
from shoal.protocol.recipe import LocalTraining, Recipe
from shoal.protocol.topics import Topics
from shoal.transport.local_broker import find_mosquitto, free_port
from tests.helpers.mqtt_clients import Client
from tests.helpers.places import Place, start_generated
from tests.helpers.processes import found_in_files, found_in_memory, inspectable
from tests.helpers.run_places import SLOWLY
from tests.helpers.tasks import logistic_bundle, samples

pytestmark = [pytest.mark.broker, pytest.mark.process, pytest.mark.timeout(400)]
FIRST = ("dev-1", "dev-2", "dev-3", "dev-4")
LATER = "dev-5"
MORE_ROUNDS = 3
ROUNDS = 100_000
"""More than the test waits for: it ends while the run goes on."""


class Fleet:
    """A fleet in a directory; the owner's commands are the real ones."""

    def __init__(self, home):
        self.home = home
        self.place = Place(home, **SLOWLY)
        self.port = free_port()
        self.broker = None

    def owner(self):
        return FleetDirectory(self.home / "owner")

    def call(self, *arguments):
        return self.place.call(f"owner-{arguments[0]}", "shoal-fleet", *arguments)

    def begin(self):
        self.place.make_fleet(f"mqtt://localhost:{self.port}", (*FIRST, LATER))
        (self.home / "mosquitto").mkdir()
        self.broker = start_generated(self.home / "broker", self.home / "mosquitto", self.port)
        self.serve()

    def serve(self):
        self.place.start("server", "shoal-aggregator", "serve", "server")

    def train(self, name):
        self.place.start(name, "shoal-edge", "run", name, "--data", f"{name}.npz")

    def sign(self):
        """Let the owner sign a run that outlasts the test; return its plan and its origins."""
        bundle = logistic_bundle()
        local = LocalTraining(epochs=1, batch_size=16, lr=0.05)
        options = Recipe("fedavg", rounds=ROUNDS, local=local, quorum=0.6, deadline_s=10.0, seed=1)
        origins = np.random.default_rng(5).standard_normal((1, bundle.length)).astype(np.float32)
        return self.place.sign(self.owner(), bundle, options, origins), origins

    def records(self):
        return read_records(self.home / "server" / "run-000001")

    def hold(self, names, secrets):
        """Return whether the devices hold these secrets of the owner."""
        return all(DeviceMembership(self.home / name).grant.broadcast_key == secrets.broadcast_key for name in names)

    def enrol(self, name):
        self.place.enrol(name)
        x, y = samples(60, seed=len(name) + int(name[-1]))
        np.savez(self.home / f"{name}.npz", x=x, y=y)

    def until(self, reached):
        self.place.until(reached, "server")

    def kill(self, name):
        process = self.place.running[name]
        process.send_signal(signal.SIGKILL)
        process.wait()

    def close(self):
        self.place.finish()
        if self.broker is not None:
            self.broker.kill()
            self.broker.wait()


@pytest.fixture
def fleet(tmp_path):
    if find_mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    made = Fleet(tmp_path)
    yield made
    made.close()


def on_and_on(fleet, who, without=()):
    """Wait for a few more rounds to which all of ``who`` contributed, and none of ``without``."""
    start = len(fleet.records())

    def reached():
        later = fleet.records()[start:]
        full = [r for r in later if set(who) <= r["norms"].keys()]
        return len(full) >= MORE_ROUNDS and not any(set(without) & r["norms"].keys() for r in later[1:])

    fleet.until(reached)


@pytest.mark.long
def test_the_whole_life_of_keys(fleet):
    """Every change of keys happens under a run that goes on, with the aggregator and a device killed in the middle of one."""
    fleet.begin()
    for name in FIRST:
        fleet.enrol(name)
    plan, origins = fleet.sign()
    begun = fleet.owner().secrets
    for name in FIRST:
        fleet.train(name)
    on_and_on(fleet, FIRST)

    fleet.enrol(LATER)
    fleet.train(LATER)
    everybody = (*FIRST, LATER)
    admitted = fleet.owner().secrets
    assert admitted.version_secret != begun.version_secret
    on_and_on(fleet, everybody)
    old = {name: DeviceMembership(fleet.home / name).grant for name in ("dev-1", "dev-4")}

    assert "new secrets since roster" in fleet.call("rotate", "owner")
    fleet.kill("server")
    fleet.kill("dev-2")
    fleet.serve()
    fleet.train("dev-2")
    rotated = fleet.owner().secrets
    fleet.until(lambda: fleet.hold(everybody, rotated))
    on_and_on(fleet, everybody)
    grant = DeviceMembership(fleet.home / "dev-1").grant
    assert grant.version_secret == stepped(rotated) != old["dev-1"].version_secret
    assert grant.broadcast_key == rotated.broadcast_key != old["dev-1"].broadcast_key

    assert "dev-4 revoked by roster" in fleet.call("revoke", "owner", "dev-4")
    fleet.kill("dev-3")
    fleet.train("dev-3")
    fresh = fleet.owner().secrets
    stay = tuple(d for d in everybody if d != "dev-4")
    fleet.until(lambda: fleet.hold(stay, fresh))
    on_and_on(fleet, stay, without=("dev-4",))

    gone, stays = DeviceMembership(fleet.home / "dev-4"), DeviceMembership(fleet.home / "dev-1")
    assert gone.grant.broadcast_key == rotated.broadcast_key != fresh.broadcast_key
    assert gone.next is None
    assert stays.grant.broadcast_key == fresh.broadcast_key
    assert opens(fleet, stays)
    assert not opens(fleet, gone)
    nothing_of_the_masks_is_with_the_aggregator(fleet, plan, origins, (begun, admitted, rotated, fresh))


def opens(fleet, membership):
    """Return whether a device's keys open the announcement that the broker retains."""
    tap = Client(DeviceMembership(fleet.home / "dev-1").broker, "wire-tap")
    tap.transport.subscribe(f"{Topics('reef').round}/#")
    tap.transport.start(require=True)
    transfer = Reassembler().add("x", tap.message().payload, 0.0)
    tap.transport.close()
    head, at = read_head(transfer.payload)
    key = membership.roster.aggregator.sign_key
    try:
        open_from_group(GroupKey("reef", "broadcast", membership.grant.broadcast_key), transfer.payload, head, at, key)
    except SealError:
        return False
    return True


def stepped(secrets):
    """Return the secret of a key version for run 2, which a device stores once it has begun run 1."""
    version = VersionKey("reef", 0, secrets.version_secret)
    version.skip_to_run(2)
    return version.reveal()


def keys_of(secrets, plan, rounds):
    """Return the chain's secret, the mask secret and the content key of rounds under a key version, as the owner derives them."""
    chain, found = VersionKey("reef", 0, secrets.version_secret).begin_run(plan.run_id), {}
    chain.skip_to(rounds[0])
    for round_ in rounds:
        found[f"chain at round {round_}"] = chain.reveal()
        keys = chain.take()
        found |= {f"mask secret of round {round_}": keys.mask.reveal(), f"content key of round {round_}": keys.content}
    return found


def nothing_of_the_masks_is_with_the_aggregator(fleet, plan, origins, drawn):
    """Neither its files nor its memory hold a secret of a key version, keys of rounds, or a piece of a raw origin."""
    needles = {f"key version's secret {i}": secrets.version_secret for i, secrets in enumerate(drawn)}
    needles |= {f"key version's secret {i} for run 2": stepped(secrets) for i, secrets in enumerate(drawn)}
    last = len(fleet.records())
    needles |= keys_of(drawn[0], plan, range(4)) | keys_of(drawn[-1], plan, range(last - 3, last + 3))
    needles["origin"] = origins.astype("<f4").tobytes()[:32]
    own = {"own broadcast key": drawn[-1].broadcast_key}
    server = fleet.place.running["server"].pid
    assert inspectable(server)
    assert found_in_memory(server, own) == set(own)
    assert found_in_memory(server, needles) == set()
    files = [p for p in (fleet.home / "server").rglob("*") if p.is_file()]
    assert len(files) > 5
    assert found_in_files(files, needles) == set()
    assert not inspectable(fleet.place.running["dev-1"].pid)
    logs = list(fleet.home.glob("*.log"))
    assert found_in_files(logs, {**needles, **own, "as text": drawn[-1].version_secret.hex().encode()}) == set()
    assert not [p for p in logs if "Traceback" in p.read_text()]
