"""Real programs on bad links, and on brokers that refuse what others take: none of them ends, and each says what is wrong."""

from __future__ import annotations

import dataclasses
import os
import shutil
from contextlib import contextmanager

import pytest

from shoal.errors import BrokerUnreachableError, TakenOverError
from shoal.transport.local_broker import find_mosquitto, free_port
from tests.helpers import waiting
from tests.helpers.bad_links import BadLink
from tests.helpers.calls import call
from tests.helpers.forked_stages import (
    ForkedStage,
    begin,
    write_samples,
)
from tests.helpers.places import mosquitto
from tests.helpers.run_places import LONG_RUN, SLOWLY
from tests.helpers.tasks import logistic_bundle
from tests.helpers.trees import ROOT

pytestmark = [
    pytest.mark.broker,
    pytest.mark.process,
    pytest.mark.timeout(240),
    pytest.mark.skipif(find_mosquitto() is None, reason="mosquitto is not installed"),
]
NAMES = ("dev-0", "dev-1")
WAIT_S = 90.0
WIDE = 40_000
"""Features of a model whose updates take two of the usual chunks."""


@contextmanager
def at_mosquitto(folder, *lines):
    """Run a broker with these lines of configuration, and yield its port."""
    port = free_port()
    with mosquitto(folder, port, f"listener {port} 127.0.0.1", "allow_anonymous true", *lines):
        yield port


@contextmanager
def link(*arguments, **options):
    proxy = BadLink(*arguments, **options)
    try:
        yield proxy
    finally:
        proxy.close()


def until(reached, *programs):
    waiting.until(reached, lambda: "\n".join(f"{p.name}: {p.log.read_text()[-3000:]}" for p in programs), WAIT_S)


def start(stage, folder):
    """Start all programs, and return them by name."""
    programs = {name: stage.start_device(name, folder / f"{name}.npz") for name in NAMES}
    return {"aggregator": stage.start_aggregator(), **programs}


@pytest.mark.parametrize("only_3_1_1", [False, pytest.param(True, marks=pytest.mark.long)])
def test_copied_directories_are_found(tmp_path, only_3_1_1):
    """Of a device and of the aggregator: the program that began later ends, with a status after which units start it again."""
    write_samples(tmp_path, NAMES, 3)
    with (
        at_mosquitto(tmp_path) as port,
        link(port, only_3_1_1=only_3_1_1) as proxy,
        ForkedStage(tmp_path / "s", proxy.url, NAMES, environment=SLOWLY) as stage,
    ):
        run = begin(stage, dataclasses.replace(LONG_RUN, quorum=1.0), logistic_bundle(3)).run
        with stage.copy_to(tmp_path / "copy") as other:
            programs = start(stage, tmp_path)
            until(lambda: stage.closed(run) >= 2, *programs.values())
            shutil.copytree(stage.device_dir("dev-1"), stage.device_dir("copy"))
            copies = [stage.start_device("copy", tmp_path / "dev-1.npz"), other.start_aggregator()]
            until(lambda: all(c.process.poll() is not None for c in copies), *copies, *programs.values())
            for copy in copies:
                assert copy.process.poll() == TakenOverError.exit_code, copy.log.read_text()
            told = copies[0].log.read_text()
            assert "error: another device connected as dev-1" in told
            assert "hint: it began before" in told
        closed = stage.closed(run)
        until(lambda: stage.closed(run) >= closed + 2, programs["dev-1"], programs["aggregator"])
        assert all(program.process.poll() is None for program in programs.values())
        for name in ("dev-1", "aggregator"):
            assert "began later" in programs[name].log.read_text()


@pytest.mark.parametrize(
    ("lines", "limits"),
    [
        (["message_size_limit 100000"], None),
        pytest.param([], {"only_3_1_1": True, "most_bytes": 65_536}, marks=pytest.mark.long),
        pytest.param([], {"only_3_1_1": True, "most_bytes": 20_000}, marks=pytest.mark.long),
        pytest.param(["message_size_limit 9000"], None, marks=pytest.mark.long),
    ],
)
def test_small_packets_are_found_out(tmp_path, lines, limits):
    """It tells its limit to nobody: it refuses a packet, or hangs up."""
    write_samples(tmp_path, NAMES, WIDE)
    with (
        at_mosquitto(tmp_path, *lines) as port,
        link(port, **(limits or {})) as proxy,
        ForkedStage(tmp_path / "s", proxy.url if limits else f"mqtt://127.0.0.1:{port}", NAMES) as stage,
    ):
        options = dataclasses.replace(LONG_RUN, rounds=2, quorum=1.0)
        run = begin(stage, options, logistic_bundle(WIDE)).run
        programs = start(stage, tmp_path)
        until(lambda: stage.finished(run), *programs.values())
        assert all(program.process.poll() is None for program in programs.values())
        for program in programs.values():
            assert "takes no larger packets" in program.log.read_text()


def test_dropping_link_ends_no_program(tmp_path):
    """A link that drops again and again ends no program."""
    write_samples(tmp_path, NAMES, 3)
    with (
        at_mosquitto(tmp_path) as port,
        link(port, life_s=0.5) as proxy,
        ForkedStage(tmp_path / "s", f"mqtt://127.0.0.1:{port}", NAMES, environment=SLOWLY) as stage,
    ):
        run = begin(stage, dataclasses.replace(LONG_RUN, quorum=1.0), logistic_bundle(3)).run
        stage.start_aggregator()
        (tmp_path / "far.toml").write_text(f'[edge]\nbroker = "{proxy.url}"\n')
        for name in NAMES:
            far = ("--config", str(tmp_path / "far.toml")) if name == "dev-1" else ()
            stage.start_device(name, tmp_path / f"{name}.npz", *far)
        device = stage.programs["dev-1"]
        until(lambda: "the broker ends our connections" in device.log.read_text(), device)
        seen = proxy.connections
        until(lambda: proxy.connections >= seen + 2, device)
        assert device.process.poll() is None
        proxy.life_s = None
        closed = stage.closed(run)
        until(lambda: stage.closed(run) >= closed + 2, device)


def test_missing_retention_is_named_by_all(tmp_path):
    """A broker without retained messages is named by every program."""
    write_samples(tmp_path, NAMES, 3)
    with (
        at_mosquitto(tmp_path, "retain_available false") as port,
        ForkedStage(tmp_path / "s", f"mqtt://127.0.0.1:{port}", NAMES) as stage,
    ):
        begin(stage, LONG_RUN, logistic_bundle(3))
        programs = start(stage, tmp_path)
        for program in programs.values():
            until(lambda program=program: program.process.poll() is not None, program)
            assert program.process.poll() == BrokerUnreachableError.exit_code, program.log.read_text()
            assert "keeps no retained messages" in program.log.read_text()
            assert "retain_available true" in program.log.read_text()
        for command in (
            ("shoal-edge", "doctor", stage.device_dir("dev-0")),
            ("shoal-aggregator", "doctor", stage.aggregator_dir),
            ("shoal-fleet", "doctor", stage.fleet.path),
            ("shoal-fleet", "publish", stage.fleet.path),
        ):
            told = call(command[0], [*map(str, command[1:])], ROOT, dict(os.environ))
            assert "keeps no retained messages" in told.out + told.err, command
