"""`shoal simulate` as a function: options of the experiment, refusals before any work, and the results that are saved."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import typer
from shoal_lab.experiments import cli, figures, registry
from shoal_lab.experiments.common.experiment import Study

from shoal.errors import ConfigError, UsageError
from shoal.report import plot as plots
from shoal.report import record


class Toy:
    """An experiment that remembers its options, and fails for the algorithms in ``broken``."""

    def __init__(self):
        self.ran = []
        self.broken = ()

    def __call__(self, study, options, _progress):
        self.ran.append(options)
        if options.algorithm in self.broken:
            raise ConfigError("broken")
        return study.result(options, accuracy=50.0, clusters=2, rounds=3, cpu_seconds_per_round=0.01, history=[])


def toy_study(runner, **changes):
    values = {"eps": 1.0, "x": "", "y": 0}
    return Study(
        "toy", "a paper", "a toy", ("ifca", "fedavg"), {"ifca": 95.0}, runner, ("mnist",), values=values, **changes
    )


@pytest.fixture
def toy(monkeypatch):
    monkeypatch.setattr(registry, "_added", {})
    made = Toy()
    registry.register(toy_study(made))
    return made


@pytest.fixture
def saved(monkeypatch):
    """Return the documents that are saved, in order; nothing is written."""
    documents = []
    monkeypatch.setattr(
        record, "save", lambda path, document: documents.append((path, json.loads(json.dumps(document))))
    )
    return documents


def algorithms_of(data):
    return [r["algorithm"] for r in data["results"]]


def test_only_rank_0_prints_and_saves(toy, saved, monkeypatch, capsys):
    """A single process of torchrun is rank 0 of 1, and its result says so."""
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "0")
    cli.simulate("toy", save=Path("run.json"), json=True)
    assert json.loads(capsys.readouterr().out)["data"]["world"] == 1
    assert [path.name for path, _ in saved] == ["run.json"]
    monkeypatch.setenv("RANK", "1")
    cli.simulate("toy", save=Path("other.json"), json=True)
    cli.simulate(list_=True)
    assert (len(toy.ran), len(saved)) == (2, 1)
    assert capsys.readouterr().out == ""


def test_other_ranks_errors_name_their_rank(toy, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "1")
    monkeypatch.setenv("RANK", "3")
    toy.broken = ("ifca",)
    with pytest.raises(typer.Exit) as caught:
        cli.simulate("toy", json=True)
    captured = capsys.readouterr()
    assert (caught.value.exit_code, captured.out) == (ConfigError.exit_code, "")
    assert captured.err == "rank 3:\nerror: broken\n"
    monkeypatch.delenv("RANK")
    with pytest.raises(ConfigError, match="broken"):
        cli.simulate("toy", json=True)


def test_a_checkpoint_reaches_resumable_runs(toy, tmp_path):
    registry._added["toy"] = toy_study(toy, resumable=("fedavg",))
    cli.simulate("toy", algorithm="fedavg", checkpoint=tmp_path / "run.npz")
    assert toy.ran[0].checkpoint == tmp_path / "run.npz"
    with pytest.raises(UsageError, match="toy can't save a run of ifca in a checkpoint"):
        cli.simulate("toy", checkpoint=tmp_path / "run.npz")


@pytest.mark.parametrize(
    ("arguments", "message", "hint"),
    [
        ({"settings": ["epps=1"]}, "toy has no setting 'epps' with ifca", "do you mean eps? there are eps, x, y"),
        ({"settings": [" =3"]}, "' =3' is not NAME=VALUE", "write NAME=VALUE"),
        (
            {"algorithm": "all", "checkpoint": "x"},
            "a checkpoint holds one run",
            "run the algorithms one by one, each with its own file",
        ),
    ],
)
def test_nonsense_is_refused_before_a_run(toy, arguments, message, hint):
    with pytest.raises(UsageError) as caught:
        cli.simulate(**{"experiment": "toy", **arguments})
    assert str(caught.value) == message
    assert caught.value.hint.startswith(hint)
    assert toy.ran == []


@pytest.mark.parametrize("option", ["save", "plot"])
def test_outputs_need_a_folder(toy, tmp_path, option):
    with pytest.raises(UsageError, match="there is no folder"):
        cli.simulate("toy", **{option: tmp_path / "none" / "x.png"})
    assert toy.ran == []


def test_a_machine_without_cuda_is_refused(toy, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=SimpleNamespace(is_available=lambda: False)))
    with pytest.raises(ConfigError, match="there is no CUDA device here") as caught:
        cli.simulate("toy", device="cuda")
    assert caught.value.hint == "use --device cpu"
    assert toy.ran == []


def test_all_algorithms_are_one_document(toy, saved, capsys, tmp_path):
    cli.simulate("toy", algorithm="all", json=True, save=tmp_path / "x.json")
    data = json.loads(capsys.readouterr().out)["data"]
    assert (data["experiment"], algorithms_of(data)) == ("toy", ["ifca", "fedavg"])
    assert [algorithms_of(document) for _, document in saved] == [["ifca"], ["ifca", "fedavg"]]
    cli.simulate("toy", save=tmp_path / "y.json")
    path, document = saved[-1]
    assert (path, document["algorithm"]) == (tmp_path / "y.json", "ifca")
    cli.simulate("toy", algorithm="fedavg, ifca", save=tmp_path / "x.json")
    assert algorithms_of(saved[-1][1]) == ["fedavg", "ifca"], "in the order given"


@pytest.mark.parametrize(("asked", "message"), [("ifca,nobody", "no algorithm 'nobody'"), ("ifca,ifca", "twice")])
def test_wrong_algorithms_are_refused(toy, asked, message):
    with pytest.raises(UsageError, match=message):
        cli.simulate("toy", algorithm=asked)
    assert toy.ran == []


def test_a_failure_keeps_earlier_results(toy, saved, tmp_path):
    toy.broken = ("fedavg",)
    with pytest.raises(ConfigError, match="broken"):
        cli.simulate("toy", algorithm="all", save=tmp_path / "x.json")
    assert [algorithms_of(document) for _, document in saved] == [["ifca"]]


@pytest.mark.parametrize(("failures", "status"), [(1, None), (2, ConfigError.exit_code)])
def test_a_failed_save_stops_no_run(toy, monkeypatch, capsys, tmp_path, failures, status):
    """Results are printed, and only the last save decides on the exit status: it holds all of them."""
    calls = []

    def save(path, document):
        calls.append(document)
        if len(calls) <= failures:
            raise ConfigError("the disk is full", hint="make room")

    monkeypatch.setattr(record, "save", save)
    if status is None:
        cli.simulate("toy", algorithm="all", json=True, save=tmp_path / "x.json")
    else:
        with pytest.raises(typer.Exit) as caught:
            cli.simulate("toy", algorithm="all", json=True, save=tmp_path / "x.json")
        assert caught.value.exit_code == status
    out, err = capsys.readouterr()
    assert algorithms_of(json.loads(out)["data"]) == ["ifca", "fedavg"]
    assert err == "error: the disk is full\nhint: make room\n" * failures


def test_a_failed_figure_comes_after_results(toy, monkeypatch, capsys, tmp_path):
    drawn = []

    def plot(results, path, figure):
        drawn.append((len(results), path, figure))
        raise UsageError("nothing to draw")

    monkeypatch.setattr(plots, "check", lambda _: None)
    monkeypatch.setattr(figures, "plot", plot)
    with pytest.raises(typer.Exit) as caught:
        cli.simulate("toy", algorithm="all", json=True, plot=tmp_path / "x.png")
    assert caught.value.exit_code == ConfigError.exit_code
    assert drawn == [(2, tmp_path / "x.png", "accuracy")]
    out, err = capsys.readouterr()
    assert json.loads(out)["ok"]
    assert err == "error: nothing to draw\n"
