"""Every failure that a person can cause: the status of its kind, a line, a hint, and no traceback."""

from __future__ import annotations

import numpy as np
import pytest

from shoal.util.files import exclusive
from tests.cli.conftest import BROKER
from tests.helpers.trees import python


def complaint(transcript, error, hint):
    """Check that stderr has the error and the hint, and stdout nothing."""
    assert transcript.out == ""
    assert f"error: {error}" in transcript.err, transcript.err
    assert f"hint: {hint}" in transcript.err, transcript.err


def test_usage_an_unknown_command(call):
    """Status 2 from the parser."""
    assert "no-such-command" in call("shoal-fleet", "no-such-command", status=2).err


def test_usage_a_setting_without_a_value(call, fleet, task):
    """Status 2 from us."""
    asked = call(
        "shoal-fleet", "run", "start", "owner", "--task", task, "--algorithm", "cfl", "--set", "eps1", status=2
    )
    complaint(asked, "'eps1' is not NAME=VALUE", "write eps1=VALUE")


@pytest.mark.parametrize(
    ("extra", "error"),
    [
        (["--local", "lr=-1"], "lr is a number above 0 and at most 1e+06, not -1.0"),
        (["--local", "batch_size=0"], "local training of batch_size=0 and steps=0 trains nothing"),
        (["--pretrain", "lr=fast"], "lr is a number above 0 and at most 1e+06, not 'fast'"),
    ],
)
def test_usage_local_training(call, fleet, task, extra, error):
    """Status 2: the option's value, not the task, is wrong; and fifty rounds of nothing would say that they finished."""
    asked = call("shoal-fleet", "run", "start", "owner", "--task", task, "--algorithm", "fedavg", *extra, status=2)
    assert f"error: {error}\n" in asked.err


@pytest.mark.parametrize(
    ("extra", "error", "hint"),
    [
        (["--algorithm", "fedsum"], "no algorithm 'fedsum'", "there are cfl, fedavg, fedgroup, fedgrouprox, "),
        (["--algorithm", "cfl", "--set", "epsilon=1"], "cfl has no setting 'epsilon'", "it has "),
        (
            ["--algorithm", "fedgroup", "--set", "groups=x"],
            "setting groups is a whole number or auto, not 'x'",
            "`shoal-fleet run start",
        ),
        (["--algorithm", "fedgroup", "--set", "rcc=x"], "setting rcc is on or off, not 'x'", "`shoal-fleet run start"),
        (["--algorithm", "fedavg", "--mode", "rot13"], "mask mode 'rot13' is not known", "use one of: "),
        (
            ["--algorithm", "ifca", "--set", "k=0"],
            "k is at least 1, or auto",
            "with k=auto the strategy finds it",
        ),
        (
            ["--algorithm", "ifca", "--set", "k=two"],
            "setting k is a whole number or auto, not 'two'",
            "`shoal-fleet run start",
        ),
    ],
)
def test_config_a_run_that_makes_no_sense(call, fleet, task, extra, error, hint):
    """Status 3, before anything is signed."""
    complaint(call("shoal-fleet", "run", "start", "owner", "--task", task, *extra, status=3), error, hint)
    assert list((call.home / "owner/runs").iterdir()) == []


def test_config_a_fleet_twice(call):
    """Status 3: keys are never overwritten."""
    call("shoal-fleet", "init", "owner", "--name", "reef", "--broker", BROKER)
    before = (call.home / "owner/secrets.bin").read_bytes()
    again = call("shoal-fleet", "init", "owner", "--name", "reef", "--broker", BROKER, status=3)
    complaint(again, "owner holds a fleet already", "its keys can't be made again")
    assert (call.home / "owner/secrets.bin").read_bytes() == before


def test_config_a_bad_name(call):
    """Status 3: names stand in topics."""
    made = call("shoal-fleet", "init", "owner", "--name", "Reef/1", "--broker", BROKER, status=3)
    complaint(made, "fleet 'Reef/1' is not a valid name", "use 1 to 64 of a-z")


def test_config_an_unknown_key(call, fleet):
    """Status 3, with the keys that there are."""
    (call.home / "e.toml").write_text('[edge]\nmask_secret = "00"\n')
    made = call("shoal-edge", "run", "dev-1", "--data", "x.npz", "--config", "e.toml", status=3)
    complaint(made, "e.toml: unknown key 'mask_secret' in [edge]", "known keys: ")


def test_threads_that_are_none(call, fleet):
    """Status 3."""
    for count in ("0", "-3"):
        made = call("shoal-edge", "run", "dev-1", "--data", "d.npz", status=3, SHOAL_EDGE_THREADS=count)
        assert f"error: threads must be at least 1, not {count}" in made.err
    told = call("shoal-edge", "run", "--help").out
    for name, default in (("--once", "forever"), ("--log", "info")):
        told_of = told[told.index(f"  {name} ") :]
        assert f"({default})" in told_of[: told_of.index("\n  --")], name


def test_config_secret_that_others_can_read(call, fleet):
    """Status 3, and the command that mends it."""
    (call.home / "dev-1/membership.bin").chmod(0o644)
    made = call("shoal-edge", "status", "dev-1", status=3)
    complaint(made, "dev-1/membership.bin is readable by others (mode 0644)", "chmod 600 dev-1/membership.bin")


@pytest.mark.parametrize("program", ["shoal-edge", "shoal-aggregator"])
def test_not_enrolled(call, program):
    """Status 4 in a directory that has not joined a fleet."""
    complaint(call(program, "status", "nowhere", status=4), "nowhere belongs to no fleet", "run init there")


def test_not_enrolled_as_json(call):
    """With --json the failure is the one object on stdout, and stderr still speaks to people."""
    made = call("shoal-edge", "status", "nowhere", "--json", status=4)
    assert made.error["type"] == "NotEnrolledError"
    assert made.error["hint"].startswith("run init there")
    assert "error: nowhere belongs to no fleet" in made.err


def test_no_fleet(call):
    """Status 4 for the owner, too."""
    complaint(call("shoal-fleet", "show", "nowhere", status=4), "nowhere holds no fleet", "shoal-fleet init DIR")


def test_no_broker_for_the_aggregator(call, fleet):
    """Status 5 if no broker answers at the address."""
    assert BROKER in call("shoal-aggregator", "serve", "server", "--once", status=5).err


def test_no_broker_for_a_device(call, fleet):
    """Status 5."""
    np.savez(call.home / "d.npz", x=np.zeros((9, 4), np.float32), y=np.zeros(9, np.int64))
    assert BROKER in call("shoal-edge", "run", "dev-1", "--data", "d.npz", status=5).err


def test_untrusted_another_owner(call, fleet):
    """Status 6 when the grant is not of the owner whose fingerprint was given."""
    wrong = "aaaa-bbbb-cccc-dddd-eeee-ffff"
    made = call("shoal-edge", "join", "dev-1", "owner/grants/dev-1.grant", "--owner", wrong, status=6)
    complaint(made, f"this grant is from owner {fleet}, not {wrong}", "compare the fingerprint")


@pytest.mark.parametrize(
    ("program", "directory", "arguments", "hint"),
    [
        ("shoal-edge", "dev-1", ["run", "dev-1", "--data", "d.npz"], "one `shoal-edge run` serves a device"),
        ("shoal-aggregator", "server", ["serve", "server"], "one `shoal-aggregator serve` serves a fleet"),
    ],
)
def test_config_a_directory_being_served(call, fleet, program, directory, arguments, hint):
    """Status 3 before anything is touched: two programs would undo each other's files."""
    np.savez(call.home / "d.npz", x=np.zeros((9, 4), np.float32), y=np.zeros(9, np.int64))
    with exclusive(call.home / directory, wait_s=0, hint="-"):
        made = call(program, *arguments, status=3)
    complaint(made, f"{directory} is in use by another program", hint)


def test_untrusted_another_card(call, fleet):
    """Status 6 when a card was swapped on its way to the owner."""
    call("shoal-edge", "init", "dev-2", "--name", "dev-2")
    made = call("shoal-fleet", "add-device", "owner", "dev-2/dev-2.card", "--fingerprint", fleet, status=6)
    assert "error: this card has fingerprint" in made.err
    assert [d["name"] for d in call("shoal-fleet", "show", "owner", "--json").data["devices"]] == ["dev-1"]


def test_untrusted_the_wrong_role(call, fleet):
    """Status 6: a device's card can't make an aggregator."""
    made = call("shoal-fleet", "add-aggregator", "owner", "dev-1/dev-1.card", status=6)
    complaint(made, "this card asks to be 'device', not 'aggregator'", "add-device takes a device's card")


def test_integrity_a_damaged_grant(call, fleet):
    """Status 7 when the bytes are not a grant at all."""
    (call.home / "g").write_bytes(b"not a grant")
    assert "error: " in call("shoal-edge", "join", "dev-1", "g", "--owner", fleet, status=7).err


def test_integrity_a_damaged_key_file(call, fleet):
    """Status 7, and where to get it from."""
    path = call.home / "dev-1/identity.key"
    path.write_bytes(path.read_bytes()[:-1])
    complaint(call("shoal-edge", "status", "dev-1", status=7), "dev-1/identity.key is not a key file", "restore it")


def test_integrity_a_short_card(call, fleet):
    """Status 7 for a card that was cut off anywhere."""
    (call.home / "c").write_bytes((call.home / "dev-1/dev-1.card").read_bytes()[:70])
    assert "error: " in call("shoal-fleet", "add-device", "owner", "c", status=7).err


def test_no_model_yet(call, fleet):
    """Status 7: there is nothing to predict with before the first round."""
    np.savez(call.home / "d.npz", x=np.zeros((9, 4), np.float32))
    made = call("shoal-edge", "predict", "dev-1", "--data", "d.npz", status=7)
    complaint(made, "dev-1/model.bin does not exist", "let it take part in a run")


def test_task_a_directory_without_one(call, fleet):
    """Status 8."""
    (call.home / "empty").mkdir()
    made = call("shoal-fleet", "run", "start", "owner", "--task", "empty", "--algorithm", "fedavg", status=8)
    assert "error: " in made.err


@pytest.mark.parametrize(
    ("source", "error"),
    [
        ("missing.npz", "missing.npz does not exist"),
        ("notes.txt", "notes.txt is of no known format"),
        ("empty", "empty holds no data file of a known format"),
    ],
)
def test_data_that_no_task_could_use(call, fleet, source, error):
    """Status 8 at once, and not 5: the device does not connect for a run in which it can't train."""
    (call.home / "notes.txt").write_text("1,2\n")
    (call.home / "empty").mkdir()
    complaint(call("shoal-edge", "run", "dev-1", "--data", source, status=8), error, "give an .npz with x and y")


def test_task_another_owners(call, fleet, task):
    """Status 6: a task that this owner did not sign is not run."""
    path = call.home / task / "task.sig"
    path.write_text("00" * 64)
    made = call("shoal-fleet", "run", "start", "owner", "--task", task, "--algorithm", "fedavg", status=6)
    complaint(made, "the task in task is not the one that this owner signed", "compile it again")


def test_debug_shows_the_traceback(call):
    """Only on request, wherever the flag stands, and with the same status."""
    done = python("from edge_client.cli import main; main()", "status", "nowhere", "--debug")
    assert done.returncode == 4
    assert "Traceback" in done.stderr
    assert "error: nowhere belongs to no fleet" in done.stderr


@pytest.mark.parametrize("command", [("broker-config", "owner"), ("task", "compile", "owner", "linear", "--out")])
@pytest.mark.parametrize(
    ("out", "error"),
    [("owner", "owner lies in the owner's directory"), (".", ". holds other things, such as dev-1")],
)
def test_config_an_output_among_other_files(call, fleet, command, out, error):
    """Status 3: the folder is copied to other machines as a whole."""
    before = sorted(p.name for p in (call.home / "owner").iterdir())
    complaint(call("shoal-fleet", *command, out, status=3), error, "give a separate folder")
    assert sorted(p.name for p in (call.home / "owner").iterdir()) == before


@pytest.mark.torch
@pytest.mark.parametrize(
    ("options", "error", "hint"),
    [
        (("--private", "head"), "no parameter begins with 'head'", "names are: fc.weight, fc.bias"),
        (("--private", "fc"), "all parameters are private (fc.weight, fc.bias)", "name fewer as private"),
        (
            ("--private", "fc.bias", "--shared", "fc"),
            "parameter 'fc.bias' is both shared ('fc') and private",
            "a parameter is averaged over all clusters or stays on its device",
        ),
    ],
)
def test_senseless_private_parameters(call, fleet, options, error, hint):
    """Status 8, and no task is written."""
    pytest.importorskip("torch")
    complaint(
        call("shoal-fleet", "task", "compile", "owner", "logistic", "--out", "task", *options, status=8), error, hint
    )
    assert not (call.home / "task").exists()


@pytest.mark.torch
@pytest.mark.parametrize(
    ("options", "error", "hint"),
    [
        (
            ("--labels", "a,b", "--option", "classes=3"),
            "the task declares 2 labels, and a classification model of this size has 3 classes",
            "give the model as many classes as there are labels",
        ),
        (
            ("--missing", "mean"),
            "missing values can be replaced by the mean only if the task standardises",
            "declare --standardise local",
        ),
        (("--features", "gone.txt"), "the features in gone.txt can't be read", "give the path of a file"),
    ],
)
def test_data_that_make_no_sense(call, fleet, options, error, hint):
    """Status 8, and no task is written."""
    pytest.importorskip("torch")
    complaint(
        call("shoal-fleet", "task", "compile", "owner", "logistic", "--out", "task", *options, status=8), error, hint
    )
    assert not (call.home / "task").exists()


@pytest.mark.torch
def test_usage_sizes_for_a_model_of_ones_own(call, fleet):
    """Status 2: nothing would take them."""
    pytest.importorskip("torch")
    made = call("shoal-fleet", "task", "compile", "owner", "m.py:f", "--out", "task", "--option", "inputs=3", status=2)
    complaint(made, "--option is for built-ins, and m.py:f is not one", "write the sizes into the function")
