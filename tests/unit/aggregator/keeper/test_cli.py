"""The program shoal-keeper: init, join and status, as a person sees them."""

from __future__ import annotations

import json

from typer.testing import CliRunner

from aggregator.keeper import daemon
from aggregator.keeper.cli import app
from aggregator.keeper.memory import KeeperMemory
from shoal.errors import NotEnrolledError
from shoal.owner.cli.main import app as owner
from shoal.owner.keys.directory import FleetDirectory
from tests.helpers.plans import run_plan

RUN = CliRunner()


def test_a_keeper_joins(tmp_path):
    fleet = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://localhost:1883")
    directory = tmp_path / "keeper"
    assert RUN.invoke(app, ["init", str(directory)]).exit_code == 0
    grant = fleet.add_helper("keeper", (directory / "keeper.card").read_bytes())
    found = RUN.invoke(app, ["join", str(directory), str(grant), "--owner", fleet.fingerprint, "--json"])
    assert json.loads(found.stdout)["data"] == {"fleet": "reef", "keeper": "keeper"}
    assert [keeper.name for keeper in fleet.keepers] == ["keeper"]
    assert "\nkeeper keeper " in RUN.invoke(owner, ["show", str(fleet.path)]).stdout


def test_status_lists_what_was_opened(tmp_path):
    fleet, directory = FleetDirectory.create(tmp_path / "owner", "reef", "mqtt://localhost:1883"), tmp_path / "keeper"
    grant = fleet.add_helper("keeper", daemon.init(directory, "keeper").read_bytes())
    daemon.membership.join(directory, grant.read_bytes(), fleet.fingerprint)
    assert "nothing opened yet" in RUN.invoke(app, ["status", str(directory)]).stdout
    cells = [frozenset({b"a" * 16, b"b" * 16, b"c" * 16})]
    KeeperMemory.load(directory).opening(run_plan(), 4, b"d" * 32, cells).save(directory)
    assert RUN.invoke(app, ["status", str(directory)]).stdout == "run 1 round 4: cells of 3\n"


def test_status_of_no_keeper(tmp_path):
    """Of a directory that holds no keeper it says so, and not that a keeper has lost its memory."""
    assert isinstance(RUN.invoke(app, ["status", str(tmp_path)]).exception, NotEnrolledError)
