"""A minute of random trouble on every part of a fleet: when it is over the run ends, with the bits of an undisturbed one."""

from random import Random

import numpy as np
import pytest

from edge_client.learning.data import Dataset
from shoal.protocol.recipe import LocalTraining
from tests.helpers.broker_restarts import restart
from tests.helpers.cases import with_long
from tests.helpers.fleets import LOST, Wiretap, make_exact_fleet, names, slow_link, thetas

INPUTS = 9_000
"""Uploads of two chunks."""
DEVICES = names(3)
TROUBLE_S, LONGEST_S, RECOVERY_S = 60.0, 6.0, 120.0
LOSSES, LATENCY_S = 0.15, 0.3
ROUNDS = 12


def options(logistic):
    rng = np.random.default_rng(0)
    data = {d: Dataset(rng.standard_normal((6, INPUTS)).astype(np.float32), rng.integers(0, 4, 6)) for d in DEVICES}
    local = LocalTraining(epochs=0, steps=1, batch_size=0, lr=0.01)
    return {
        "data": data,
        "bundle": logistic(INPUTS, 4),
        "local": local,
        "rounds": ROUNDS,
        "quorum": 1.0,
        "deadline_s": 1e6,
    }


@pytest.fixture(scope="module")
def calm(tmp_path_factory, logistic):
    with make_exact_fleet(tmp_path_factory.mktemp("calm") / "fleet", **options(logistic)) as fleet:
        fleet.run(100)
        return thetas(fleet)


class Trouble:
    """Kills programs, cuts connections and restarts the broker at random, and mends each after a while."""

    def __init__(self, fleet, random):
        self.fleet, self.random = fleet, random
        self.mended_s = {}
        self.next_s = 0.0

    def step(self):
        for what, at_s in list(self.mended_s.items()):
            if self.fleet.now_s >= at_s:
                self.mend(what)
        if self.fleet.now_s >= self.next_s:
            self.next_s = self.fleet.now_s + 2 * self.random.random()
            self.harm()

    def end(self):
        for what in list(self.mended_s):
            self.mend(what)

    def harm(self):
        party = self.random.choice([*DEVICES, "aggregator"])
        if party in self.mended_s:
            return
        match self.random.choice(["kill", "cut", "restart", "forget"]):
            case "kill" if party == "aggregator":
                self.fleet.kill_aggregator()
            case "kill":
                self.fleet.kill_device(party)
            case "cut" if self.fleet.client_id(party) in self.fleet.broker.connected():
                self.fleet.broker.disconnect(self.fleet.client_id(party))
            case "restart" | "forget" as how if not self.mended_s:
                restart(self.fleet.broker, keep=how == "restart")
                return
            case _:
                return
        self.mended_s[party] = self.fleet.now_s + LONGEST_S * self.random.random()

    def mend(self, party):
        del self.mended_s[party]
        if party == "aggregator" and self.fleet.service is None:
            self.fleet.revive_aggregator()
        elif party != "aggregator" and party not in self.fleet.devices:
            self.fleet.revive_device(party)
        elif self.fleet.client_id(party) not in self.fleet.broker.connected():
            self.fleet.broker.reconnect(self.fleet.client_id(party))


@pytest.mark.parametrize("seed", with_long(range(16), 0))
def test_a_run_survives_trouble_everywhere(tmp_path, logistic, calm, seed):
    random = Random(seed)
    tap, troubled = Wiretap(), [True]
    with make_exact_fleet(tmp_path / "fleet", faults=tap, **options(logistic)) as fleet:
        slow = slow_link(fleet, fleet.client_id("aggregator"), 1e5, "/up")

        def lossy(passage):
            mine = passage.topic.endswith(("/up", "/ctl"))
            return LOST if troubled[0] and mine and random.random() < LOSSES else None

        tap.rules.extend([lossy] * (seed % 2) + [slow] * (seed // 2 % 2) + [lambda _: (LATENCY_S,)])
        trouble = Trouble(fleet, random)
        while fleet.now_s < TROUBLE_S and not fleet.finished:
            trouble.step()
            fleet.step()
        assert fleet.now_s > TROUBLE_S / 4, "it has seen some"
        troubled[0] = False
        trouble.end()
        assert fleet.run(RECOVERY_S)[-1]["contributed"] == len(DEVICES)
        assert [r["contributed"] for r in fleet.records()] == [len(DEVICES)] * (ROUNDS + 1)
        assert thetas(fleet) == calm
