"""The end of a run: every device stores its final model and is answered, also if programs are killed meanwhile."""

import pytest
from shoal_lab.loopback.transport import Hop

from edge_client.protocol.round_state import Stage
from edge_client.storage.state import DeviceState
from shoal.protocol.messages import Action
from tests.helpers.fleets import (
    answers,
    make_exact_fleet,
    restart_aggregator,
    restart_device,
    thetas,
    uploads_of,
)
from tests.helpers.power_cuts import PowerCut

FINAL = 4
"""The standard small fleet trains three rounds."""


def until_done(fleet, name):
    fleet.run_until(lambda: fleet.devices[name].runtime.runs_done, 1000)


def stage_of(fleet, name):
    return fleet.devices[name].runtime.session.round.stage


@pytest.mark.parametrize("dies", [False, True])
def test_lost_answer_comes_after_the_end(tmp_path, undisturbed, dies, tap):
    """Also by an aggregator that was killed after it recorded the final round, and restarted."""
    with make_exact_fleet(tmp_path / "fleet", faults=tap, quorum=1.0) as fleet:
        fleet.run_until(lambda: fleet.closed() == FINAL - 1, 100)
        silence = tap.lose(client=fleet.client_id("dev-01"), ending="/ctl", hop=Hop.DOWN)
        records = fleet.run(100)
        assert not fleet.devices["dev-01"].runtime.runs_done
        if dies:
            restart_aggregator(fleet)
            assert fleet.finished
        tap.forgive(silence)
        until_done(fleet, "dev-01")
        assert answers(fleet, tap, "dev-01")[-1].action == Action.ACK
        assert fleet.records() == records
        assert thetas(fleet) == undisturbed


@pytest.mark.parametrize("dies", [False, True])
def test_straggler_is_told_the_run_is_over(tmp_path, undisturbed, dies, tap):
    """It has fetched the model that it ends with all the same."""
    with make_exact_fleet(tmp_path / "fleet", faults=tap, quorum=0.6, deadline_s=5.0) as fleet:
        fleet.run_until(lambda: fleet.closed() == FINAL - 1, 100)
        hold = tap.lose(client=fleet.client_id("dev-01"), ending="/up")
        records = fleet.run(100)
        assert records[-1]["missing"] == ["dev-01"]
        if dies:
            restart_aggregator(fleet)
        tap.forgive(hold)
        until_done(fleet, "dev-01")
        last = answers(fleet, tap, "dev-01")[-1]
        assert (last.action, last.reason) == (Action.REFUSED, "the run is over")
        assert fleet.records() == records
        assert thetas(fleet) == undisturbed


def test_answered_device_sends_nothing_more(tmp_path, tap):
    """There may be no aggregator to answer it again. Its figures are still those of the run that ended."""
    with make_exact_fleet(tmp_path / "fleet", faults=tap) as fleet:
        fleet.run(100)
        sent = len(uploads_of(fleet, tap, "dev-01"))
        figures = DeviceState(fleet.stage.device_dir("dev-01")).load_status()["ended"]["1"]
        fleet.kill_aggregator()
        for _ in range(2):
            restart_device(fleet, "dev-01")
            until_done(fleet, "dev-01")
        for _ in range(1000):
            fleet.step()
        assert len(uploads_of(fleet, tap, "dev-01")) == sent
        assert stage_of(fleet, "dev-01") is Stage.IDLE
        again = DeviceState(fleet.stage.device_dir("dev-01")).load_status()["ended"]["1"]
        assert again == figures


def figures(files):
    """Return a device's status without its session and its connection, which begin anew in each life."""
    return {name: value for name, value in files.load_status().items() if name not in ("session", "connection")}


def test_told_end_counts_in_no_later_life(tmp_path, caplog):
    """Else `run --once` would end at once in every later run: the broker retains the announcement that ended this one."""
    with make_exact_fleet(tmp_path / "fleet") as fleet:
        fleet.run(100)
        fleet.settle()
        told, untold = "dev-01", "dev-02"
        files = {name: DeviceState(fleet.stage.device_dir(name)) for name in (told, untold)}
        before = {name: figures(files[name]) for name in files}
        fleet.devices[told].runtime.remember_end()
        caplog.clear()
        caplog.set_level("INFO")
        for _ in range(2):
            for name in files:
                restart_device(fleet, name)
            until_done(fleet, untold)
            for _ in range(100):
                fleet.step()
            assert fleet.devices[told].runtime.following == fleet.plan.run
            assert not fleet.devices[told].runtime.runs_done
        assert {name: figures(files[name]) for name in files} == before
        assert "run finished" not in caplog.text
        assert caplog.text.count("waiting for the next run") == 2


def cut(fleet, name, files_of, method, when):
    """Let a device die at ``method`` of ``files_of(its state)`` where ``when(runtime)`` holds, and come back."""
    runtime = fleet.devices[name].runtime
    files = files_of(runtime._files)
    real = getattr(files, method)

    def dying(*arguments, **options):
        if when(runtime):
            raise PowerCut
        real(*arguments, **options)

    setattr(files, method, dying)
    with pytest.raises(PowerCut):
        fleet.run(100)
    restart_device(fleet, name)


@pytest.mark.parametrize(
    ("files_of", "method"),
    [(lambda state: state, "save_model"), (lambda state: state.pending, "save")],
    ids=["model", "upload"],
)
def test_power_cut_costs_no_model(tmp_path, undisturbed, files_of, method):
    """At any step: the round's models are still on the broker, and the device repeats its work."""
    with make_exact_fleet(tmp_path / "fleet", quorum=1.0) as fleet:
        cut(fleet, "dev-01", files_of, method, lambda runtime: runtime.session.round.mark.round == FINAL)
        fleet.run(100)
        until_done(fleet, "dev-01")
        assert fleet.model("dev-01").round == FINAL
        assert thetas(fleet) == undisturbed


def test_final_upload_needs_its_model(tmp_path, undisturbed, tap):
    """As a version that wrote the upload first could leave it: the device fetches and stores the model again."""
    with make_exact_fleet(tmp_path / "fleet", faults=tap, quorum=1.0) as fleet:
        fleet.run_until(lambda: fleet.closed() == FINAL - 1, 100)
        tap.lose(client=fleet.client_id("dev-01"), ending="/ctl", hop=Hop.DOWN)
        fleet.run(100)
        fleet.kill_device("dev-01")
        (fleet.stage.device_dir("dev-01") / "finished" / "list.bin").unlink()
        tap.rules.clear()
        fleet.revive_device("dev-01")
        until_done(fleet, "dev-01")
        assert answers(fleet, tap, "dev-01")[-1].action == Action.REFUSED
        assert thetas(fleet) == undisturbed


def test_strategy_is_forgotten_at_the_end(tmp_path):
    """Nothing of a strategy is held behind the end."""
    with make_exact_fleet(tmp_path / "fleet", algorithm="cfl", rounds=4) as fleet:
        fleet.run(100)
        assert fleet.service.state.strategy is None
        restart_aggregator(fleet)
        assert fleet.finished
        assert not list((fleet.stage.aggregator_dir / "run-000001" / "updates").glob("*.f32"))
