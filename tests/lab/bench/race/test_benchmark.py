"""The race itself: programs that take turns, and the rules for those that fail."""

import sys

import pytest
from shoal_lab.bench.race import benchmark
from shoal_lab.bench.race.benchmark import SHOAL, SYSTEMS, measure, program, rows_of, words
from shoal_lab.bench.race.tasks import TASKS

from shoal.errors import IntegrityError

pytestmark = [pytest.mark.torch, pytest.mark.process]
ROUNDS = 3
ANSWERS = """#!/bin/sh
exec {python} -c 'import sys
for line in sys.stdin:
    print("{{\\"cpu_s\\": 2.0}}", flush=True)
    count = locals().get("count", 0) + 1
    if count == {rounds} + 1:
        print("{{\\"accuracy\\": 0.9, \\"peak_mb\\": 50.0}}", flush=True)'
"""
ENDS = "#!/bin/sh\nread line\necho 'no such device' >&2\nexit 3\n"


def answers(cpu_s, accuracy):
    return [*({"cpu_s": seconds} for seconds in cpu_s), {"accuracy": accuracy, "peak_mb": 100.0}]


@pytest.fixture
def scripts(work_file, monkeypatch, tmp_path):
    """A function that makes scripts the Pythons of systems, and races them; no peer is installed."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    find = benchmark.python_of

    def race(texts, systems):
        for name, text in texts.items():
            (tmp_path / name).write_text(text.format(python=sys.executable, rounds=ROUNDS))
            (tmp_path / name).chmod(0o755)
        monkeypatch.setattr(benchmark, "python_of", lambda name: tmp_path / name if name in texts else find(name))
        if SHOAL in texts:
            monkeypatch.setattr(benchmark.sys, "executable", str(tmp_path / SHOAL))
        return measure(tasks=["logistic"], systems=systems, rounds=ROUNDS, progress=print)

    return race


def test_systems_take_turns_or_are_skipped(scripts):
    """One is not installed; the program of another ends, and its last words are the reason."""
    found = scripts({SHOAL: ANSWERS, "flower": ENDS}, ["pfl-research", "flower", SHOAL, "torch"])
    assert [(row["system"], row["ratio"], row["accuracy"]) for row in found["rows"]] == [
        (SHOAL, 1.0, 0.9),
        ("torch", 1.0, 0.9),
    ]
    reasons = {each["system"]: each["reason"] for each in found["skipped"]}
    assert reasons["flower"] == "no such device"
    assert "is not installed in" in reasons["pfl-research"]
    assert "give --install" in reasons["pfl-research"]
    assert found["peers"]["pfl-research"][0].startswith("pfl==")
    assert [line.split()[:2] for line in words(found)[1:3]] == [["logistic", SHOAL], ["logistic", "torch"]]
    assert sum(line.startswith("skipped") for line in words(found)) == 2


def test_shoal_must_not_fail(scripts):
    with pytest.raises(IntegrityError, match="Shoal's simulator failed on logistic: no such device"):
        scripts({SHOAL: ENDS}, [SHOAL])


def test_silent_program_is_ended(monkeypatch, tmp_path):
    (tmp_path / "python").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "python").chmod(0o755)
    monkeypatch.setattr(benchmark, "ROUND_S", 0.1)
    monkeypatch.setattr(benchmark, "END_S", 0.1)
    with (
        program("flower", tmp_path / "python", tmp_path, TASKS["mlp"], 1) as running,
        pytest.raises(benchmark._StoppedError, match=r"no answer within 0\.1 s"),
    ):
        running.round()


def test_ratio_leaves_out_the_first_rounds():
    rows = rows_of("mlp", {SHOAL: answers([9.0, 1.0, 2.0, 1.0], 0.9), "torch": answers([1.0, 3.0, 4.0, 5.0], 0.88)})
    assert [(row["cpu_seconds_per_round"], row["ratio"]) for row in rows] == [(1.0, 1.0), (4.0, 3.0)]


@pytest.mark.parametrize(
    ("ours", "torch", "message"),
    [(0.9, 0.8, r"torch is 10\.0 points from Shoal on mlp"), (0.1, 0.1, "Shoal's mlp has learnt nothing")],
)
def test_systems_must_do_the_same_work(ours, torch, message):
    """A model that has learnt nothing agrees with any other that has not."""
    with pytest.raises(IntegrityError, match=message):
        rows_of("mlp", {SHOAL: answers([1.0] * 3, ours), "torch": answers([1.0] * 3, torch)})


@pytest.mark.long
def test_each_system_learns_as_much(work_file):
    """Ten small devices and three rounds, in batches of ten samples; peers that are not installed are passed over."""
    path, _ = work_file("logistic")
    found = {}
    for system in SYSTEMS:
        try:
            python = benchmark.python_of(system) if system in benchmark.PEERS else sys.executable
        except benchmark.MissingPeerError:
            continue
        with program(system, python, path, TASKS["logistic"], ROUNDS) as running:
            assert all(running.round()["cpu_s"] > 0 for _ in range(ROUNDS))
            found[system] = running.answer()["accuracy"]
    assert found[SHOAL] > 0.9
    assert found == pytest.approx(dict.fromkeys(found, found[SHOAL]), abs=0.04)
