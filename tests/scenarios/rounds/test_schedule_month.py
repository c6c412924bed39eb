"""A month with a standing order: data grow and drift, and the owner comes by for revocations and replacements alone."""

import shutil

import numpy as np
import pytest
from shoal_lab.loopback.fleet import EPOCH_S

from aggregator import membership as aggregators
from aggregator.status.watch import FleetWatch
from edge_client.learning.data import Dataset
from edge_client.membership import init, join
from edge_client.storage.finished_models import FinishedModels
from shoal.membership.grants import open_card
from shoal.owner.keys.vault import run_file
from shoal.owner.runs.standing import sign_again
from shoal.protocol.documents import Schedule
from shoal.protocol.requests import Outcome, RequestAction
from tests.helpers.cases import with_long
from tests.helpers.fleets import CLASSES, INPUTS, make_fleet, names, publish, same_partition, truth_of

DAY_S = 24 * 3600
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
            self.fleet.kill_device(name)
            self.fleet.revive_device(name, data_of(name, turn, self.concepts))
        self.fleet.settle()

    def sign_again(self):
        owner = self.fleet.stage.fleet
        with owner.changing():
            plan = sign_again(owner)
        return run_file(owner.path, plan.run).read_bytes()

    def renew(self):
        publish(self.fleet)
        answer = self.fleet.ask(RequestAction.START, package=self.sign_again()).answer
        assert answer.outcome is Outcome.DONE

    def revoke(self, name):
        self.fleet.stage.fleet.revoke(name)
        self.gone.add(name)
        self.renew()

    def reinstall(self, name, turn):
        """A device loses its directory, and comes back under its name with new keys."""
        fleet, owner = self.fleet, self.fleet.stage.fleet
        fleet.kill_device(name)
        place = fleet.stage.device_dir(name)
        shutil.rmtree(place)
        card = init(place, name).read_bytes()
        owner.burn(open_card(card))
        join(place, owner.add_device(card).read_bytes(), owner.fingerprint)
        self.renew()
        fleet.revive_device(name, data_of(name, turn, self.concepts))

    def replace_aggregator(self):
        fleet, owner = self.fleet, self.fleet.stage.fleet
        fleet.kill_aggregator()
        shutil.rmtree(fleet.stage.aggregator_dir)
        card = aggregators.init(fleet.stage.aggregator_dir, "aggregator").read_bytes()
        owner.replace_aggregator(card)
        grant = owner.replace_aggregator(card, "", self.sign_again())
        aggregators.join(fleet.stage.aggregator_dir, grant.read_bytes(), owner.fingerprint)
        fleet._watch = FleetWatch(clock=fleet._clock)
        publish(fleet)
        fleet.start_idle_aggregator()

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
                month.replace_aggregator()
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
