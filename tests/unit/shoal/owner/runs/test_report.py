"""The report of a run from its directory at the aggregator."""

import json

import pytest
from typer.testing import CliRunner

from shoal.errors import ConfigError
from shoal.owner.cli.main import app
from shoal.owner.runs.report import run_report
from tests.helpers.pages import PagePlace, embedded, names
from tests.helpers.refusals import refused


@pytest.fixture
def directory(tmp_path):
    place = PagePlace(tmp_path, names(4))
    place.close_rounds(7)
    yield tmp_path / "run-000001"
    place.server.close()
    place.store.close()


def test_command_prints_the_files_path(directory, tmp_path):
    """The command writes a report with the stored rounds while the aggregator writes, and prints its path."""
    out = tmp_path / "report.html"
    done = CliRunner().invoke(app, ["report", str(directory), str(out)])
    assert (done.exit_code, done.output.strip()) == (0, str(out))
    assert out.stat().st_mode & 0o777 == 0o644
    data = embedded(out.read_bytes())
    assert (data["title"], data["kind"], data["status"]) == ("reef", "still", None)
    assert (data["runs"][0]["closed"], data["runs"][0]["rounds"]) == (7, 60)
    assert data["runs"][0]["events"][0]["text"] == "cluster 0, children 1+2"
    told = CliRunner().invoke(app, ["report", str(directory), str(out), "--json"])
    assert json.loads(told.stdout)["data"] == {"run": str(directory), "file": str(out), "bytes": out.stat().st_size}


def test_directory_without_run_has_a_hint(tmp_path):
    """A directory without a run is an error with a hint, and no file is written."""
    with refused(ConfigError, "holds no run", hint="server/run-000001"):
        run_report(tmp_path, tmp_path / "report.html")
    assert not (tmp_path / "report.html").exists()
