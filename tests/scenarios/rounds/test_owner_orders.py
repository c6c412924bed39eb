"""The owner pauses, resumes and stops a run through the broker, in every phase, with a restart of the aggregator after it."""

from __future__ import annotations

import pytest

from aggregator.rounds.state import RunPhase, phase_of
from aggregator.status.answers import RunPage, decoded
from aggregator.status.record import FleetStatus
from edge_client.learning.data import Dataset
from edge_client.storage.finished_models import FinishedModels
from shoal import limits
from shoal.owner.models.files import read_models, write_models
from shoal.protocol.requests import Outcome, RequestAction
from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    grouped_data,
    make_exact_fleet,
    restart_aggregator,
    thetas,
)
from tests.helpers.owner_models import reader_of

PAUSE, RESUME, STOP = RequestAction.PAUSE, RequestAction.RESUME, RequestAction.STOP
ROUNDS = 4
WITHIN_S = 200.0


def made(root, tap=None, **options):
    return make_exact_fleet(root, faults=tap, **{"rounds": ROUNDS, "deadline_s": 20.0, "quorum": 1.0, **options})


def restart(fleet):
    restart_aggregator(fleet)
    fleet.settle()


def order(fleet, action, **parts):
    """Send an order for the run, and return it as the aggregator has it now."""
    question = fleet.ask(action, fleet.plan.run, **parts)
    assert question.answer.outcome is Outcome.DONE, question.answer
    (entry,) = decoded(RunPage, question.document()).runs
    return entry


def counted(fleet):
    """Return how many updates each closed round of training has."""
    return [r["contributed"] for r in fleet.records() if not r["final"]]


HELD = "dev-02"


def hold_uploads(fleet, tap, *names):
    return [tap.lose(client=fleet.client_id(name), ending="/up") for name in names]


def bring(fleet, tap, phase):
    """Bring a fleet to a phase, and return a function that lets it go on from there."""
    if phase == "before the first round":
        fleet.kill_device(HELD)
        fleet.settle()
        return lambda: fleet.revive_device(HELD)
    held = (HELD,) if phase in ("an upload missing", "final round") else ("dev-00", "dev-01", HELD)
    if phase == "between rounds":
        order(fleet, PAUSE)
        fleet.run_until(lambda: fleet.closed() == 1, WITHIN_S)
        fleet.kill_device(HELD)
        order(fleet, RESUME)
        fleet.settle()
        return lambda: fleet.revive_device(HELD)
    if phase == "final round":
        fleet.run_until(lambda: fleet.service.state.plan is not None and fleet.service.state.plan.final, WITHIN_S)
    rules = hold_uploads(fleet, tap, *held)
    before = len(fleet.records())
    wanted = 3 - len(held)
    fleet.run_until(
        lambda: fleet.service.state.plan is not None and len(fleet.service.state.received) == wanted, WITHIN_S
    )
    assert len(fleet.records()) == before

    def let_go():
        for rule in rules:
            tap.forgive(rule)

    return let_go


PHASES = {
    "before the first round": RunPhase.GATHERING,
    "no upload": RunPhase.ROUND,
    "an upload missing": RunPhase.ROUND,
    "between rounds": RunPhase.GATHERING,
    "final round": RunPhase.FINAL,
}


@pytest.fixture(params=PHASES)
def at(request, tmp_path, tap):
    """A fleet in each phase; ``let_go`` lets it go on from there."""
    fleet = made(tmp_path, tap)
    with fleet:
        let_go = bring(fleet, tap, request.param)
        assert phase_of(fleet.service.state) is PHASES[request.param]
        yield fleet, let_go, request.param


@pytest.mark.parametrize("restarted", with_long([False, True], True))
def test_a_paused_run_goes_on_where_it_was(at, restarted):
    fleet, let_go, phase = at
    entry = order(fleet, PAUSE)
    assert entry.order == "paused by the owner"
    if restarted:
        restart(fleet)
    let_go()
    closed = len(fleet.records())
    for _ in range(200):
        fleet.step()
    opened = PHASES[phase] in (RunPhase.ROUND, RunPhase.FINAL)
    assert len(fleet.records()) == closed + opened
    assert fleet.finished is (phase == "final round")
    if not fleet.finished:
        status = decoded(FleetStatus, fleet.ask(RequestAction.STATUS).document())
        assert status.run.order == "paused by the owner"
        assert (status.run.missing, status.run.deadline_at_s) == ((), None)
        if restarted:
            restart(fleet)
        order(fleet, RESUME)
    fleet.run(WITHIN_S)
    assert counted(fleet) == [3] * ROUNDS
    assert len(set(thetas(fleet).values())) == 1


@pytest.mark.parametrize(
    ("restarted", "now"),
    with_long([(False, False), (True, False), (False, True), (True, True)], (True, False)),
)
def test_stop_leaves_every_device_its_model(at, restarted, now):
    """A stopped run ends with a final round and every device has its model."""
    fleet, let_go, phase = at
    before = dict(fleet.service.state.received)
    order(fleet, STOP, now=now)
    if restarted:
        restart(fleet)
    if phase == "before the first round":
        assert fleet.finished
        assert fleet.records() == []
        return
    # A stop at once closes the round with the uploads that are there; an open final round waits in any case.
    let_go()
    fleet.run(WITHIN_S)
    records = fleet.records()
    trained = 1 if phase in ("no upload", "an upload missing", "between rounds") else ROUNDS
    assert [r["round"] for r in records] == [*range(1, trained + 1), ROUNDS + 1]
    if now and phase in ("no upload", "an upload missing"):
        assert records[0]["contributed"] == len(before)
    else:
        assert counted(fleet) == [3] * trained
    assert records[-1]["final"]
    assert [e["kind"] for e in records[-1]["events"]] == (["stopped"] if trained < ROUNDS else [])
    assert records[-1]["contributed"] == 3
    models = {name: FinishedModels(fleet.stage.device_dir(name)).standing().models for name in fleet.stage.devices}
    assert all(model.round == ROUNDS + 1 for found in models.values() for model in found)
    assert all(len(found) == 1 for found in models.values())
    assert len(set(thetas(fleet).values())) == 1


def test_longest_run_can_be_stopped(tmp_path):
    """Devices and owner skip from its beginning to its final round, whose number is one above the last."""
    with made(tmp_path, rounds=limits.MAX_ROUNDS, min_contributors=3) as fleet:
        fleet.run_until(lambda: fleet.closed() == 1, WITHIN_S)
        order(fleet, STOP)
        fleet.run(WITHIN_S)
        found = reader_of(fleet).finished_run()
        assert (found.round, found.missing) == (limits.MAX_ROUNDS + 1, {})
        (model,) = found.models
        assert {model.own.state.theta.tobytes()} == set(thetas(fleet).values())
        document = write_models(found, fleet.stage.fleet.path, tmp_path / "models")
        assert read_models(tmp_path / "models", fleet.bundle).keys() == {e["model"] for e in document["models"]}


@pytest.mark.parametrize(
    ("algorithm", "settings", "before"),
    [
        pytest.param("fedgroup", {"groups": "2", "alpha": "3"}, 1, id="fedgroup in its cold start"),
        pytest.param("fedgroup", {"groups": "2", "alpha": "3"}, 3, id="fedgroup", marks=pytest.mark.long),
        pytest.param("ifca", {"k": "2", "restarts": "2", "restart_rounds": "2"}, 3, id="ifca in a restart"),
        pytest.param("cfl", {}, 2, id="cfl", marks=pytest.mark.long),
        pytest.param("cfl", {"path": "on"}, 2, id="cfl with a path"),
        pytest.param("one-shot", {"k": "2"}, 1, id="one-shot"),
        pytest.param("fesem", {"k": "2"}, 2, id="fesem"),
        pytest.param("local", {}, 2, id="local"),
    ],
)
@pytest.mark.parametrize("paused", [pytest.param(False, marks=pytest.mark.long), True])
def test_every_algorithm_ends_early(tmp_path, algorithm, settings, before, paused):
    """A pause first: the final round then offers models from between two rounds."""
    with made(tmp_path, algorithm=algorithm, settings=settings, rounds=9, count=4) as fleet:
        fleet.run_until(lambda: fleet.closed() == before, WITHIN_S)
        if paused:
            order(fleet, PAUSE)
            fleet.run_until(lambda: fleet.service.state.plan is None, WITHIN_S)
        order(fleet, STOP)
        restart(fleet)
        records = fleet.run(WITHIN_S)
        assert (records[-1]["round"], records[-1]["contributed"]) == (10, 4)
        assert len(records) <= before + 2
        assert all(FinishedModels(fleet.stage.device_dir(name)).standing().models for name in fleet.stage.devices)


def test_forbidden_orders_say_why(tmp_path):
    """Orders that a run does not allow are refused and say why; the log has its last rounds."""
    with made(tmp_path) as fleet:
        fleet.run_until(lambda: fleet.closed() == 1, WITHIN_S)
        unknown = fleet.ask(PAUSE, 7)
        assert (unknown.answer.outcome, unknown.answer.reason) == (Outcome.UNKNOWN, "the aggregator has no run 7")
        order(fleet, STOP)
        assert fleet.ask(RESUME, 1).answer.outcome is Outcome.NOT_NOW
        assert fleet.ask(PAUSE, 1).answer.reason == "run 1 was stopped"
        order(fleet, STOP)
        fleet.run(WITHIN_S)
        assert fleet.ask(PAUSE, 1).answer.reason == "run 1 is over"
        assert order(fleet, STOP).phase == "finished"
        page = decoded(RunPage, fleet.ask(RequestAction.LOGS, 1, records=2).document())
        assert [(r.round, r.final) for r in page.records] == [(r["round"], r["final"]) for r in fleet.records()[-2:]]
        assert page.runs[0].phase == "finished"


@pytest.mark.parametrize("algorithm", ["ifca", pytest.param("fedavg", marks=pytest.mark.long)])
def test_undrawn_devices_have_a_model_too(tmp_path, algorithm):
    """No last round of training was planned, in which devices seal checkpoints of all models for those."""
    settings = {"k": "2"} if algorithm == "ifca" else {}
    options = {"participation": 0.34, "rounds": 30, "count": 6, "quorum": 0.5, "min_contributors": 2}
    with made(tmp_path, algorithm=algorithm, settings=settings, **options) as fleet:
        fleet.run_until(lambda: fleet.closed() == 4, WITHIN_S)
        order(fleet, STOP)
        fleet.run(WITHIN_S)
        ended = {n: FinishedModels(fleet.stage.device_dir(n)) for n in fleet.stage.devices}
        fleet.run_until(lambda: all(files.standing().models for files in ended.values()), WITHIN_S)
        assert reader_of(fleet).finished_run().missing == {}


def test_keys_of_a_pause_hold_after_it(tmp_path):
    """Keys that are replaced in a pause are in force after it."""
    with made(tmp_path) as fleet:
        fleet.run_until(lambda: fleet.closed() == 1, WITHIN_S)
        order(fleet, PAUSE)
        fleet.run_until(lambda: fleet.service.state.plan is None, WITHIN_S)
        fleet.stage.fleet.rotate()
        fleet.publish()
        before = fleet.service.state.held.key_version
        restart(fleet)
        order(fleet, RESUME)
        fleet.run(WITHIN_S)
        assert fleet.service.state.held.key_version > before
        assert counted(fleet) == [3] * ROUNDS
        assert len(set(thetas(fleet).values())) == 1


@pytest.mark.parametrize(("restarted", "now"), with_long([(False, False), (True, False), (False, True)], (True, False)))
def test_a_run_that_none_can_do_is_over(tmp_path, restarted, now):
    """Its devices' data do not fit the task: stopped, it waits for nobody, and no device gets a model of it."""
    data = {name: Dataset(batch.x[:, 1:].copy(), batch.y) for name, batch in grouped_data(3).items()}
    with make_exact_fleet(tmp_path / "fleet", data, rounds=9, deadline_s=20.0) as fleet:
        fleet.run_until(lambda: len(fleet.service.state.unavailable) == 3, WITHIN_S)
        order(fleet, STOP, now=now)
        if restarted:
            restart(fleet)
        fleet.run(WITHIN_S)
        assert [(r["contributed"], r["final"]) for r in fleet.records()] == [(0, False), (0, True)]
        assert not any(FinishedModels(fleet.stage.device_dir(name)).models() for name in fleet.stage.devices)
