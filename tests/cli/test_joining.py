"""init, card, grant, join and show, as the owner and the two who join see them."""

from __future__ import annotations

import dataclasses
import re
import shutil

import numpy as np
import pytest

from aggregator.storage.store import Store
from crypto.seal.identity import sign_document
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.runs.plan import make_plan, write_run
from shoal.owner.task_compiler.signed import read_signed
from shoal.util.files import write_private
from tests.cli.conftest import BROKER
from tests.helpers.plans import a_recipe

FINGERPRINT = r"[a-z2-7]{4}(-[a-z2-7]{4}){5}"


def test_everybody_joins_and_no_secret_shows(call):
    """Enrolment by cards and grants; no output and no file that is passed on holds a secret in a usual encoding."""
    made = call("shoal-fleet", "init", "owner", "--name", "reef", "--broker", BROKER)
    assert re.fullmatch(rf"owner {FINGERPRINT}\n", made.out)
    assert made.err.startswith("next: shoal-aggregator init")
    owner = made.last.removeprefix("owner ")
    assert call("shoal-aggregator", "init", "server").out == "server/aggregator.card\n"
    added = call("shoal-fleet", "add-aggregator", "owner", "server/aggregator.card")
    assert added.out == "owner/grants/aggregator.grant\n"
    assert f"shoal-aggregator join DIR GRANT --owner {owner}" in added.err
    joined = call("shoal-aggregator", "join", "server", "owner/grants/aggregator.grant", "--owner", owner)
    assert joined.out == "joined fleet reef\n"
    assert "next: shoal-aggregator serve server" in joined.err
    made = call("shoal-edge", "init", "dev-1", "--name", "dev-1")
    assert made.out == "dev-1/dev-1.card\n"
    assert re.search(rf"^fingerprint {FINGERPRINT}$", made.err, re.MULTILINE)
    added = call("shoal-fleet", "add-device", "owner", "dev-1/dev-1.card")
    assert added.out == "owner/grants/dev-1.grant\n"
    assert f"shoal-edge join DIR GRANT --owner {owner}" in added.err
    call("shoal-edge", "join", "dev-1", "owner/grants/aggregator.grant", "--owner", owner, status=6)
    joined = call("shoal-edge", "join", "dev-1", "owner/grants/dev-1.grant", "--owner", owner)
    assert joined.out == "joined fleet reef as dev-1\n"
    call("shoal-fleet", "show", "owner", "--json")
    call("shoal-edge", "status", "dev-1", "--json")
    renewed = call("shoal-fleet", "renew", "owner", "--debug")
    assert renewed.out == "owner/roster.signed\n"
    assert "shoal-fleet publish owner" in renewed.err
    secrets = FleetDirectory(call.home / "owner").secrets
    spellings = (lambda s: s.hex(), lambda s: s.hex().upper(), lambda s: repr(s)[2:-1], lambda s: repr(list(s)))
    drawn = {spell(secret) for secret in (secrets.broadcast_key, secrets.version_secret) for spell in spellings}
    text = "\n".join(call.seen)
    assert {secret for secret in drawn if secret in text} == set()


def test_config_says_whence_each_value_is(call, fleet):
    """Flag over environment over file over default."""
    (call.home / "a.toml").write_text('[aggregator]\ndevice = "cpu"\nlog = "debug"\n')
    shown = call("shoal-aggregator", "config", "server", "--config", "a.toml", SHOAL_AGGREGATOR_LOG="error").out
    assert "dir = server  # flag\n" in shown
    assert "device = cpu  # a.toml\n" in shown
    assert "log = error  # SHOAL_AGGREGATOR_LOG\n" in shown
    assert "once = False  # default\n" in shown


def test_status_goes_past_a_damaged_run(call, fleet, task):
    """And past a record that is none; it tells each run's mask."""
    owner = FleetDirectory(call.home / "owner")
    bundle, _ = read_signed(call.home / task, owner.owner)
    for _ in range(3):
        plan = make_plan(owner, bundle, a_recipe("fedavg", rounds=7))
        shutil.copy(write_run(owner, plan, bundle, np.zeros((1, bundle.length), np.float32)), call.home / "server/runs")
    database = call.home / "server/run-000001/run.sqlite"
    database.parent.mkdir()
    database.write_bytes(b"no database, and long enough for a header" * 9)
    store = Store(call.home / "server/run-000003", plan)
    store.record(1, {"round": 1})
    store.close()
    broken, sound, false = call("shoal-aggregator", "status", "server", "--json").data["runs"]
    assert "run-000001 can't be read" in broken["damage"]
    assert (broken["closed"], sound["damage"], sound["mode"]) == (0, "", "rotation")
    assert "can't be read: KeyError" in false["damage"]
    lines = call("shoal-aggregator", "status", "server").out.splitlines()
    mask = "fedavg, mask rotation (secret permutation, signs, Hadamard)"
    assert lines[1].startswith(f"run 1: {mask}, server/run-000001 can't be read")
    assert "restore it from a backup" in lines[1]
    assert lines[2].startswith(f"run 2: {mask}, 0 of 7 rounds closed")


def test_device_status_before_first_round(call, fleet):
    """Its name and its fleet, and that no program runs."""
    assert "not running" in call("shoal-edge", "status", "dev-1").out
    data = call("shoal-edge", "status", "dev-1", "--json").data
    assert (data["device"], data["fleet"]) == ("dev-1", "reef")
    assert (data["running"], data["connected"], data["since"]) == (False, False, None)
    assert re.fullmatch(FINGERPRINT, data["fingerprint"])


def test_aggregator_status_before_first_run(call, fleet):
    """It knows the fleet, and that there is nothing to do."""
    assert "not running" in call("shoal-aggregator", "status", "server").out
    data = call("shoal-aggregator", "status", "server", "--json").data
    (device,) = data.pop("devices")
    assert (device["name"], device["online"], device["reason"]) == ("dev-1", None, "")
    assert data == {
        "fleet": "reef",
        "running": False,
        "connected": False,
        "broker": BROKER,
        "since": None,
        "problems": [],
        "version": "",
        "wire": None,
        "run": None,
        "serving": False,
        "runs": [],
        "refused": {},
        "workers": [],
        "chunk_bytes": 122880,
    }


@pytest.mark.torch
def test_task_names_its_data_and_sizes(call, fleet):
    """A task that names its data says so and has their sizes."""
    (call.home / "features.txt").write_text("radius,0,50\n# in mm2\narea,0,5e3\n")
    compiled = call(
        "shoal-fleet", "task", "compile", "owner", "logistic", "--features", "features.txt", "--label", "diagnosis",
        "--labels", "benign,malignant,unsure", "--missing", "mean", "--standardise", "local", "--out", "task",
    )  # fmt: skip
    assert compiled.out.startswith("task: 9 coordinates, ")
    words = "data: 2 named features, 3 named labels, standardise local, missing values: mean\n"
    assert compiled.out.endswith(words)
    assert 'features = ["radius", "area"]' in (call.home / "task/task.toml").read_text()


@pytest.mark.torch
def test_task_compiled_run_signed_and_listed(call, fleet):
    """`task compile` says how large the task is, `run` prints the run file, the aggregator finds it in its directory.

    Both say which parameters are private.
    """
    pytest.importorskip("torch")
    compiled = call(
        "shoal-fleet", "task", "compile", "owner", "mlp", "--option", "inputs=4", "--option", "hidden=3",
        "--option", "classes=2", "--private", "readout", "--out", "task",
    )  # fmt: skip
    assert compiled.out.startswith("task: 23 coordinates, ")
    words = "private: readout.weight, readout.bias: 8 of 23 coordinates never leave a device\n"
    assert compiled.out.endswith(words)
    made = call(
        "shoal-fleet", "run", "start", "owner", "--task", "task", "--algorithm", "ifca", "--set", "k=1", "--rounds", "4",
        "--min-contributors", "1", "--seed", "3", "--out", "server/runs/000001.run",
    )  # fmt: skip
    assert made.out == "server/runs/000001.run\n"
    assert words in made.err
    (run,) = call("shoal-aggregator", "status", "server", "--json").data["runs"]
    assert (run["run"], run["algorithm"], run["rounds"], run["closed"], run["finished"]) == (1, "ifca", 4, 0, False)


def test_device_config_shows_unset_and_grant(call, fleet):
    """To be looked at while it is being written; before a device has joined there is no broker."""
    told = call("shoal-edge", "config", "dev-1").out.splitlines()
    assert "data = (not set)" in told
    assert "executor = auto (onnxruntime)  # default" in told
    chosen = call("shoal-edge", "config", "dev-1", SHOAL_EDGE_EXECUTOR="numpy").out
    assert "executor = numpy  # SHOAL_EDGE_EXECUTOR" in chosen
    assert f"broker = {BROKER}  # the grant" in told
    assert "data = x.npz  # SHOAL_EDGE_DATA" in call("shoal-edge", "config", "dev-1", SHOAL_EDGE_DATA="x.npz").out
    told = call("shoal-edge", "config").out.splitlines()
    assert "dir = (not set)" in told
    assert "broker =   # default" in told
    assert "broker =   # default" in call("shoal-edge", "config", "nowhere").out.splitlines()


@pytest.mark.parametrize("program", ["shoal-aggregator", "shoal-edge"])
def test_config_shows_no_password(call, fleet, program):
    """Of the broker's URL only scheme, host and port."""
    address = "mqtts://dev-1:hush-hush@broker.example:8883"
    names = {"SHOAL_AGGREGATOR_BROKER": address, "SHOAL_EDGE_BROKER": address, "SHOAL_EDGE_DATA": "x.npz"}
    made = call(program, "config", "dev-1", **names)
    assert "broker = mqtts://broker.example:8883  # SHOAL_" in made.out
    assert "hush" not in made.out + made.err


def test_secrets_lie_in_private_files(call, fleet):
    """Mode 0600 for every file but cards, 0700 for the directories."""
    parties = [call.home / party for party in ("owner", "server", "dev-1")]
    paths = [path for party in parties for path in (party, *party.rglob("*")) if path.suffix != ".card"]
    assert len(paths) > 12
    assert [path for path in paths if path.stat().st_mode & 0o077] == []


def test_earlier_directory_is_refused(call, fleet):
    """A directory of an earlier version is refused by each command."""
    (call.home / "dev-1/receiving.key").unlink()
    for arguments in (("status", "dev-1"), ("run", "dev-1", "--data", "d.npz"), ("models", "dev-1")):
        failed = call("shoal-edge", *arguments, status=4)
        assert (
            "error: dev-1 has no receiving keys: another program or an earlier version of Shoal made it" in failed.err
        )
        assert "init or enrol a new one under another name" in failed.err


def test_a_revoked_device_says_so(call, fleet, data):
    """Status shows it; a start ends with 6, which systemd's unit does not take for a failure to be tried again."""
    call("shoal-fleet", "revoke", "owner", "dev-1", SHOAL_FLEET_OFFLINE="1")
    write_private(call.home / "dev-1/roster.signed", FleetDirectory(call.home / "owner").roster_bytes)
    assert "stage: revoked" in call("shoal-edge", "status", "dev-1").out
    told = call("shoal-edge", "run", "dev-1", "--data", "d.npz", status=6).err
    assert "error: dev-1 is not in the fleet's roster any more" in told
    assert "init or enrol a new directory, under another name" in told


def test_expired_roster_says_what_is_awaited(call, fleet, data):
    """Otherwise the newer one could not reach it; status and predict connect to no broker at all."""
    owner = FleetDirectory(call.home / "owner")
    old = dataclasses.replace(owner.roster, sequence=owner.roster.sequence + 1, expires_at_s=10**9)
    write_private(call.home / "dev-1/roster.signed", sign_document(owner.owner, old))
    told = call("shoal-edge", "run", "dev-1", "--data", "d.npz", status=5).err
    assert "the roster has expired: waiting for a newer one" in told
    assert "2001-09-09T01:46:40Z" in told
    assert "shoal-fleet renew" in told
    assert "roster expired: 2001-09-09T01:46:40Z" in call("shoal-edge", "status", "dev-1").out
    assert "model.bin does not exist" in call("shoal-edge", "predict", "dev-1", "--data", "d.npz", status=7).err
