"""Every failure that a person can cause: the status of its kind, a line, a hint, and no traceback."""

from __future__ import annotations

import numpy as np
import pytest

from edge_client import membership as enrolment
from shoal.owner.keys.directory import FleetDirectory
from shoal.util.files import exclusive, write_private
from tests.cli.conftest import BROKER
from tests.helpers.trees import python

START = "shoal-fleet run start owner --task task --algorithm"
COMPILE = "shoal-fleet task compile owner logistic --out made"
EARLIER = "an earlier version of Shoal wrote it"
UNREACHABLE = f"error: no MQTT broker can be used at {BROKER}"


@pytest.fixture
def place(call, fleet, task):
    """A fleet of two devices, a third that asks, a task, samples, and files and folders that are none of these."""
    enrolled = enrolment.init(call.home / "dev-2", "dev-2").read_bytes()
    enrolment.init(call.home / "dev-3", "dev-3")
    FleetDirectory(call.home / "owner").add_device(enrolled)
    np.savez(call.home / "d.npz", x=np.zeros((9, 4), np.float32), y=np.zeros(9, np.int64))
    files = {
        "notes.txt": b"1,2\n",
        "e.toml": b'[edge]\nmask_secret = "00"\n',
        "cut.card": (call.home / "dev-1/dev-1.card").read_bytes()[:70],
        "models/model-0.onnx": b"",
    }
    for name, data in files.items():
        write_private(call.home / name, data)
    (call.home / "empty").mkdir()
    (call.home / "link").symlink_to("gone")
    return call.home


def contents(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


MISTAKES = [
    ("shoal-fleet no-such-command", 2, "no-such-command", ""),
    (f"{START} cfl --set eps1", 2, "error: 'eps1' is not NAME=VALUE", "hint: write eps1=VALUE"),
    (f"{START} fedavg --local lr=-1", 2, "error: lr is a number above 0 and at most 1e+06, not -1.0\n", ""),
    (
        f"{START} fedavg --local batch_size=0",
        2,
        "error: local training of batch_size=0 and steps=0 trains nothing\n",
        "",
    ),
    (f"{START} fedavg --pretrain lr=fast", 2, "error: lr is a number above 0 and at most 1e+06, not 'fast'\n", ""),
    (f"{START} fedgroup --pretrain eta=1", 2, "local training has no 'eta'", ""),
    (f"{START} fedavg --weight-cap 0.5", 2, "error: weight_cap is a number of at least 1, or 0 (off), not 0.5", ""),
    (f"{START} fedavg --weight-cap nan", 2, "error: weight_cap is a number of at least 1, or 0 (off), not nan", ""),
    (f"{START} fedavg --norm-limit inf", 2, "error: norm_limit is a number above 0, not inf", ""),
    (f"{START} fedavg --deadline-s 0", 2, "error: deadline_s is a number above 0, not 0.0", ""),
    (f"{START} fedavg --quorum 1.5", 2, "error: quorum is a number above 0 and at most 1, not 1.5", ""),
    (
        f"{START} fedavg --robust krum",
        2,
        "error: robust is one of off, filter, multi-krum, rfa, centred-clipping, nnm, not 'krum'",
        "",
    ),
    (
        f"{START} fedavg --precision-up eden4",
        2,
        "error: precision_up is one of float32, float16, int8, not 'eden4'",
        "",
    ),
    (f"{START} fedavg --max-samples 0", 2, "error: max_samples is a whole number from 1 to 4294967295, not 0", ""),
    (
        f"{START} fedavg --seed 18446744073709551616",
        2,
        "error: seed is a whole number from 0 to 18446744073709551615, not",
        "",
    ),
    (f"{START} fedavg --rounds 4294967296", 2, "error: rounds is a whole number from 1 to 100000, not 4294967296", ""),
    ("shoal-fleet run pause owner", 2, "", ""),
    ("shoal-fleet run logs owner", 2, "", ""),
    ("shoal-fleet run stop owner 0", 2, "", ""),
    ("shoal-fleet models get owner 0 --out m", 2, "", ""),
    ("shoal-fleet invite owner --expires=31d", 2, "", ""),
    (
        "shoal-edge run --data d.npz dev-1 --log foo",
        2,
        "error: there is no log level 'foo'",
        "hint: one of debug, info, warning, error",
    ),
    (
        "shoal-aggregator serve server --log foo",
        2,
        "error: there is no log level 'foo'",
        "hint: one of debug, info, warning, error",
    ),
    (f"{START} fedsum", 3, "error: no algorithm 'fedsum'", "hint: there are cfl, fedavg, fedgroup, fedgrouprox, "),
    (f"{START} cfl --set epsilon=1", 3, "error: cfl has no setting 'epsilon'", "hint: it has "),
    (
        f"{START} fedgroup --set groups=x",
        3,
        "error: setting groups is a whole number or auto, not 'x'",
        "hint: `shoal-fleet run start",
    ),
    (f"{START} fedgroup --set rcc=x", 3, "error: setting rcc is on or off, not 'x'", "hint: `shoal-fleet run start"),
    (f"{START} fedavg --mode rot13", 3, "error: mask mode 'rot13' is not known", "hint: use one of: "),
    (f"{START} ifca --set k=0", 3, "error: k is at least 1, or auto", "hint: with k=auto the strategy finds it"),
    (
        f"{START} ifca --set k=two",
        3,
        "error: setting k is a whole number or auto, not 'two'",
        "hint: `shoal-fleet run start",
    ),
    (
        f"{START} fedavg",
        3,
        "error: min_contributors 3 wants 3 devices in each mean, and there are 2",
        "hint: lower min_contributors, at the price",
    ),
    (
        f"{START} fedavg --min-contributors 2 --participation 0.5",
        3,
        "error: participation 0.5 draws 1 of 2",
        "hint: raise part",
    ),
    (
        f"{START} ifca --min-contributors 1 --set k=3",
        3,
        "error: k is 3, and there are 2 devices",
        "hint: lower k, or add devices",
    ),
    (
        f"{START} fedgroup --min-contributors 1 --set groups=3",
        3,
        "error: groups is 3, and there are 2 devices",
        "hint: lower groups, or add",
    ),
    (
        f"{START} local",
        3,
        "error: local training gives each device its own model, but --min-contributors",
        "hint: give --min-contributors 1",
    ),
    (
        f"shoal-fleet init owner --name reef --broker {BROKER}",
        3,
        "error: owner holds a fleet already",
        "hint: its keys can't be made again",
    ),
    (
        f"shoal-fleet init other --name Reef/1 --broker {BROKER}",
        3,
        "error: fleet 'Reef/1' is not a valid name",
        "hint: use 1 to 64 of a-z",
    ),
    ("shoal-edge init notes.txt --name dev-1", 3, "can't make the directory notes.txt: File exists", ""),
    ("shoal-edge doctor", 3, "error: dir is not set", ""),
    ("shoal-aggregator doctor", 3, "error: dir is not set", ""),
    (
        "shoal-edge run dev-1 --data x.npz --config e.toml",
        3,
        "error: e.toml: unknown key 'mask_secret' in [edge]",
        "hint: known keys: ",
    ),
    ("shoal-fleet backup owner notes.txt", 3, "notes.txt exists already", ""),
    ("shoal-fleet backup owner link", 3, "link exists already", ""),
    ("shoal-fleet backup owner owner/b", 3, "", "hint: store it on another disk"),
    ("shoal-fleet backup owner b", 3, "the backup is under a passphrase, and there is no terminal to ask at", ""),
    ("shoal-fleet models get owner --out owner/models", 3, "lies in the owner's directory", ""),
    (
        "shoal-fleet models get owner --out models",
        3,
        "error: models holds models already, such as model-0.onnx\n",
        "hint: give another folder, or --force to replace them\n",
    ),
    (
        "shoal-fleet broker-config owner owner",
        3,
        "error: owner lies in the owner's directory",
        "hint: give a separate folder",
    ),
    ("shoal-fleet broker-config owner .", 3, "error: . holds other things, such as ", "hint: give a separate folder"),
    (
        "shoal-fleet task compile owner linear --out owner",
        3,
        "error: owner lies in the owner's directory",
        "hint: give a separate folder",
    ),
    (
        "shoal-fleet task compile owner linear --out .",
        3,
        "error: . holds other things, such as ",
        "hint: give a separate folder",
    ),
    ("shoal-edge enrol dev-9", 3, "line", ""),
    ("shoal-edge enrol dev-9 shoal1-", 3, "line", ""),
    ("shoal-edge enrol dev-9 shoal1-AAAA", 3, "line", ""),
    ("shoal-edge enrol dev-9 shoal1-!!!", 3, "line", ""),
    ("shoal-edge enrol dev-9 nothing", 3, "line", ""),
    ("shoal-edge status nowhere", 4, "error: nowhere belongs to no fleet", "hint: run init there"),
    ("shoal-edge models nowhere", 4, "error: nowhere belongs to no fleet", ""),
    ("shoal-edge rollback nowhere", 4, "error: nowhere belongs to no fleet", ""),
    ("shoal-aggregator status nowhere", 4, "error: nowhere belongs to no fleet", "hint: run init there"),
    ("shoal-fleet show nowhere", 4, "error: nowhere holds no fleet", "hint: shoal-fleet init DIR"),
    ("shoal-fleet models list nowhere", 4, "error: nowhere holds no fleet", ""),
    (
        "shoal-edge status server",
        4,
        "server has no receiving keys: another program or an earlier version of Shoal made it",
        "check that this is the device's directory",
    ),
    ("shoal-aggregator serve server --once", 5, BROKER, ""),
    ("shoal-edge run dev-1 --data d.npz", 5, BROKER, ""),
    ("shoal-fleet devices owner", 5, UNREACHABLE, ""),
    ("shoal-fleet approve owner aaaa", 5, UNREACHABLE, ""),
    ("shoal-fleet publish owner", 5, UNREACHABLE, ""),
    ("shoal-fleet models list owner", 5, UNREACHABLE, ""),
    ("shoal-fleet models get owner --out m", 5, UNREACHABLE, ""),
    (
        "shoal-edge join dev-1 owner/grants/dev-1.grant --owner aaaa-bbbb",
        6,
        "error: this grant is from owner {fleet}, not aaaa-bbbb",
        "hint: compare the fingerprint",
    ),
    (
        "shoal-edge join dev-2 owner/grants/dev-1.grant --owner {fleet}",
        6,
        "this grant is not for the keys of 'dev-2' here",
        "it is for 'dev-1'",
    ),
    ("shoal-fleet add-device owner dev-3/dev-3.card --fingerprint {fleet}", 6, "error: this card has fingerprint", ""),
    (
        "shoal-fleet add-aggregator owner dev-1/dev-1.card",
        6,
        "error: this card asks to be 'device', not 'aggregator'",
        "hint: add-device takes a device's card",
    ),
    ("shoal-edge join dev-1 notes.txt --owner {fleet}", 7, "error: ", ""),
    (
        "shoal-edge join dev-2 owner/roster.signed --owner {fleet}",
        7,
        "owner/roster.signed is damaged, or not what belongs there",
        "shoal-fleet add-device",
    ),
    ("shoal-fleet add-device owner cut.card", 7, "error: ", ""),
    (
        "shoal-edge predict dev-1 --data d.npz",
        7,
        "error: dev-1/model.bin does not exist",
        "hint: let it take part in a run",
    ),
    (
        "shoal-aggregator status dev-1",
        7,
        "dev-1/membership.bin is damaged, or an earlier version of Shoal wrote it: ",
        "check that this is the program's directory",
    ),
    ("shoal-fleet run start owner --task empty --algorithm fedavg", 8, "error: ", ""),
    (
        "shoal-edge run dev-1 --data missing.npz",
        8,
        "error: missing.npz does not exist",
        "hint: give an .npz with x and y",
    ),
    (
        "shoal-edge run dev-1 --data notes.txt",
        8,
        "error: notes.txt is of no known format",
        "hint: give an .npz with x and y",
    ),
    (
        "shoal-edge run dev-1 --data empty",
        8,
        "error: empty holds no data file of a known format",
        "hint: give an .npz with x and y",
    ),
]
TORCH_MISTAKES = [
    (f"{COMPILE} --private head", 8, "error: no parameter begins with 'head'", "hint: names are: fc.weight, fc.bias"),
    (
        f"{COMPILE} --private fc",
        8,
        "error: all parameters are private (fc.weight, fc.bias)",
        "hint: name fewer as private",
    ),
    (
        f"{COMPILE} --private fc.bias --shared fc",
        8,
        "error: parameter 'fc.bias' is both shared ('fc') and private",
        "hint: a parameter is averaged over all clusters or stays on its device",
    ),
    (
        f"{COMPILE} --labels a,b --option classes=3",
        8,
        "error: the task declares 2 labels, and a classification model of this size has 3 classes",
        "hint: give the model as many classes as there are labels",
    ),
    (
        f"{COMPILE} --missing mean",
        8,
        "error: missing values can be replaced by the mean only if the task standardises",
        "hint: declare --standardise local",
    ),
    (
        f"{COMPILE} --features gone.txt",
        8,
        "error: the features in gone.txt can't be read",
        "hint: give the path of a file",
    ),
    (
        "shoal-fleet task compile owner m.py:f --out made --option inputs=3",
        2,
        "error: --option is for built-ins, and m.py:f is not one",
        "hint: write the sizes into the function",
    ),
]


@pytest.mark.parametrize(
    ("words", "status", "error", "hint"),
    [*MISTAKES, *(pytest.param(*row, marks=pytest.mark.torch) for row in TORCH_MISTAKES)],
    ids=[row[0] for row in (*MISTAKES, *TORCH_MISTAKES)],
)
def test_a_mistake_changes_nothing(call, fleet, place, words, status, error, hint):
    """Nothing is signed and nothing is written in the owner's directory, and stdout is empty."""
    if "task compile" in words and status != 3:
        pytest.importorskip("torch")
    before = contents(place / "owner")
    made = call(*words.format(fleet=fleet).split(), status=status)
    assert made.out == ""
    assert error.format(fleet=fleet) in made.err
    assert hint in made.err
    assert contents(place / "owner") == before
    assert not {"made", "m", "b", "dev-9", "other"} & {path.name for path in place.iterdir()}


@pytest.mark.parametrize(
    ("path", "damage", "words", "status", "error", "hint"),
    [
        ("dev-1/membership.bin", lambda path: path.chmod(0o644), "shoal-edge status dev-1", 3,
         "dev-1/membership.bin is readable by others (mode 0644)", "hint: chmod 600 dev-1/membership.bin"),
        ("task/task.sig", lambda path: path.write_text("00" * 64), f"{START} fedavg", 6,
         "error: the task in task is not the one that this owner signed", "hint: compile it again"),
        *((f"{party}/{file}", lambda path: write_private(path, path.read_bytes()[:10]), f"{program} status {party}", 7,
           f"{party}/{file} is damaged, or {wrong}: ", "join again with a grant")
          for program, party in (("shoal-edge", "dev-1"), ("shoal-aggregator", "server"))
          for file, wrong in (("membership.bin", EARLIER), ("roster.signed", "not what belongs there"))),
        ("dev-1/identity.key", lambda path: path.write_bytes(path.read_bytes()[:-1]), "shoal-edge status dev-1", 7,
         "error: dev-1/identity.key is not a key file", "hint: restore it"),
        *((f"owner/{file}", lambda path: write_private(path, b""), "shoal-fleet show owner", 7,
           f"owner/{file} is damaged", "backup") for file in ("roster.signed", "secrets.bin")),
    ],
)  # fmt: skip
def test_a_damaged_file_is_named(call, place, path, damage, words, status, error, hint):
    """With what to do."""
    damage(place / path)
    made = call(*words.split(), status=status)
    assert made.out == ""
    assert error in made.err
    assert hint in made.err


@pytest.mark.parametrize(
    ("words", "status", "kind", "hint"),
    [
        ("shoal-edge status nowhere", 4, "NotEnrolledError", "run init there"),
        ("shoal-aggregator status nowhere", 4, "NotEnrolledError", "run init there"),
        ("shoal-fleet models list owner", 5, "BrokerUnreachableError", "start the broker"),
        ("shoal-fleet run list owner", 5, "BrokerUnreachableError", "start the broker"),
        ("shoal-fleet run pause owner 1", 5, "BrokerUnreachableError", "start the broker"),
    ],
)
def test_a_failure_as_json(call, fleet, words, status, kind, hint):
    """With --json the failure is the one object on stdout, and stderr still speaks to people."""
    made = call(*words.split(), "--json", status=status)
    assert made.error["type"] == kind
    assert made.error["hint"].startswith(hint)
    assert "error: " in made.err


def test_threads_that_are_none(call, fleet):
    """Status 3."""
    for count in ("0", "-3"):
        made = call("shoal-edge", "run", "dev-1", "--data", "d.npz", status=3, SHOAL_EDGE_THREADS=count)
        assert f"error: threads must be at least 1, not {count}" in made.err
    told = call("shoal-edge", "run", "--help").out
    for name, default in (("--once", "forever"), ("--log", "info")):
        told_of = told[told.index(f"  {name} ") :]
        assert f"({default})" in told_of[: told_of.index("\n  --")], name


@pytest.mark.parametrize(
    ("directory", "words", "hint"),
    [
        ("dev-1", "shoal-edge run dev-1 --data d.npz", "one `shoal-edge run` serves a device"),
        ("server", "shoal-aggregator serve server", "one `shoal-aggregator serve` serves a fleet"),
    ],
)
def test_config_a_directory_being_served(call, fleet, data, directory, words, hint):
    """Status 3 before anything is touched: two programs would undo each other's files."""
    with exclusive(call.home / directory, wait_s=0, hint="-"):
        made = call(*words.split(), status=3)
    assert made.out == ""
    assert f"error: {directory} is in use by another program" in made.err
    assert f"hint: {hint}" in made.err


def test_debug_shows_the_traceback(call):
    """Only on request, wherever the flag stands, and with the same status."""
    done = python("from edge_client.cli import main; main()", "status", "nowhere", "--debug")
    assert done.returncode == 4
    assert "Traceback" in done.stderr
    assert "error: nowhere belongs to no fleet" in done.stderr
