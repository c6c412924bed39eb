"""Several owner programs at once, and crashes between their steps: each works on the newest state."""

from __future__ import annotations

import dataclasses
import multiprocessing
import os
import time
from pathlib import Path

import numpy as np
import pytest
from cryptography import x509

from aggregator.strategies.fedavg import FedAvg
from crypto.seal.identity import Identity
from crypto.seal.passphrase import Lock
from shoal.errors import ConfigError, IntegrityError
from shoal.membership.grants import AGGREGATOR_ROLE, DEVICE_ROLE, make_card, open_grant
from shoal.owner.broker.config import CA_FILE, CA_KEY_FILE, write_broker_config
from shoal.owner.enrolment.tokens import TokenStore
from shoal.owner.keys.broker_users import USERS_FILE
from shoal.owner.keys.directory import GRANTS, FleetDirectory
from shoal.owner.keys.run_files import RUNS
from shoal.owner.keys.vault import CHANGE_FILE, ROSTER_FILE, SECRETS_FILE
from shoal.owner.runs.plan import RunOptions, draft_plan, make_plan, write_run
from shoal.protocol.documents import DeviceGrant
from shoal.util.files import write_private
from shoal.util.locks import exclusive
from tests.helpers.fleets import FULL_BATCH
from tests.helpers.tasks import logistic_bundle

BUNDLE = logistic_bundle()
SPAWN = multiprocessing.get_context("spawn")
PROGRAMS = 3


@pytest.fixture
def devices():
    return {name: Identity.generate(name) for name in ("dev-1", "dev-2")}


@pytest.fixture
def fleet(tmp_path, devices):
    made = FleetDirectory.create(tmp_path / "owner", "reef", "mqtts://broker.example")
    made.add_aggregator(make_card(Identity.generate("aggregator"), AGGREGATOR_ROLE))
    for identity in devices.values():
        made.add_device(make_card(identity, DEVICE_ROLE))
    return made


def opened(fleet, identity):
    """Open the grant file of a device in the owner's directory."""
    data = (fleet.path / GRANTS / f"{identity.name}.grant").read_bytes()
    return open_grant(identity, data, DeviceGrant, fleet.fingerprint)


class PowerCutError(BaseException):
    """Nothing of ours catches it."""


def cut(*_):
    raise PowerCutError


OPTIONS = RunOptions("fedavg", rounds=4, epoch_rounds=2, local=FULL_BATCH, min_contributors=1)


def sign(fleet):
    plan = make_plan(fleet, BUNDLE, OPTIONS)
    return plan, write_run(fleet, plan, BUNDLE, np.zeros((plan.origins, BUNDLE.length), np.float32))


def create(path, start):
    start.wait(60)
    try:
        print_ = FleetDirectory.create(path, "reef", "mqtt://x").fingerprint
    except ConfigError as error:
        print_ = str(error)
    (path.parent / f"said-{os.getpid()}").write_text(print_)


@pytest.mark.slow
def test_of_several_inits_at_once_one_makes_the_fleet_and_the_others_are_refused(tmp_path):
    path, start = tmp_path / "owner", SPAWN.Barrier(PROGRAMS)
    programs = [SPAWN.Process(target=create, args=(path, start)) for _ in range(PROGRAMS)]
    for program in programs:
        program.start()
    for program in programs:
        program.join(60)
    said = [p.read_text() for p in tmp_path.glob("said-*")]
    assert said.count(FleetDirectory(path).fingerprint) == 1
    assert sum("holds a fleet already" in text for text in said) == PROGRAMS - 1


def test_an_init_beside_another_waits_and_then_looks(tmp_path, monkeypatch):
    """Neither writes a file while the other has the directory."""
    monkeypatch.setattr("shoal.owner.keys.directory.CHANGE_WAIT_S", 0.1)
    path = tmp_path / "owner"
    path.mkdir()
    with exclusive(path, wait_s=0, hint="-"), pytest.raises(ConfigError, match="in use by another program"):
        FleetDirectory.create(path, "reef", "mqtt://x")
    assert {p.name for p in path.iterdir()} == {".lock"}


def test_a_crash_before_the_grants_are_written_is_made_good_when_the_directory_is_opened(fleet, devices, monkeypatch):
    """All remaining grant files have the new secrets, and the revoked device's file is removed."""
    with monkeypatch.context() as patched:
        patched.setattr(fleet, "_finish_change", cut)
        with pytest.raises(PowerCutError):
            fleet.revoke("dev-1")
    again = FleetDirectory(fleet.path)
    assert again.roster.revoked == ("dev-1",)
    assert opened(again, devices["dev-2"]).content_key == again.secrets.content_key
    assert not (fleet.path / GRANTS / "dev-1.grant").exists()
    assert not (fleet.path / CHANGE_FILE).exists()


def test_reading_does_not_wait_and_sees_a_whole_change(fleet, monkeypatch):
    """The journal counts as soon as it is written, even while its program still writes grants under the lock."""
    before = fleet.secrets
    with monkeypatch.context() as patched:
        patched.setattr(
            "shoal.owner.keys.vault.write_private",
            lambda f, data: write_private(f, data) if f.name == CHANGE_FILE else cut(),
        )
        with pytest.raises(PowerCutError):
            fleet.rotate()
    with exclusive(fleet.path, wait_s=0, hint="-"):
        began = time.monotonic()
        seen = FleetDirectory(fleet.path)
        assert time.monotonic() - began < 5
        assert seen.secrets.broadcast_key != before.broadcast_key
        assert seen.roster.keys_since == seen.roster.sequence
        assert (fleet.path / CHANGE_FILE).exists()
    assert FleetDirectory(fleet.path).secrets == seen.secrets
    assert not (fleet.path / CHANGE_FILE).exists()


def test_reading_writes_nothing(fleet):
    """Leftovers of a killed program are removed by the next change, so that `show` works on a read-only disk."""
    leftover = fleet.path / f".{SECRETS_FILE}.4194000.new"
    leftover.write_bytes(b"half")
    FleetDirectory(fleet.path)
    assert leftover.exists()
    fleet.renew()
    assert not leftover.exists()


def test_a_runs_number_is_taken_for_good(fleet):
    """Though its file has been moved into the aggregator's directory, or the run was never written."""
    first, path = sign(fleet)
    path.unlink()
    make_plan(fleet, BUNDLE, OPTIONS)
    third, _ = sign(FleetDirectory(fleet.path))
    assert (first.run, third.run) == (1, 3)
    assert third.epoch >= first.epoch + 2 * first.epochs


def test_a_number_that_a_file_has_is_not_given_again(fleet):
    """Put back from a backup that is newer than the secrets."""
    (fleet.path / RUNS / "000007.run").write_bytes(b"x")
    assert sign(fleet)[0].run == 8


@pytest.mark.parametrize("name", ["backup.run", "1.run", "000001.run.old", "-00001.run"])
def test_a_stray_file_among_the_runs_is_nobodys_number(fleet, name):
    (fleet.path / RUNS / name).write_bytes(b"x")
    assert sign(fleet)[0].run == 1
    fleet.rotate()
    fleet.revoke("dev-1")


def test_epochs_are_reserved_for_runs_whose_files_were_moved(fleet):
    """A run in progress may use as many epochs of fresh secrets as it was signed for, even if its file is elsewhere."""
    plan, path = sign(fleet)
    path.unlink()
    fleet.rotate()
    assert fleet.secrets.next_epoch > fleet.secrets.mask_epoch + plan.epochs


def test_a_draft_takes_no_number_and_no_epochs_and_a_bad_option_neither(fleet):
    before = FleetDirectory(fleet.path).secrets
    assert draft_plan(fleet, BUNDLE, OPTIONS).origins == 1
    with pytest.raises(ConfigError):
        make_plan(fleet, BUNDLE, RunOptions("fedavg", settings={"nonsense": "1"}))
    assert FleetDirectory(fleet.path).secrets == before


def test_a_mask_mode_that_the_strategy_does_not_work_in_is_refused(fleet, monkeypatch):
    monkeypatch.setattr(FedAvg, "modes", frozenset({"none"}))
    with pytest.raises(ConfigError, match="fedavg does not work in mask mode permutation"):
        draft_plan(fleet, BUNDLE, OPTIONS)


@pytest.mark.parametrize(
    "changes", [{"weight_cap": 0.5}, {"weight_cap": -3.0}, {"max_samples": 0}, {"max_samples": 2**32}]
)
def test_limits_that_make_no_sense_are_refused_before_anything_is_signed(fleet, changes):
    before = FleetDirectory(fleet.path).secrets
    (name,) = changes
    with pytest.raises(ConfigError, match=name) as caught:
        make_plan(fleet, BUNDLE, dataclasses.replace(OPTIONS, **changes))
    assert caught.value.hint
    assert FleetDirectory(fleet.path).secrets == before


def test_the_plan_has_the_limits_of_the_options(fleet):
    plan = make_plan(fleet, BUNDLE, OPTIONS)
    assert (plan.max_samples, plan.weight_cap) == (100_000, 3.0)
    plan = make_plan(fleet, BUNDLE, dataclasses.replace(OPTIONS, max_samples=7, weight_cap=0.0))
    assert (plan.max_samples, plan.weight_cap) == (7, 0.0)


def test_a_program_that_was_open_before_broker_config_gives_out_users_too(fleet, devices, tmp_path):
    """In grants as in enrolment lines."""
    waiting = FleetDirectory(fleet.path)
    write_broker_config(FleetDirectory(fleet.path), tmp_path / "out")
    users = FleetDirectory(fleet.path).users
    waiting.add_device(make_card(devices["dev-1"], DEVICE_ROLE))
    assert users.password("dev-1") in opened(fleet, devices["dev-1"]).broker
    assert users.password("enrol") in TokenStore(waiting).issue(60, int(time.time())).broker


def test_a_second_broker_config_keeps_the_passwords_and_the_ca_of_the_first(fleet, tmp_path):
    """Though it had opened the directory before there were any."""
    first, second = FleetDirectory(fleet.path), FleetDirectory(fleet.path)
    write_broker_config(first, tmp_path / "a")
    write_broker_config(second, tmp_path / "b")
    for name in ("clients/aggregator.url", "ca.crt"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def configure(path, out, start):
    fleet = FleetDirectory(path)
    start.wait(60)
    write_broker_config(fleet, out)


@pytest.mark.slow
def test_broker_configs_at_once_make_one_ca(fleet, tmp_path):
    start = SPAWN.Barrier(PROGRAMS)
    outs = [tmp_path / f"out-{n}" for n in range(PROGRAMS)]
    programs = [SPAWN.Process(target=configure, args=(fleet.path, out, start)) for out in outs]
    for program in programs:
        program.start()
    for program in programs:
        program.join(60)
        assert program.exitcode == 0
    for out in outs:
        certificates = [x509.load_pem_x509_certificate((out / n).read_bytes()) for n in ("server.crt", "ca.crt")]
        certificates[0].verify_directly_issued_by(certificates[1])
    assert len({(out / "clients" / "dev-1.url").read_bytes() for out in outs}) == 1


@pytest.mark.parametrize("file", [CA_FILE, CA_KEY_FILE])
@pytest.mark.parametrize("damage", ["another", "junk"])
def test_a_ca_whose_files_do_not_fit_is_refused(fleet, tmp_path, file, damage):
    """Before a server's certificate that no device would take is made."""
    write_broker_config(fleet, tmp_path / "out")
    other = FleetDirectory.create(tmp_path / "other", "reef", "mqtts://broker.example")
    other.add_aggregator(make_card(Identity.generate("aggregator"), AGGREGATOR_ROLE))
    write_broker_config(other, tmp_path / "other-out")
    write_private(fleet.path / file, (other.path / file).read_bytes() if damage == "another" else b"junk")
    before = (tmp_path / "out" / "server.crt").read_bytes()
    with pytest.raises(ConfigError, match="broker-ca") as caught:
        write_broker_config(fleet, tmp_path / "out")
    assert "remove both" in caught.value.hint
    assert (tmp_path / "out" / "server.crt").read_bytes() == before


def test_a_damaged_secret_of_the_brokers_users_is_not_taken_for_none(fleet, tmp_path):
    """Everybody's password would change without a word."""
    write_broker_config(fleet, tmp_path / "out")
    write_private(fleet.path / USERS_FILE, b"")
    with pytest.raises(IntegrityError, match=f"{USERS_FILE} is damaged"):
        write_broker_config(fleet, tmp_path / "out")


def test_a_file_under_a_passphrase_that_was_cut_off_is_named(tmp_path):
    path, lock = tmp_path / "owner", Lock(b"correct horse battery")
    FleetDirectory.create(path, "reef", "mqtt://x", lock)
    write_private(path / SECRETS_FILE, (path / SECRETS_FILE).read_bytes()[:40])
    with pytest.raises(IntegrityError, match=f"{SECRETS_FILE} is damaged"):
        FleetDirectory(path, lock)


@pytest.mark.parametrize("file", [SECRETS_FILE, ROSTER_FILE, CHANGE_FILE])
@pytest.mark.parametrize("cut_to", [0, 60])
def test_a_damaged_file_is_named_with_what_to_do(fleet, file, cut_to):
    path: Path = fleet.path / file
    data = path.read_bytes() if path.exists() else b"junk" * 40
    write_private(path, data[:cut_to])
    with pytest.raises(IntegrityError, match=f"{file} is damaged") as caught:
        FleetDirectory(fleet.path)
    assert "backup" in caught.value.hint
