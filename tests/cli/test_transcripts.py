"""Every command of the three programs, as a person calls it: success, one mistake, and ``--json``.

The tables below are stories: steps in an order that makes sense, with real programs and a real broker. The first test compares
them with the commands that the programs have, so a new command needs its three steps. For each step:

- success prints something and ends with status 0;
- a mistake ends with the status of its kind, and says on stderr what is wrong, and nothing on stdout;
- with ``--json`` stdout is one JSON object, whose times are in ISO 8601.

A traceback or a time in another form fails everywhere.
"""

from __future__ import annotations

import importlib
import re
import threading
import time
from dataclasses import dataclass

import numpy as np
import pytest
from typer.main import get_command

from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.runs.plan import make_plan, write_run
from shoal.protocol.documents import Schedule
from shoal.protocol.recipe import LocalTraining, Recipe
from shoal.transport.local_broker import find_mosquitto, start_broker
from shoal.util.files import write_private
from tests.cli.conftest import BROKER as DEAD_BROKER
from tests.cli.conftest import founded
from tests.helpers.places import WAIT_S, Place
from tests.helpers.run_places import SLOWLY
from tests.helpers.tasks import logistic_bundle, samples
from tests.helpers.trees import PROGRAMS, ROOT

OK, JSON, MISTAKE = "success", "--json", "mistake"
KINDS = {OK, JSON, MISTAKE}
OLD_TIMES = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d|\d\d/\d\d/\d{4}")
ISO_8601 = re.compile(r"\d{4}-\d\d-\d\d(T\d\d:\d\d:\d\dZ)?")
MISTAKES = {2, 3, 4, 5, 6, 7, 8, 10, 11}
"""The statuses of all kinds of mistakes that a call can make by itself; 9 takes a full disk."""
PASSPHRASE = "a long passphrase for this test"


@dataclass(frozen=True)
class Step:
    """One call.

    Attributes:
        kind: OK, JSON or MISTAKE.
        command: the program and its command.
        arguments: further words; names in braces stand for values of the story.
        status: its exit status.
        says: a text on stdout, or for a mistake on stderr.
        save: name of the story's value that the last word of stdout becomes.
        file: file that stdout is written to.
        beside: whether the next steps follow while it runs; a step that is not waits for all of these first.
        later: whether what it says may take a while, and the call is repeated until then.
    """

    kind: str
    command: str
    arguments: str = ""
    status: int = 0
    says: str = ""
    save: str = ""
    file: str = ""
    beside: bool = False
    later: bool = False

    def __str__(self):
        return f"{self.command} {self.arguments}".strip()


def ok(command, arguments="", **more):
    return Step(OK, command, arguments, **more)


def as_json(command, arguments="", **more):
    return Step(JSON, command, f"{arguments} --json".strip(), **more)


def mistake(command, arguments="", status=3, **more):
    return Step(MISTAKE, command, arguments, status, **more)


SHARD_SERVE = "shoal-aggregator shard serve"
"""It serves until it is stopped: tests/integration/test_shards_process.py."""

FOUNDING = (
    ok("shoal-fleet init", "owner --name reef --broker {broker}", says="owner ", save="owner"),
    as_json("shoal-fleet init", "other --name other --broker {broker}"),
    mistake("shoal-fleet init", "owner --name reef --broker {broker}", says="holds a fleet already"),
    ok("shoal-aggregator init", "server", says="server/aggregator.card"),
    as_json("shoal-aggregator init", "server-2"),
    mistake("shoal-aggregator init", "notes.txt", says="can't make the directory"),
    ok("shoal-edge init", "dev-1 --name dev-1", says="dev-1/dev-1.card"),
    as_json("shoal-edge init", "dev-2 --name dev-2"),
    mistake("shoal-edge init", "dev-9 --name Bad/Name", says="is not a valid name"),
    ok("shoal-fleet add-aggregator", "owner server/aggregator.card", says="aggregator.grant"),
    as_json("shoal-fleet add-aggregator", "other server-2/aggregator.card"),
    mistake("shoal-fleet add-aggregator", "owner dev-1/dev-1.card", 6, says="asks to be 'device'"),
    ok("shoal-aggregator join", "server owner/grants/aggregator.grant --owner {owner}", says="joined fleet reef"),
    mistake("shoal-aggregator join", "server other/grants/aggregator.grant --owner {owner}", 6, says="error: "),
    ok("shoal-fleet add-device", "owner dev-1/dev-1.card", says="owner/grants/dev-1.grant"),
    as_json("shoal-fleet add-device", "owner dev-2/dev-2.card"),
    mistake("shoal-fleet add-device", "owner notes.txt", 7, says="error: "),
    mistake("shoal-edge join", "dev-1 owner/grants/dev-2.grant --owner {owner}", 6, says="error: "),
    ok("shoal-edge join", "dev-1 owner/grants/dev-1.grant --owner {owner}", says="joined fleet reef as dev-1"),
    as_json("shoal-edge join", "dev-2 owner/grants/dev-2.grant --owner {owner}"),
    ok("shoal-fleet show", "owner", says="fleet reef"),
    as_json("shoal-fleet show", "owner"),
    mistake("shoal-fleet show", "nowhere", 4, says="holds no fleet"),
    ok("shoal-fleet renew", "owner", says="owner/roster.signed"),
    as_json("shoal-fleet renew", "owner"),
    mistake("shoal-fleet renew", "nowhere", 4, says="holds no fleet"),
    ok("shoal-aggregator config", "server", says="dir = server  # flag"),
    as_json("shoal-aggregator config", "server"),
    mistake("shoal-aggregator config", "server --config gone.toml", says="can't read gone.toml"),
    ok("shoal-edge config", "dev-1", says="broker = "),
    as_json("shoal-edge config", "dev-1"),
    mistake("shoal-edge config", "dev-1 --config gone.toml", says="can't read gone.toml"),
    ok("shoal-fleet backup", "owner reef.backup", says="reef.backup: fleet reef"),
    as_json("shoal-fleet backup", "owner reef-2.backup"),
    mistake("shoal-fleet backup", "owner reef.backup", says="exists already"),
    ok("shoal-fleet restore", "again reef.backup --offline", says="new secrets"),
    as_json("shoal-fleet restore", "again-2 reef.backup --offline"),
    mistake("shoal-fleet restore", "again-3 notes.txt", 7, says="error: "),
    ok("shoal-fleet publish", "owner", says="keys for 3"),
    as_json("shoal-fleet publish", "owner"),
    mistake("shoal-fleet publish", "lonely", 5, says="no MQTT broker can be used"),
    ok("shoal-fleet doctor", "owner", says="the newest", beside=True),
    ok("shoal-aggregator doctor", "server", says="accepts the connection", beside=True),
    ok("shoal-edge doctor", "dev-1 --data dev-1.npz", says="accepts the connection", beside=True),
    mistake("shoal-fleet doctor", "nowhere", 10),
    as_json("shoal-fleet doctor", "owner", beside=True),
    as_json("shoal-aggregator doctor", "server", beside=True),
    as_json("shoal-edge doctor", "dev-1 --data dev-1.npz", beside=True),
    mistake("shoal-aggregator doctor", "nowhere", 10),
    mistake("shoal-edge doctor", "nowhere", 10),
    ok("shoal-aggregator backup", "server server.backup", says="server.backup: fleet reef"),
    as_json("shoal-aggregator backup", "server server-2.backup"),
    mistake("shoal-aggregator backup", "server server.backup", says="exists already"),
    ok("shoal-aggregator restore", "server-again server.backup", says="server-again: fleet reef, roster"),
    as_json("shoal-aggregator restore", "server-again-2 server.backup"),
    mistake("shoal-aggregator restore", "server-again-3 notes.txt", 7, says="no backup of an aggregator"),
    ok("shoal-fleet invite", "owner", says="shoal1-", file="line-3"),
    ok("shoal-edge enrol", "dev-3 line-3", says="joined fleet reef as dev-3", beside=True),
    ok("shoal-fleet approve", "owner --all-invited --wait 60", says="dev-3 ", beside=True),
    as_json("shoal-fleet invite", "owner --expires 1h"),
    mistake("shoal-fleet invite", "owner --count 0", 2, says="--count"),
    ok("shoal-fleet invite", "owner", says="shoal1-", file="line-4"),
    as_json("shoal-edge enrol", "dev-4 line-4", beside=True),
    as_json("shoal-fleet approve", "owner --all-invited --wait 60", beside=True),
    mistake("shoal-fleet approve", "owner", 2, says="give fingerprints or --all-invited"),
    mistake("shoal-edge enrol", "dev-5 notes.txt", says="error: "),
    ok("shoal-fleet invite", "owner", says="shoal1-", file="line-6"),
    mistake("shoal-edge enrol", "dev-6 line-6", 4, says="error: ", beside=True),
    ok("shoal-fleet reject", "owner dev-6", says="dev-6 rejected", beside=True),
    ok("shoal-fleet invite", "owner", says="shoal1-", file="line-7"),
    mistake("shoal-edge enrol", "dev-7 line-7", 4, says="error: ", beside=True),
    as_json("shoal-fleet reject", "owner dev-7", beside=True),
    mistake("shoal-fleet reject", "owner dev-8", 2, says="error: ", beside=True),
    mistake("shoal-fleet replace", "owner dev-9", 2, says="dev-9", beside=True),
    ok("shoal-fleet devices", "owner", says="dev-4"),
    as_json("shoal-fleet devices", "owner"),
    mistake("shoal-fleet devices", "lonely", 5, says="no MQTT broker can be used"),
    ok("shoal-fleet rotate", "owner", says="new secrets since roster"),
    as_json("shoal-fleet rotate", "owner"),
    mistake("shoal-fleet rotate", "nowhere", 4, says="holds no fleet"),
    ok("shoal-fleet revoke", "owner dev-4", says="dev-4 revoked by roster"),
    as_json("shoal-fleet revoke", "owner dev-3"),
    mistake("shoal-fleet revoke", "owner dev-9", 2, says="is not in the roster"),
    ok("shoal-fleet invite", "owner", says="shoal1-", file="line-8"),
    ok("shoal-edge enrol", "dev-3-again line-8 --name dev-3", says="joined fleet reef as dev-3", beside=True),
    ok("shoal-fleet replace", "owner dev-3", says="dev-3", beside=True),
    ok("shoal-fleet invite", "owner", says="shoal1-", file="line-9"),
    as_json("shoal-edge enrol", "dev-4-again line-9 --name dev-4", beside=True),
    as_json("shoal-fleet replace", "owner dev-4", beside=True),
    ok("shoal-fleet rename", "owner dev-3 pump", says="dev-3 is shown as pump"),
    as_json("shoal-fleet rename", "owner dev-3 dev-3"),
    mistake("shoal-fleet rename", "owner dev-9 pump", 2, says="dev-9"),
    ok("shoal-fleet label", "owner dev-3 --label site=berlin", says="site=berlin"),
    as_json("shoal-fleet label", "owner dev-3 --label site="),
    mistake("shoal-fleet label", "owner dev-9 --label site=berlin", 2, says="dev-9"),
    ok("shoal-fleet revoke", "owner dev-4", says="dev-4 revoked by roster"),
    as_json("shoal-fleet revoke", "owner dev-3"),
    ok("shoal-fleet broker-config", "owner broker-files", says="broker-files/shoal.conf"),
    as_json("shoal-fleet broker-config", "owner broker-files"),
    mistake("shoal-fleet broker-config", "owner owner", says="lies in the owner's directory"),
    as_json("shoal-aggregator join", "server-2 other/grants/aggregator.grant --owner {other}"),
    ok("shoal-aggregator init", "server-3", says="server-3/aggregator.card"),
    mistake("shoal-fleet replace-aggregator", "other dev-1/dev-1.card", 6, says="error: "),
    ok("shoal-fleet replace-aggregator", "other server-3/aggregator.card", says="aggregator"),
    as_json("shoal-fleet replace-aggregator", "other server-3/aggregator.card"),
    ok("shoal-aggregator shard init", "worker-0 --name worker-0", says="worker-0/worker-0.card"),
    as_json("shoal-aggregator shard init", "worker-1 --name worker-1"),
    mistake("shoal-aggregator shard init", "worker-2 --name Bad/Name", says="is not a valid name"),
    ok("shoal-fleet add-worker", "other worker-0/worker-0.card", says="other/grants/worker-0.grant"),
    as_json("shoal-fleet add-worker", "other worker-1/worker-1.card"),
    mistake("shoal-fleet add-worker", "other dev-1/dev-1.card", 6, says="asks to be 'device'"),
    ok(
        "shoal-aggregator shard join", "worker-0 other/grants/worker-0.grant --owner {other}", says="joined fleet other"
    ),
    as_json("shoal-aggregator shard join", "worker-1 other/grants/worker-1.grant --owner {other}"),
    mistake("shoal-aggregator shard join", "worker-1 other/grants/worker-0.grant --owner {other}", 6, says="error: "),
    mistake(SHARD_SERVE, "nowhere --interface lo", 4, says="belongs to no fleet"),
    ok("shoal-fleet remove-worker", "other worker-0", says="workers left: worker-1"),
    as_json("shoal-fleet remove-worker", "other worker-1"),
    mistake("shoal-fleet remove-worker", "other worker-9", 2, says="worker-9"),
    ok("shoal-fleet add-keeper", "other keeper-1/keeper-1.card", says="keeper-1"),
    as_json("shoal-fleet add-keeper", "other keeper-2/keeper-2.card"),
    mistake("shoal-fleet add-keeper", "other dev-1/dev-1.card", 6, says="error: "),
    ok("shoal-fleet remove-keeper", "other keeper-1", says="keeper"),
    as_json("shoal-fleet remove-keeper", "other keeper-2"),
    mistake("shoal-fleet remove-keeper", "other keeper-9", 2, says="keeper-9"),
)
"""A fleet is made, by files and over the broker."""

COMPILING = (
    ok(
        "shoal-fleet task compile",
        "owner logistic --option inputs=4 --option classes=3 --out task",
        says="15 coordinates",
        beside=True,
    ),
    as_json(
        "shoal-fleet task compile", "owner logistic --option inputs=4 --option classes=3 --out task-2", beside=True
    ),
    mistake(
        "shoal-fleet task compile",
        "owner logistic --option inputs=many --out task-3",
        2,
        says="inputs is a whole number",
    ),
    ok("shoal-fleet task check", "task dev-1.npz", says="dev-1.npz"),
    as_json("shoal-fleet task check", "task dev-1.npz"),
    mistake("shoal-fleet task check", "nowhere dev-1.npz", 8, says="nowhere"),
)
"""Needs torch."""

SERVE, RUN = "shoal-aggregator serve", "shoal-edge run"
DAY_S = 24 * 3600
ALONE = "--once --personal off"
TRAINING = (
    ok(SERVE, "server --once", beside=True),
    ok(RUN, f"dev-1 --data dev-1.npz {ALONE}", beside=True),
    as_json(RUN, f"dev-2 --data dev-2.npz {ALONE}", beside=True),
    mistake(SERVE, "nowhere", 4, says="belongs to no fleet"),
    mistake(RUN, "nowhere --data dev-1.npz", 4, says="belongs to no fleet"),
    ok("shoal-fleet run start", "owner --run 2 --out server/runs/000002.run", says="000002.run"),
    as_json(SERVE, "server --once", beside=True),
    ok(RUN, f"dev-1 --data dev-1.npz {ALONE}", beside=True),
    ok(RUN, f"dev-2 --data dev-2.npz {ALONE}", beside=True),
    ok("shoal-aggregator status", "server", says="run 2: fedavg"),
    as_json("shoal-aggregator status", "server"),
    mistake("shoal-aggregator status", "nowhere", 4, says="belongs to no fleet"),
    ok("shoal-edge status", "dev-1", says="not running since"),
    as_json("shoal-edge status", "dev-1"),
    mistake("shoal-edge status", "nowhere", 4, says="belongs to no fleet"),
    ok("shoal-edge models", "dev-1", says="run 2; finished"),
    as_json("shoal-edge models", "dev-1"),
    mistake("shoal-edge models", "nowhere", 4, says="belongs to no fleet"),
    ok("shoal-edge rollback", "dev-1 1", says="run 1 answers"),
    as_json("shoal-edge rollback", "dev-1 2"),
    mistake("shoal-edge rollback", "dev-1 9", 2, says="no finished model of run 9"),
    ok("shoal-edge predict", "dev-1 --data dev-1.npz"),
    as_json("shoal-edge predict", "dev-1 --data dev-1.npz"),
    mistake("shoal-edge predict", "dev-1 --data gone.npz", 8, says="gone.npz"),
    ok("shoal-edge evaluate", "dev-1 dev-1.npz", says="accuracy "),
    as_json("shoal-edge evaluate", "dev-1 dev-1.npz"),
    mistake("shoal-edge evaluate", "dev-1 notes.txt", 8, says="notes.txt"),
    ok("shoal-edge export", "dev-1 model.onnx", says="model.onnx: cluster 0 of run 2"),
    as_json("shoal-edge export", "dev-1 model.onnx"),
    mistake("shoal-edge export", "nowhere model.onnx", 4, says="belongs to no fleet"),
    ok("shoal-edge personalise", "dev-1 --data dev-1.npz", says="of run 2"),
    as_json("shoal-edge personalise", "dev-1 --cluster"),
    mistake("shoal-edge personalise", "dev-1", 2, says="needs this device's samples"),
    ok("shoal-fleet report", "server/run-000001 run.html", says="run.html"),
    as_json("shoal-fleet report", "server/run-000001 run.html"),
    mistake("shoal-fleet report", "server/run-000009 run.html", says="error: "),
    ok("shoal-fleet models list", "owner", says="run 2: fedavg, 3 rounds; models at the broker"),
    as_json("shoal-fleet models list", "owner"),
    mistake("shoal-fleet models list", "lonely", 5, says="no MQTT broker can be used"),
    ok("shoal-fleet models get", "owner --out models", says="models/model-0.onnx"),
    as_json("shoal-fleet models get", "owner --out models --force"),
    mistake("shoal-fleet models get", "owner --out models", says="holds models already"),
)
"""Two runs, from the first round to the models."""

DRIVING = (
    mistake("shoal-fleet status", "nowhere", 4, says="holds no fleet"),
    ok("shoal-fleet status", "owner", says="running, connected to"),
    as_json("shoal-fleet status", "owner"),
    ok("shoal-fleet run start", "owner --run 1", says="run 1: fedavg"),
    as_json("shoal-fleet run start", "owner --run 1"),
    mistake("shoal-fleet run start", "owner --run 9", 2, says="there is no signed run 9"),
    ok("shoal-fleet run pause", "owner 1", says="paused by the owner"),
    as_json("shoal-fleet run pause", "owner 1"),
    mistake("shoal-fleet run pause", "owner 9", 2, says="the aggregator has no run 9"),
    ok("shoal-fleet run resume", "owner 1", says="run 1: fedavg"),
    as_json("shoal-fleet run resume", "owner 1"),
    mistake("shoal-fleet run resume", "owner 9", 2, says="the aggregator has no run 9"),
    ok("shoal-fleet run list", "owner", says="run 1: fedavg"),
    as_json("shoal-fleet run list", "owner"),
    mistake("shoal-fleet run list", "lonely", says="the fleet has no aggregator yet"),
    ok("shoal-fleet run show", "owner 1", says="run 1: fedavg"),
    as_json("shoal-fleet run show", "owner 1"),
    mistake("shoal-fleet run show", "owner 9", 2, says="there is no run 9"),
    ok("shoal-fleet run stop", "owner 1", says="stopped by the owner"),
    as_json("shoal-fleet run stop", "owner 1"),
    mistake("shoal-fleet run resume", "owner 1", 11, says="run 1 "),
    mistake("shoal-fleet run stop", "owner 9", 2, says="the aggregator has no run 9"),
    ok("shoal-fleet run logs", "owner 1", says=", stopped", later=True),
    as_json("shoal-fleet run logs", "owner 1"),
    mistake("shoal-fleet run logs", "owner 9", 2, says="the aggregator has no run 9"),
    ok("shoal-fleet models rollback", "owner 1", says="to answer with the model of run 1"),
    as_json("shoal-fleet models rollback", "owner --newest"),
    mistake("shoal-fleet models rollback", "owner", 2, says="give the number of a run, or --newest"),
)
"""A run is driven from the owner's machine, while aggregator and devices run."""

ORDERING = tuple(
    step
    for action, says in (("list", "runs 1 to 3"), ("pause", "paused"), ("resume", "runs 1 to 3"), ("stop", "stopped"))
    for step in (
        ok(f"shoal-fleet schedule {action}", "owner", says=says),
        as_json(f"shoal-fleet schedule {action}", "owner"),
        mistake(f"shoal-fleet schedule {action}", "nowhere", 4, says="holds no fleet"),
    )
)
"""A standing order is driven, while the aggregator waits for devices."""

STORIES = {"founding": FOUNDING, "compiling": COMPILING, "training": TRAINING, "driving": DRIVING, "ordering": ORDERING}


def commands(program):
    """Yield each command of a program as its words, without hidden ones."""

    def walk(command, words):
        for name, found in getattr(command, "commands", {}).items():
            if not found.hidden:
                yield from walk(found, (*words, name))
        if not hasattr(command, "commands"):
            yield " ".join(words)

    return walk(get_command(importlib.import_module(PROGRAMS[program]).app), (program,))


@pytest.mark.parametrize("program", ["shoal-fleet", "shoal-aggregator", "shoal-edge"])
def test_every_command_has_its_three_steps(program):
    steps = [step for story in STORIES.values() for step in story]
    for command in commands(program):
        kinds = {MISTAKE} if command == SHARD_SERVE else KINDS
        assert {step.kind for step in steps if step.command == command} == kinds, command


def test_stories_have_every_mistake():
    """The stories call no command that is gone and make every kind of mistake."""
    known = {c for program in ("shoal-fleet", "shoal-aggregator", "shoal-edge") for c in commands(program)}
    steps = [step for story in STORIES.values() for step in story]
    assert {step.command for step in steps} == known
    assert {step.status for step in steps if step.kind == MISTAKE} == MISTAKES


def test_operators_guide_lists_the_statuses():
    table = (ROOT / "docs/operator/troubleshoot.md").read_text().partition("| exit status | meaning |")[2]
    listed = {int(number) for number in re.findall(r"^\| (\d+) \|", table, re.M)}
    assert listed == MISTAKES | {0, 1, 9, 12, 130, 141}


# -------------------------------------------------------------------------------------------------------------- telling


class Story:
    """Carries out the steps of a table in one directory."""

    def __init__(self, call, **values):
        self.call, self.values = call, values
        self.beside = []

    def tell(self, steps):
        for step in steps:
            if not step.beside and self.beside:
                self.wait()
            if step.beside:
                self.begin(step)
            else:
                self.take(step)
        self.wait()

    def begin(self, step):
        """Carry out a step beside the next ones."""
        failed = []

        def work():
            try:
                self.take(step)
            except BaseException as error:  # noqa: BLE001 - raised again in `wait`
                failed.append(error)

        thread = threading.Thread(target=work)
        thread.start()
        self.beside.append((thread, failed))

    def wait(self):
        beside, self.beside = self.beside, []
        for thread, _ in beside:
            thread.join()
        for _, failed in beside:
            if failed:
                raise failed[0]

    def take(self, step):
        words = [word.format(**self.values) for word in (*step.command.split(), *step.arguments.split())]
        end = time.monotonic() + WAIT_S
        while True:
            told = self.call(*words, status=step.status, SHOAL_PASSPHRASE_FILE="pass")
            if not step.later or step.says in told.out or time.monotonic() > end:
                break
        try:
            check(step, told)
        except AssertionError as error:
            raise AssertionError(f"{step}: {error}\n{told.out}{told.err}") from error
        if step.save:
            self.values[step.save] = told.out.split()[-1]
        if step.file:
            (self.call.home / step.file).write_text(told.out)
            (self.call.home / step.file).chmod(0o600)


def check(step, told):
    """Check the form of a call's output."""
    assert not OLD_TIMES.search(told.out + told.err), "a time that is not in ISO 8601"
    if step.kind == OK:
        assert step.says in told.out if step.says else (told.out or told.err)
    elif step.kind == JSON:
        check_times(told.data)
    else:
        # A doctor's failures are its answer.
        assert bool(told.out) is (step.status == 10)
        assert step.says in told.err
        assert "error" in told.err.lower() or step.status == 10


def check_times(value, name=""):
    """Check that everything that is called a time is one in ISO 8601."""
    if isinstance(value, dict):
        for key, item in value.items():
            check_times(item, key)
    elif isinstance(value, list):
        for item in value:
            check_times(item, name)
    elif name.endswith("_at") or name in ("since", "last_seen", "last_upload", "at"):
        assert value is None or ISO_8601.fullmatch(value), f"{name}: {value}"


pytestmark = pytest.mark.timeout(600)
needs_broker = pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed")


@pytest.fixture
def broker(tmp_path):
    with start_broker("mosquitto", tmp_path / "broker") as made:
        yield made.url


@pytest.fixture
def home(call):
    """The directory of the story, with data, a file of something else, and a fleet whose broker is down."""
    for name in ("dev-1", "dev-2"):
        x, y = samples(90, seed=int(name[-1]))
        np.savez(call.home / f"{name}.npz", x=x, y=y)
    (call.home / "notes.txt").write_text("1,2\n")
    (call.home / "pass").write_text(PASSPHRASE)
    (call.home / "pass").chmod(0o600)
    FleetDirectory.create(call.home / "lonely", "lonely", DEAD_BROKER)
    return call.home


def sign(owner, rounds, schedule=None):
    """Sign a run, or a standing order, and return its file."""
    bundle, local = logistic_bundle(), LocalTraining(epochs=1, batch_size=16, lr=0.2)
    recipe = Recipe("fedavg", rounds=rounds, local=local, min_contributors=2, seed=1)
    plan = make_plan(owner, bundle, recipe, schedule=schedule)
    return write_run(owner, plan, bundle, np.zeros((1, bundle.length), np.float32))


@needs_broker
@pytest.mark.broker
def test_a_fleet_is_made(call, home, broker):
    story = Story(call, broker=broker)
    cut = next(i for i, step in enumerate(FOUNDING) if "{other}" in step.arguments)
    story.tell(FOUNDING[:cut])
    story.values["other"] = FleetDirectory(home / "other").fingerprint
    for name in ("keeper-1", "keeper-2"):
        call("shoal-keeper", "init", name, "--name", name)
    story.tell(FOUNDING[cut:])


@pytest.mark.torch
def test_a_task_is_compiled(call, home, fleet):
    pytest.importorskip("torch")
    Story(call).tell(COMPILING)


@needs_broker
@pytest.mark.broker
@pytest.mark.process
def test_runs_are_trained(call, home, broker):
    owner = founded(home, broker, "dev-1", "dev-2")
    write_private(home / "server/runs/000001.run", sign(owner, 3).read_bytes())
    sign(owner, 3)
    Story(call, broker=broker).tell(TRAINING)


@needs_broker
@pytest.mark.broker
@pytest.mark.process
def test_a_run_is_driven(call, home, broker):
    sign(founded(home, broker, "dev-1", "dev-2"), 50_000)
    place = Place(home, **SLOWLY)
    try:
        place.start("serving", "shoal-aggregator", "serve", "server")
        for name in ("dev-1", "dev-2"):
            place.start(name, "shoal-edge", "run", name, "--data", f"{name}.npz", "--personal", "off")
        place.until(lambda: "serving" in place.log("serving"), "serving")
        Story(call, broker=broker).tell(DRIVING)
    finally:
        place.finish()


@needs_broker
@pytest.mark.broker
@pytest.mark.process
def test_a_standing_order_is_driven(call, home, broker):
    owner = founded(home, broker, "dev-1", "dev-2")
    order = Schedule(order=bytes(16), count=3, interval_s=DAY_S, until_s=int(time.time()) + 30 * DAY_S)
    write_private(home / "server/runs/000001.run", sign(owner, 1, order).read_bytes())
    place = Place(home, **SLOWLY)
    try:
        place.start("serving", "shoal-aggregator", "serve", "server")
        place.until(lambda: "serving" in place.log("serving"), "serving")
        Story(call, broker=broker).tell(ORDERING)
    finally:
        place.finish()
