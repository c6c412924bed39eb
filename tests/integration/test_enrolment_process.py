"""Enrolment as people do it: real programs, a real broker, the owner's machine at work only for a moment."""

from __future__ import annotations

import shutil
import time

import numpy as np
import pytest

from aggregator import membership as aggregator_membership
from aggregator.storage.store import read_records
from edge_client import enrolment as joining
from edge_client.membership import DeviceMembership
from shoal.errors import NotEnrolledError
from shoal.owner.enrolment.tokens import TokenStore
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.runs.plan import make_plan, write_run
from shoal.protocol.recipe import LocalTraining, Recipe
from shoal.transport.local_broker import find_mosquitto, start_broker
from tests.helpers.places import WAIT_S, Place
from tests.helpers.tasks import logistic_bundle, samples

pytestmark = [pytest.mark.broker, pytest.mark.process, pytest.mark.timeout(300)]


@pytest.fixture
def place(tmp_path):
    made = Place(tmp_path)
    yield made
    made.finish()


def sign_run(home, rounds):
    """Let the owner sign a run, and carry the file to the aggregator."""
    fleet = FleetDirectory(home / "owner")
    bundle = logistic_bundle()
    local = LocalTraining(epochs=1, batch_size=16, lr=0.2)
    plan = make_plan(fleet, bundle, Recipe("fedavg", rounds=rounds, local=local, min_contributors=1, seed=1))
    path = write_run(fleet, plan, bundle, np.zeros((1, bundle.length), np.float32))
    shutil.copy(path, home / "server" / "runs" / f".{path.name}")
    (home / "server" / "runs" / f".{path.name}").rename(home / "server" / "runs" / path.name)
    return plan


def enrol(place, name):
    """Enrol a device through the broker, the line on its stdin."""
    line = next(
        x for x in place.call("token", "shoal-fleet", "invite", "owner").splitlines() if x.startswith("shoal1-")
    )
    asking = place.start(f"enrol-{name}", "shoal-edge", "enrol", name, stdin=line + "\n")
    place.until(lambda: "fingerprint " in place.log(f"enrol-{name}"), f"enrol-{name}")
    print_ = place.log(f"enrol-{name}").split("fingerprint ")[1].split()[0]
    assert print_ in place.call("approve", "shoal-fleet", "approve", "owner", print_, "--wait", "60")
    assert asking.wait(WAIT_S) == 0, place.log(f"enrol-{name}")
    assert f"joined fleet reef as {name}" in place.log(f"enrol-{name}")
    for log in (f"enrol-{name}", "approve"):
        assert line not in place.log(log)


def enrol_invited(place, *names):
    """Enrol devices whose lines were printed at once, without comparing fingerprints."""
    made = place.call("invite", "shoal-fleet", "invite", "owner", "--count", str(len(names)))
    lines = [x for x in made.splitlines() if x.startswith("shoal1-")]
    asking = {
        name: place.start(f"enrol-{name}", "shoal-edge", "enrol", name, stdin=line + "\n")
        for name, line in zip(names, lines, strict=True)
    }
    missing = list(names)
    while missing:
        said = place.call("approve", "shoal-fleet", "approve", "owner", "--all-invited", "--wait", "60")
        found = [name for name in missing if f"{name} " in said]
        assert found
        missing = [name for name in missing if name not in found]
    for name, program in asking.items():
        assert program.wait(WAIT_S) == 0, place.log(f"enrol-{name}")


def train(place, name, seed):
    x, y = samples(60, seed=seed)
    np.savez(place.home / f"{name}.npz", x=x, y=y)
    place.start(name, "shoal-edge", "run", name, "--data", f"{name}.npz")


def contributors(home, run):
    records = read_records(home / "server" / f"run-{run:06d}")
    return records, {d for r in records for d in r["norms"]}


def done(home, run):
    records, _ = contributors(home, run)
    return bool(records) and records[-1]["final"]


@pytest.mark.long
def test_enrol_train_revoke_train_on(place, tmp_path):
    """No file is carried but the runs: rosters, grants and new keys go by the broker; a revoked device is out."""
    if find_mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    home = place.home
    with start_broker("mosquitto", tmp_path / "broker") as broker:
        owner = FleetDirectory.create(home / "owner", "reef", broker.url)
        grant = owner.add_aggregator(aggregator_membership.init(home / "server").read_bytes())
        aggregator_membership.join(home / "server", grant.read_bytes(), owner.fingerprint)
        place.start("server", "shoal-aggregator", "serve", "server")
        names = ("dev-1", "dev-2", "dev-3")
        enrol(place, "dev-1")
        enrol_invited(place, "dev-2", "dev-3")
        first = sign_run(home, rounds=2)
        for seed, name in enumerate(names):
            train(place, name, seed)
        place.until(lambda: done(home, first.run), "server")
        records, who = contributors(home, first.run)
        assert who == set(names)
        assert all(r["contributed"] == 3 for r in records)

        told = place.call("revoke", "shoal-fleet", "revoke", "owner", "dev-3")
        assert "dev-3 revoked by roster" in told
        gone = place.running["dev-3"]
        assert gone.wait(WAIT_S) == 6, place.log("dev-3")
        assert place.log("dev-3").count("the owner has revoked this device") == 1
        second = sign_run(home, rounds=2)
        place.until(lambda: done(home, second.run), "server")
        records, who = contributors(home, second.run)
        assert who == {"dev-1", "dev-2"}
        assert all(r["ordered"] == 2 for r in records)
        listed = place.call("devices", "shoal-fleet", "devices", "owner")
        assert listed.count("enrolled ") == 2
        assert "revoked dev-3 " in listed

    secrets = FleetDirectory(home / "owner").secrets
    gone, stays = DeviceMembership(home / "dev-3"), DeviceMembership(home / "dev-1")
    fleet = FleetDirectory(home / "owner")
    own, owners = stays.version_key(fleet.roster.keys_since), fleet.version_key
    owners.skip_to_run(own.next_run)
    assert own.next_run == second.run + 1
    assert own.reveal() == owners.reveal() != gone.grant.version_secret
    assert stays.grant.broadcast_key == secrets.broadcast_key != gone.grant.broadcast_key
    assert gone.grant.broadcast_key not in (home / "server" / "membership.bin").read_bytes()
    assert "Traceback" not in "".join(place.log(n) for n in place.names)
    for secret in (secrets.version_secret, secrets.broadcast_key):
        assert not any(secret.hex() in place.log(n) for n in place.names)


def test_a_line_that_expires_ends_the_wait(tmp_path, monkeypatch):
    """It can't be answered any more, and an earlier answer would have arrived by now."""
    if find_mosquitto() is None:
        pytest.skip("mosquitto is not installed")
    monkeypatch.setattr(joining, "LATE_S", 0.5)
    with start_broker("mosquitto", tmp_path) as broker:
        owner = FleetDirectory.create(tmp_path / "owner", "reef", broker.url)
        owner.add_aggregator(aggregator_membership.init(tmp_path / "server").read_bytes())
        token = TokenStore(owner).issue(1, 1, int(time.time()))[0]
        joining.prepare(tmp_path / "dev-1", "dev-1")
        with pytest.raises(NotEnrolledError, match="this enrolment line expired on "):
            joining.enrol(tmp_path / "dev-1", token, ca=None, cert=None, key=None, complain=pytest.fail)
