"""`shoal-fleet`: data on stdout, next steps on stderr, and refusals before anything is signed."""

import json
import sys
import time

import numpy as np
import pytest
import typer

from crypto.seal.identity import Identity, fingerprint, sign_document
from shoal.errors import ConfigError, UntrustedError, UsageError
from shoal.membership.grants import DEVICE_ROLE, make_card
from shoal.owner.cli import main, runs
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.keys.run_list import signed_plans
from shoal.owner.keys.vault import run_file
from shoal.owner.task_compiler.signed import Source, write_signed
from shoal.protocol.codec import encode
from shoal.protocol.documents import RunPackage
from shoal.util.files import exclusive, write_private
from tests.helpers.plans import run_plan
from tests.helpers.receiving import device_card, founded
from tests.helpers.tasks import logistic_bundle

AGGREGATOR, DEVICE = Identity.generate("aggregator"), Identity.generate("dev-1")


@pytest.fixture
def fleet(tmp_path):
    return founded(tmp_path / "owner", "mqtt://user:pass-word@h", DEVICE, aggregator=AGGREGATOR)


def card_file(tmp_path, identity, role=DEVICE_ROLE):
    path = tmp_path / f"{identity.name}.card"
    path.write_bytes(device_card(identity) if role == DEVICE_ROLE else make_card(identity, role))
    return path


def add_run(fleet, **changes):
    """Write a signed run of the fleet, without task and origins."""
    plan = run_plan(fleet="reef", **changes)
    write_private(run_file(fleet.path, plan.run), encode(RunPackage(sign_document(fleet.owner, plan), b"t", b"o")))


def test_show_lists_members_and_runs(fleet, capsys):
    """And names a file that is no run."""
    fleet.add_device(device_card(Identity.generate("dev-2")))
    fleet.revoke("dev-2")
    add_run(fleet, run=1, rounds=1, weight_cap=0.0)
    add_run(fleet, run=2, mode="rotation", weighting="uniform", norm_noise=0.05)
    write_private(fleet.path / "runs" / "junk.run", b"junk")
    main.show(fleet.path)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert "junk.run is no run of this fleet" in err
    assert lines[0].startswith(f"fleet reef, roster {fleet.roster.sequence}, expires 20")
    assert lines[1:3] == [f"owner {fleet.fingerprint}", f"aggregator {fingerprint(AGGREGATOR.member)}"]
    assert lines[3] == f"dev-1 {fingerprint(DEVICE.member)}"
    assert lines[4] == f"dev-2 {fingerprint(fleet.roster.devices[1])} revoked"
    assert lines[5:] == [
        "run 1: fedavg, mask permutation, 1 round, weighting samples, no weight cap, robust off",
        "run 2: fedavg, mask rotation (secret permutation, signs, Hadamard), 20 rounds, weighting uniform, robust off, "
        "norm noise of 0.05",
    ]


def test_json_has_no_password_or_secret(fleet, capsys):
    """Show as json has no password and no secret."""
    add_run(fleet, run=3)
    main.show(fleet.path, json=True)
    out = capsys.readouterr().out
    data = json.loads(out)["data"]
    assert "pass-word" not in out
    assert (data["fleet"], data["broker"], data["passphrase"]) == ("reef", "mqtt://h:1883", False)
    assert data["devices"] == [
        {"name": "dev-1", "fingerprint": fingerprint(DEVICE.member), "revoked": False, "labels": {}}
    ]
    assert [(r["run"], r["algorithm"]) for r in data["runs"]] == [(3, "fedavg")]
    assert data["expires_at_s"] == fleet.roster.expires_at_s


def test_show_names_expiry_and_no_aggregator(tmp_path, capsys, monkeypatch):
    """Show says that a roster has expired and that an aggregator is missing."""
    fleet = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://h")
    monkeypatch.setattr(time, "time", lambda: fleet.roster.expires_at_s + 1.0)
    main.show(fleet.path)
    lines = capsys.readouterr().out.splitlines()
    assert ", expired 20" in lines[0]
    assert lines[2] == "aggregator -"


def test_added_device_prints_its_grant_alone(fleet, tmp_path, capsys):
    """A device is added and its grant printed alone."""
    newcomer = Identity.generate("dev-2")
    main.add_device(fleet.path, card_file(tmp_path, newcomer), fingerprint(newcomer.member))
    out, err = capsys.readouterr()
    assert out == f"{fleet.path / 'grants' / 'dev-2.grant'}\n"
    assert f"shoal-edge join DIR GRANT --owner {fleet.fingerprint}" in err
    assert "SIGHUP" not in err, "this broker has no users"
    assert FleetDirectory(fleet.path).listed(newcomer.member)


def test_new_keys_travel_as_it_says(fleet, tmp_path, capsys):
    """An added device that changes the keys says how they travel."""
    fleet.take_run()
    card = card_file(tmp_path, Identity.generate("dev-2"))
    main.add_device(fleet.path, card, "")
    after, err = FleetDirectory(fleet.path), capsys.readouterr().err
    assert after.roster.keys_since == after.roster.sequence
    line = f"new keys since roster {after.roster.sequence} for 1 other device and the aggregator"
    assert f"{line}: shoal-fleet publish {fleet.path}, or carry roster.signed and grants/ to them\n" in err
    assert after.secrets.version_secret.hex() not in err
    main.add_device(fleet.path, card, "")
    err = capsys.readouterr().err
    assert "new keys" not in err
    assert f"hand {fleet.path / 'roster.signed'} to the aggregator" in err


@pytest.fixture
def task(fleet, tmp_path):
    write_signed(logistic_bundle(), Source("logistic", {"inputs": 4, "classes": 3}), fleet.owner, tmp_path / "task")
    return tmp_path / "task"


@pytest.fixture
def sign(fleet, task):
    """Call `run` for the fleet's task; nothing may be signed or allocated."""
    before = fleet.secrets

    def call(algorithm="fedavg", **options):
        try:
            runs.start(fleet.path, task, algorithm, **options)
        finally:
            assert list((fleet.path / "runs").iterdir()) == []
            assert FleetDirectory(fleet.path).secrets == before

    return call


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"algorithm": "fedsum"}, ConfigError, "no algorithm 'fedsum'"),
        ({"setting": ["k"]}, UsageError, "'k' is not NAME=VALUE"),
        ({"local": ["lr=fast"]}, UsageError, "lr is a number above 0"),
        ({"pretrain": ["epochs=0"]}, UsageError, "epochs=0 and steps=0 trains nothing"),
        ({"min_contributors": 3}, ConfigError, "min_contributors 3 wants 3 devices"),
        ({"min_contributors": 1, "mode": "rot13"}, ConfigError, "'rot13'"),
    ],
)
def test_impossible_run_is_refused_unsigned(sign, options, error, message):
    """A run that can't work is refused before anything is signed."""
    with pytest.raises(error, match=message):
        sign(**options)


def test_run_under_expired_roster_is_refused(sign, fleet, monkeypatch):
    monkeypatch.setattr(time, "time", lambda: fleet.roster.expires_at_s + 1.0)
    with pytest.raises(ConfigError, match="no device would follow the run"):
        sign(min_contributors=1)


def test_a_task_of_another_owner_is_refused(fleet, tmp_path):
    folder = tmp_path / "foreign"
    write_signed(logistic_bundle(), Source("logistic", {}), Identity.generate("owner"), folder)
    with pytest.raises(UntrustedError, match="not the one that this owner signed"):
        runs.start(fleet.path, folder, "fedavg", min_contributors=1)


class DrawnError(Exception):
    """Ends `run` where it would import torch."""


def test_origins_are_drawn_outside_the_lock(fleet, task, monkeypatch, capsys):
    """The aggregator reads the seed in the plan, and origins must not follow from it."""
    fleet.add_device(device_card(Identity.generate("dev-2")))
    drawn = []

    class Origins:
        @staticmethod
        def make_origins(spec, count, seed, *, manifest, **options):
            with exclusive(fleet.path, wait_s=0, hint="-"):
                pass
            drawn.append((spec, count, seed, manifest.name, options))
            raise DrawnError

    monkeypatch.setitem(sys.modules, "shoal.owner.task_compiler.origin", Origins)
    with pytest.raises(DrawnError):
        runs.start(fleet.path, task, "ifca", setting=["k=2"], min_contributors=2, seed=7)
    assert drawn == [("logistic", 2, None, "logistic", {"inputs": 4, "classes": 3})]
    assert "warning: 2 devices for 2 clusters are fewer than" in capsys.readouterr().err


def test_signed_run_has_the_options(fleet, task, monkeypatch, capsys):
    """A signed run has the options of the command line."""

    class Origins:
        @staticmethod
        def make_origins(_spec, count, _seed, *, manifest, **_options):
            return np.zeros((count, manifest.length), np.float32)

    monkeypatch.setitem(sys.modules, "shoal.owner.task_compiler.origin", Origins)
    options = {
        "rounds": 9, "mode": "rotation", "norm_limit": 5.0, "max_samples": 11, "weight_cap": 2.0, "robust": "rfa",
        "precision_up": "int8", "precision_down": "float16", "min_contributors": 1, "quorum": 0.5, "participation": 0.75,
        "deadline_s": 3.0, "weighting": "uniform", "norm_noise": 0.1, "evaluate_every": 2,
    }  # fmt: skip
    training = {"local": ["lr=0.25"], "pretrain": ["epochs=0", "steps=50"]}
    runs.start(fleet.path, task, "fedavg", **training, **options, seed=5, out=fleet.path / "out.run")
    out, err = capsys.readouterr()
    assert out == f"{fleet.path / 'out.run'}\n"
    assert "next: put this file into the aggregator's runs directory" in err
    (plan,) = signed_plans(FleetDirectory(fleet.path), pytest.fail)
    assert {name: getattr(plan.recipe, name) for name in options} == options
    assert plan.seed == 5
    assert (plan.local.lr, plan.local.epochs) == (0.25, 1)
    assert (plan.pretrain.lr, plan.pretrain.epochs, plan.pretrain.steps) == (0.25, 0, 50), "the rest as local training"


def test_every_command_is_there():
    names = set(typer.main.get_command(main.app).commands)
    assert names == {
        *(
            "init",
            "show",
            "add-device",
            "add-aggregator",
            "add-keeper",
            "add-worker",
            "remove-keeper",
            "remove-worker",
            "renew",
            "task",
            "run",
            "models",
            "schedule",
        ),
        *("status", "report", "backup", "restore", "doctor"),
        *(
            "invite",
            "devices",
            "approve",
            "reject",
            "revoke",
            "rotate",
            "publish",
            "broker-config",
            "replace",
            "rename",
            "label",
        ),
        "replace-aggregator",
    }


def test_program_hides_memory_and_is_named(monkeypatch):
    """It holds the owner's key and the mask secret."""
    seen = []
    monkeypatch.setattr(main, "run_program", lambda app, *, prog, secret: seen.append((app, prog, secret)))
    main.main()
    assert seen == [(main.app, "shoal-fleet", True)]
