"""The race itself: real programs in small, and the rules for those that fail."""

import dataclasses
import sys
from pathlib import Path

import numpy as np
import pytest
from shoal_lab.bench.race import benchmark, environments
from shoal_lab.bench.race.benchmark import SHOAL, Options, Skipped, data, lines, measure
from shoal_lab.bench.race.tasks import TASKS

from shoal.errors import IntegrityError, UsageError

pytestmark = [pytest.mark.torch, pytest.mark.process]
OWN = Options(tasks=("logistic",), systems=(SHOAL, "torch"), rounds=4)
ENDS = "import sys; sys.stdin.readline(); sys.exit('no such device')"


@pytest.fixture
def options(small, bars, monkeypatch, tmp_path):
    """Work of seconds; no peer is installed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return dataclasses.replace(OWN, data_dir=bars)


def answers(cpu_s, accuracy):
    return benchmark._Answers(cpu_s, {"accuracy": accuracy, "peak_mb": 100.0})


def test_shoal_and_plain_torch_do_the_same_work(options):
    told = []
    rows, skipped = measure(options, told.append)
    ours, plain = rows
    assert ([row.system for row in rows], skipped) == ([SHOAL, "torch"], [])
    assert (ours.ratio, len(told)) == (1.0, 5)
    assert plain.ratio > 1
    assert abs(ours.accuracy - plain.accuracy) < 0.04
    assert min(ours.accuracy, plain.accuracy) > 0.9
    assert all(0 < row.cpu_seconds_per_round < 10 and 20 < row.peak_mb < 2000 for row in rows)
    found = data(rows, skipped, options)
    assert {"system", "task", "cpu_seconds_per_round", "ratio"} <= found["rows"][0].keys()
    assert [line.split()[:2] for line in lines(found)[1:]] == [["logistic", SHOAL], ["logistic", "torch"]]


def test_peers_that_are_not_installed_or_whose_program_ends_are_skipped_with_the_reason(options, monkeypatch, tmp_path):
    """The others go on. The reason of a program that ends is the last line that it has written."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -c "{ENDS}"\n')
    python.chmod(0o755)
    find = environments.find
    monkeypatch.setattr(environments, "find", lambda system: python if system == "flower" else find(system))
    asked = dataclasses.replace(options, systems=("pfl-research", "flower", SHOAL), rounds=3)
    rows, skipped = measure(asked, print)
    assert [row.system for row in rows] == [SHOAL]
    (missing,) = [each for each in skipped if each.system == "pfl-research"]
    assert "is not installed in" in missing.reason
    assert "give --install" in missing.reason
    assert {each for each in skipped if each is not missing} == {Skipped("flower", "logistic", "no such device")}
    found = data(rows, skipped, asked)
    assert len([line for line in lines(found) if line.startswith("skipped")]) == 2
    assert found["peers"]["pfl-research"][0].startswith("pfl==")


def test_a_peer_that_does_not_answer_is_skipped(options, monkeypatch, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 60\n")
    python.chmod(0o755)
    monkeypatch.setattr(environments, "find", lambda _system: python)
    stopped = []
    monkeypatch.setattr(benchmark, "ROUND_S", 0.2)
    monkeypatch.setattr(benchmark, "END_S", 0.2)
    with benchmark._program("flower", python, Path("none"), TASKS["mlp"], 1) as running:
        try:
            running.round()
        except benchmark._StoppedError as error:
            stopped.append(str(error))
    assert stopped == ["no answer within 0.2 s"]


def test_shoal_must_not_fail(options, monkeypatch):
    monkeypatch.setitem(benchmark.SYSTEMS, SHOAL, "none")
    with pytest.raises(IntegrityError, match=r"Shoal's simulator failed on logistic: .*No module named"):
        measure(options, print)


def test_a_ratio_is_the_median_of_rounds_and_the_first_rounds_do_not_count():
    rows = benchmark._rows(
        TASKS["mlp"], {SHOAL: answers([9.0, 1.0, 2.0, 1.0], 0.9), "torch": answers([1.0, 3.0, 4.0, 5.0], 0.88)}
    )
    assert [(row.cpu_seconds_per_round, row.ratio) for row in rows] == [(1.0, 1.0), (4.0, 3.0)]


def test_systems_that_do_not_learn_the_same_do_not_do_the_same_work():
    """A model that has learnt nothing agrees with any other that has not."""
    with pytest.raises(IntegrityError, match=r"torch is 10\.0 points from Shoal on mlp"):
        benchmark._rows(TASKS["mlp"], {SHOAL: answers([1.0] * 3, 0.9), "torch": answers([1.0] * 3, 0.8)})
    with pytest.raises(IntegrityError, match="Shoal's mlp has learnt nothing"):
        benchmark._rows(TASKS["mlp"], {SHOAL: answers([1.0] * 3, 0.1), "torch": answers([1.0] * 3, 0.1)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tasks": ("lstm",)}, "no task 'lstm'"),
        ({"systems": (SHOAL, "fedml")}, "no system 'fedml'"),
        ({"systems": ("torch",)}, "times are compared with Shoal's"),
        ({"rounds": 1}, "1 rounds"),
    ],
)
def test_senseless_options_are_refused(changes, message):
    with pytest.raises(UsageError, match=message):
        measure(dataclasses.replace(OWN, **changes), print)


def test_work_follows_from_the_seed(small, bars):
    first, again, other = (benchmark.work(TASKS["logistic"], bars, seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.x, again.x)
    np.testing.assert_array_equal(first.theta, again.theta)
    assert not np.array_equal(first.y, other.y)
    assert not np.array_equal(first.theta, other.theta)
