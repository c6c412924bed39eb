"""`shoal-fleet report`: the page of a run as a file, as a line and as JSON."""

import json

import pytest
from typer.testing import CliRunner

from shoal.errors import ShoalError
from shoal.owner.cli.main import app
from tests.helpers.fleets import make_fleet


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with make_fleet(tmp_path_factory.mktemp("report") / "fleet", rounds=2) as fleet:
        fleet.run(100)
        yield fleet.stage.aggregator_dir / "run-000001"


def test_the_page_is_written_and_named(run, tmp_path):
    told = CliRunner().invoke(app, ["report", str(run), str(tmp_path / "r.html")])
    assert told.stdout == f"{tmp_path / 'r.html'}\n"
    assert "<!doctype html>" in (tmp_path / "r.html").read_text()


def test_as_json(run, tmp_path):
    told = CliRunner().invoke(app, ["report", str(run), str(tmp_path / "r.html"), "--json"])
    size = (tmp_path / "r.html").stat().st_size
    assert json.loads(told.stdout)["data"] == {"run": str(run), "file": str(tmp_path / "r.html"), "bytes": size}


def test_directory_without_a_run_is_refused(tmp_path):
    told = CliRunner().invoke(app, ["report", str(tmp_path), str(tmp_path / "r.html")])
    assert isinstance(told.exception, ShoalError)
    assert not (tmp_path / "r.html").exists()
