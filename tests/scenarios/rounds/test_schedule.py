"""A standing order: the aggregator starts runs while the owner is away, and devices check each of them."""

import dataclasses
import shutil

import numpy as np
import pytest
from shoal_lab.loopback.fleet import EPOCH_S, LoopbackError, draw_origins

from crypto.seal.identity import sign_document
from edge_client.learning.data import Dataset
from edge_client.membership import init, join
from edge_client.storage.finished_models import FinishedModels
from shoal.errors import WireError
from shoal.membership.grants import open_card
from shoal.protocol.chunking import ChunkKind
from shoal.protocol.codec import decode, encode
from shoal.protocol.documents import RunPackage, Schedule
from shoal.protocol.requests import Outcome, RequestAction
from shoal.protocol.topics import Topics
from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    CLASSES,
    FULL_BATCH,
    INPUTS,
    aggregator_identity,
    make_fleet,
    names,
    reasons,
    restart_device,
    same_partition,
    tell,
    thetas,
    truth_of,
)
from tests.helpers.plans import a_recipe
from tests.scenarios.hostile.lying_devices import Liar, lies_of, paths
from tests.scenarios.revocation.test_schedule_keys import next_run, renew, replace_aggregator

DAY_S = 24 * 3600


def a_schedule(count=3, interval_s=DAY_S, days=30):
    return Schedule(order=bytes(range(16)), count=count, interval_s=interval_s, until_s=EPOCH_S + days * DAY_S)


@pytest.fixture
def fleet(tmp_path):
    """Three devices that have done the first run of an order."""
    with make_fleet(
        tmp_path / "fleet", rounds=2, quorum=1.0, min_contributors=2, deadline_s=5.0, schedule=a_schedule()
    ) as found:
        found.run(100)
        yield found


def package_of(fleet, run=1):
    return decode((fleet.stage.aggregator_dir / "runs" / f"{run:06d}.run").read_bytes(), RunPackage)


def offer(fleet, package):
    """Publish a run package as the aggregator; return which run each device follows then."""
    tell(fleet, Topics("demo").plan, "run", encode(package), ChunkKind.PLAN)
    fleet.settle()
    return {device.runtime.following for device in fleet.devices.values()}


def told_of(fleet):
    """Return the models that devices hold after the run, as the aggregator has heard."""
    return next(iter(fleet._watch.held.values()))


def second(fleet, **changes):
    """Return the package of the second run, as the aggregator makes it, with ``changes``."""
    held = told_of(fleet)
    made = {"turn": 1, "models": held.models, "before": held.run, "transcript": held.transcript, "origins": b""}
    return dataclasses.replace(package_of(fleet), **{**made, **changes})


def test_runs_follow_each_other(fleet):
    first, ended_s = fleet.records(), fleet.now_s
    again = next_run(fleet)
    assert fleet.now_s - ended_s >= DAY_S
    assert fleet.plan.run == 2
    assert again[0]["loss"] < first[0]["loss"], "it begins where the first one ended"
    next_run(fleet)
    assert len(set(thetas(fleet).values())) == 1
    entry = fleet.standing.entry()
    assert (entry.begun, entry.waits) == (3, "all of its 3 runs have begun")
    assert not fleet.standing.begin_next()


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"turn": 0}, None),
        ({"turn": 3}, "the turn of a scheduled run is from 0 to 2, not 3"),
        ({"before": 0}, "this device has those of run 1"),
        ({"models": 2}, "a run plan with 2 origins and 1 models"),
    ],
    ids=["repeated", "one-too-many", "older-models", "too-many-models"],
)
def test_a_false_turn_is_refused(fleet, caplog, changes, reason):
    fleet.rest(DAY_S)
    assert offer(fleet, second(fleet, **changes)) == {1}
    assert reason is None or any(reason in text for text in reasons(caplog))
    assert offer(fleet, second(fleet)) == {2}, "a true one is taken"


def test_an_early_run_is_refused(fleet, caplog):
    """Also by a device that was started again meanwhile, and by one whose clock is a day ahead."""
    fleet.rest(DAY_S / 4)
    restart_device(fleet, "dev-00")
    fleet.devices["dev-01"].runtime._clock_s = lambda: EPOCH_S + fleet.now_s + DAY_S
    assert offer(fleet, second(fleet)) == {1}
    assert [text for text in reasons(caplog) if "after the end of the last one" in text]


def test_a_late_run_is_refused(fleet, caplog):
    fleet.rest(31 * DAY_S)
    assert offer(fleet, second(fleet)) == {1}
    assert any("run 2 of a standing order that is over" in text for text in reasons(caplog))
    assert fleet.standing.entry().waits == "its time is over"


@pytest.mark.parametrize("change", [{"run": 7}, {"key_version": 9}, {"recipe": None}, {"count": 9}])
def test_a_forged_order_is_refused(fleet, caplog, change):
    """The aggregator signs another order with its own key: with other numbers, keys, choices, or more runs."""
    fleet.rest(DAY_S)
    plan = fleet.plan
    if "count" in change:
        change = {"schedule": dataclasses.replace(plan.schedule, **change)}
    if "recipe" in change:
        change = {"recipe": dataclasses.replace(plan.recipe, mode="none")}
    forged = sign_document(aggregator_identity(fleet), dataclasses.replace(plan, **change))
    assert offer(fleet, second(fleet, plan=forged)) == {1}
    assert "the signature on this document/RunPlan is not its sender's" in reasons(caplog)[0]


def test_turns_of_no_order(fleet):
    assert fleet.plan.at_turn(0, 1) is fleet.plan
    later = fleet.plan.at_turn(2, 1)
    assert (later.run, later.run_id, later.origins) == (3, fleet.plan.schedule.run_id(2), 1)
    for plan in (later, dataclasses.replace(fleet.plan, schedule=None)):
        with pytest.raises(WireError, match="no standing order"):
            plan.at_turn(1, 1)
    with pytest.raises(WireError, match="not its order's"):
        dataclasses.replace(fleet.plan, run_id=bytes(16))


def test_a_device_that_missed_runs(fleet):
    """It lacks the models of the run before, takes a certified checkpoint, and ends with the others' model."""
    fleet.kill_device("dev-02")
    next_run(fleet)
    fleet.revive_device("dev-02")
    records = next_run(fleet)
    assert fleet.plan.run == 3
    assert [record["contributed"] for record in records] == [2, 3, 3]
    assert len(set(thetas(fleet).values())) == 1


def test_too_few_holders(fleet):
    """Two of three devices have lost their models: no run begins, and the order says why."""
    fleet.kill_device("dev-00")
    fleet.kill_device("dev-01")
    with pytest.raises(LoopbackError, match="1 device online with the models of the run before, and 2 must be"):
        fleet.rest_until_next(2 * DAY_S)
    fleet.revive_device("dev-00")
    fleet.rest(DAY_S / 2)  # it was off, so for it the last run ended just now
    next_run(fleet)


def test_pause_and_stop(fleet):
    asked = fleet.ask(RequestAction.PAUSE, schedule=True)
    assert asked.answer.outcome is Outcome.DONE
    with pytest.raises(LoopbackError, match="paused by the owner"):
        fleet.rest_until_next(2 * DAY_S)
    fleet.ask(RequestAction.RESUME, schedule=True)
    next_run(fleet)
    assert fleet.ask(RequestAction.STOP, schedule=True).answer.outcome is Outcome.DONE
    with pytest.raises(LoopbackError, match="stopped by the owner"):
        fleet.rest_until_next(2 * DAY_S)
    again = fleet.ask(RequestAction.RESUME, schedule=True).answer
    assert (again.outcome, again.reason) == (Outcome.NOT_NOW, "the standing order was stopped")
    assert b"stopped by the owner" in fleet.ask(RequestAction.LIST, schedule=True).body


def test_another_run_ends_the_order(fleet):
    """Its number is above the block, and devices that follow it refuse every later turn."""
    late = second(fleet)
    recipe = a_recipe("fedavg", rounds=1, local=FULL_BATCH, min_contributors=2)
    fleet.stage.add_run(fleet.bundle, draw_origins(fleet.bundle.manifest, 1, 3), recipe)
    fleet.serve_newest()
    fleet.run(100)
    assert fleet.plan.run == 5
    assert fleet.standing.entry().waits == "ended by run 5"
    fleet.rest(DAY_S)
    assert offer(fleet, late) == {5}


HELD = [row for row in paths() if row.startswith("ModelsHeld.")]


@pytest.mark.parametrize("row", HELD)
def test_one_device_lies_about_its_models(fleet, row):
    """Whatever one of three says of the models that it holds, the next run begins in time, with those of the run before."""
    ended_s, before = fleet.now_s, told_of(fleet)
    liar = sorted(fleet.devices)[1]
    with pytest.MonkeyPatch.context() as patch:
        told = Liar(patch, liar)
        for lie in lies_of(row):
            told.lie = lie
            restart_device(fleet, liar)
            fleet.settle()
        assert told.told
        next_run(fleet)
    assert DAY_S <= fleet.now_s - ended_s < 2 * DAY_S
    package = package_of(fleet, 2)
    assert (package.turn, package.before, package.transcript) == (1, before.run, before.transcript)
    honest = {theta for name, theta in thetas(fleet).items() if name != liar}
    assert len(honest) == 1


# -- A month with a standing order: data grow and drift, and the owner comes by for revocations and replacements alone --


EVERY = 3
"""Runs between two changes of the data."""


def data_of(device, turn, concepts):
    """Return data after ``turn`` changes: more each time, with labels by a concept that turns, rotated by the group."""
    index = int(device.removeprefix("dev-"))
    rng = np.random.default_rng([index, turn])
    x = rng.standard_normal((60 + 10 * turn, INPUTS)).astype(np.float32)
    concept = concepts[0] * np.cos(0.4 * turn) + concepts[1] * np.sin(0.4 * turn)
    return Dataset(x, ((x @ concept).argmax(1) + index % 2).astype(np.int64) % CLASSES)


class Month:
    """A fleet of two groups under a standing order, and what its owner does."""

    def __init__(self, root, count, runs):
        rng = np.random.default_rng(5)
        self.concepts = 2 * rng.standard_normal((2, INPUTS, CLASSES))
        order = Schedule(order=bytes(range(16)), count=runs, interval_s=DAY_S, until_s=EPOCH_S + 2 * (runs + 1) * DAY_S)
        self.fleet = make_fleet(
            root,
            {name: data_of(name, 0, self.concepts) for name in names(count)},
            algorithm="ifca",
            settings={"k": "2"},
            rounds=6,
            quorum=0.8,
            deadline_s=10.0,
            min_contributors=2,
            shards=1,
            schedule=order,
        )
        self.gone = set()

    @property
    def here(self):
        return [name for name in self.fleet.devices if name not in self.gone]

    def change_data(self, turn):
        for name in self.here:
            restart_device(self.fleet, name, data_of(name, turn, self.concepts))
        self.fleet.settle()

    def revoke(self, name):
        self.fleet.stage.fleet.revoke(name)
        self.gone.add(name)
        self.fleet.publish()
        renew(self.fleet)

    def reinstall(self, name, turn):
        """A device loses its directory, and comes back under its name with new keys."""
        fleet, owner = self.fleet, self.fleet.stage.fleet
        fleet.kill_device(name)
        place = fleet.stage.device_dir(name)
        shutil.rmtree(place)
        card = init(place, name).read_bytes()
        owner.burn(open_card(card))
        join(place, owner.add_device(card).read_bytes(), owner.fingerprint)
        fleet.publish()
        renew(fleet)
        fleet.revive_device(name, data_of(name, turn, self.concepts))

    def check_devices(self):
        """No device answers with a model that is worse, on its present validation share, than another that it has."""
        for name in self.here:
            standing = FinishedModels(self.fleet.stage.device_dir(name)).standing()
            if standing.answers is not None:
                ranks = [model.validation.rank for model in standing.models]
                assert standing.answers.validation.rank == max(ranks), name


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(("count", "runs"), with_long([(20, 30), (5, 5)], (5, 5)))
def test_a_month(tmp_path, count, runs):
    """Accuracy follows the data within two runs, with no step by hand but the owner's commands."""
    month = Month(tmp_path / "fleet", count, runs)
    revoked = {runs // 5: "dev-01", runs // 2: "dev-02", runs - 2: "dev-05"} if count > 6 else {2: "dev-01"}
    accuracy = []
    with month.fleet as fleet:
        for run in range(runs):
            if run and run % EVERY == 0:
                month.change_data(run // EVERY)
            if run in revoked:
                month.revoke(revoked[run])
            if run == runs // 3 + 1:
                month.reinstall("dev-03", run // EVERY)
            if run == 2 * runs // 3:
                replace_aggregator(fleet)
            if run:
                fleet.rest_until_next(3 * DAY_S)
            final = fleet.run(9000)[-1]
            assert fleet.plan.run == run + 1
            accuracy.append(final["correct"] / final["tested"])
            month.check_devices()
        clusters = {name: cluster for name, cluster in final["clusters"].items() if name in month.here}
        assert same_partition(clusters, {name: truth_of(count, 2)[name] for name in clusters})
        assert set(clusters) == set(month.here)
        assert fleet.standing.entry().waits.startswith("all of its")
    steady = accuracy[EVERY - 1 :: EVERY]
    assert min(steady) >= 0.75, accuracy
