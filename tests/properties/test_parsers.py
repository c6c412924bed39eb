"""Every parser of untrusted bytes accepts them or raises a ShoalError, and no other exception.

The table is `tests/properties/parsers/every.py`; `make fuzz` runs the same one for longer.
"""

import logging
import subprocess
import sys
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from shoal.errors import WireError
from shoal.protocol import codec
from tests.helpers.trees import ROOT
from tests.properties.parsers import mutations
from tests.properties.parsers.every import Parser, all_parsers, parcelled, parts_of
from tests.properties.parsers.mutations import attempt, hunt, mutate

NAMES_OF = [
    "topic",
    "broker address",
    "enrolment line",
    "chunk",
    "reassembly",
    "settings of a strategy",
    "envelope head",
    "envelope to a member",
    "envelope to a member, any inside",
    "envelope to the group",
    "checkpoint of a state",
    "certificate of a state",
    "card",
    "notice of receiving keys",
    "grant",
    "renewed grant",
    "signed roster",
    "enrolment request",
    "owner's enrolment",
    "owner's refusal",
    "enrolment statement, proven",
    "owner's presence",
    "announcement, by the aggregator",
    "control, by the aggregator",
    "broadcast",
    "announcement with its models, by the aggregator",
    "mean, by the aggregator",
    "mean, before its announcement",
    "checkpoint, by a device",
    "checkpoint, to a newcomer",
    "run package",
    "stored run",
    "keys for a device",
    "roster for a device",
    "change of a device's roster",
    "device",
    "owner's letter to the aggregator",
    "owner's request to the aggregator",
    "aggregator's answer",
    "aggregator's answer, runs",
    "aggregator's answer, status",
    "aggregator",
    "upload to fedavg",
    "upload to ifca",
    "upload to cfl",
    "upload to fedgroup",
    "upload to fesem",
    "upload to one-shot",
    "upload to local",
    "task bundle",
    "task.toml",
    "onnx graph",
    "an onnx graph's contents",
    "vector in float32",
    "vector in float16",
    "vector in int8",
    "a task's source",
    "data.npz",
    "inputs.npz",
    "data.csv",
    "IDX files",
    "IDX files, packed",
    "owner's owner.key",
    "owner's secrets.bin",
    "owner's receiving.bin",
    "owner's versions.bin",
    "owner's roster.signed",
    "owner's change.journal",
    "owner's broker.key",
    "owner's token",
    "owner's requests.count",
    "device's identity.key",
    "device's receiving.key",
    "device's membership.bin",
    "device's membership.next",
    "device's roster.signed",
    "device's pending.0.bin",
    "device's run.package",
    "device's model.bin",
    "device's finished/list.bin",
    "device's finished/rollback.bin",
    "device's personal choice",
    "a trainer's answer",
    "private values",
    "device's start of a run",
    "device's finished model",
    "device's finished task",
    "device's models/index.bin",
    "device's model state",
    "device's scale",
    "data.csv with names",
    "an image",
    "a file of features",
    "device's status.json",
    "device's birth",
    "server's membership.bin",
    "server's roster.signed",
    "server's roster.least",
    "server's runs/000001.run",
    "server's retained.json",
    "server's orders.json",
    "server's run-000001/run.sqlite",
    "aggregator's snapshot.head where id 1",
    "aggregator's snapshot.state where id 1",
    "aggregator's rounds.record where round 1",
    "aggregator's uploads.header where device 'dev-00'",
    "aggregator's uploads.digest where device 'dev-00'",
    "aggregator's uploads.start where device 'dev-00'",
    "aggregator's uploads.checksum where device 'dev-00'",
    "aggregator's facts.value where name 'plan'",
    "aggregator's facts.value where name 'seed'",
    "configuration file",
    "file under a passphrase",
    "key file",
]
quick = settings(
    deadline=None, max_examples=settings.default.max_examples // 10, suppress_health_check=list(HealthCheck)
)


@pytest.fixture(scope="module")
def parsers(tmp_path_factory):
    """Return name -> parser of all but single messages, which tests/properties/test_codec.py has."""
    logging.disable(logging.CRITICAL)
    yield {p.name: p for p in all_parsers(tmp_path_factory.mktemp("parsers"))}
    logging.disable(logging.NOTSET)


def test_the_table_is_whole(parsers):
    """Every message, every parser named above, and no other: a new parser's name must be added here."""
    messages = {f"message {t.__name__}" for t in codec._BY_KIND.values() if not t.__module__.startswith("tests.")}
    assert set(parsers) == messages | set(NAMES_OF)


def test_each_parser_takes_its_seeds(parsers):
    """Damaged inputs test little unless the undamaged ones are accepted."""
    assert {name: p.name for name, p in parsers.items() if not all(p.takes(s) for s in p.seeds)} == {}
    assert all(p.seeds for p in parsers.values())


@pytest.mark.parametrize("name", NAMES_OF)
@quick
@given(data=st.binary(max_size=120))
def test_any_bytes(parsers, name, data):
    finding = attempt(parsers[name], data)
    assert finding is None, repr(finding.error)


@pytest.mark.parametrize("name", NAMES_OF)
@quick
@given(random=st.randoms(use_true_random=False), which=st.integers(0, 99))
def test_damaged_bytes(parsers, name, random, which):
    parser = parsers[name]
    data = mutate(random, parser.seeds[which % len(parser.seeds)], parser.seeds)
    finding = attempt(parser, data)
    assert finding is None, f"{finding.error!r} on {data.hex()}"


def brittle(data):
    """A parser with two faults, of which one needs two bytes to be right."""
    if len(data) < 3:
        raise WireError("too short")
    if data[:2] == b"OK" and data[2] > 0x80:
        raise KeyError(data[2])
    return data[3] if data[0] == 0 else data[0]


def test_hunt_tells_faults_apart():
    """The check can fail: both faults of a bad parser are found, each once, and the same seed finds the same."""
    parser = Parser("brittle", (b"OK\x01\x02",), brittle)
    runs, found = hunt(parser, Random(7), runs=3000)
    assert runs == 3000
    assert {type(f.error) for f in found} == {KeyError, IndexError}
    assert len(found) == 2
    again = hunt(parser, Random(7), runs=3000)[1]
    assert [f.data for f in found] == [f.data for f in again]


def test_a_refusal_is_no_finding():
    assert attempt(Parser("brittle", (b"",), brittle), b"x") is None


def test_every_kind_of_damage_is_done():
    """Shorter, longer, as long, spliced: none of them leaves all bytes as they were."""
    data, random = bytes(range(64)), Random(1)
    made = [mutate(random, data, (b"other" * 9,)) for _ in range(500)]
    assert {len(m) < 64 for m in made} == {True, False}
    assert any(len(m) > 64 for m in made)
    assert any(b"other" in m for m in made)
    assert sum(m != data for m in made) > 480
    assert mutations.EDITS > 1


def test_parcels_come_apart_again():
    """Parcels are put together and taken apart."""
    assert parts_of(parcelled(b"a", b"", b"bc")) == [b"a", b"", b"bc"]
    assert parts_of(b"\0\0\0\x09ab") == [b"ab"]


def test_the_harness_runs_without_atheris(tmp_path):
    """`make fuzz` on a machine that has none: bounded, and status 0 where nothing is found."""
    command = ["tests/fuzz/fuzz_parsers.py", "--engine", "random", "--seconds", "2", "--seed", "1", "--parser", "chunk"]
    done = subprocess.run(
        [sys.executable, *command, "--keep", tmp_path],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "engine random, 2 s" in done.stdout
    assert "0 findings" in done.stdout.splitlines()[-1]
    assert list(tmp_path.iterdir()) == []
