"""An owner's directory and an aggregator's, with runs between them, without a broker."""

import shutil

import numpy as np

from aggregator import membership as aggregators
from aggregator.shards import membership as workers
from aggregator.storage.store import Store
from edge_client import membership as enrolment
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.runs.plan import make_plan, write_run
from shoal.protocol.recipe import LocalTraining, Recipe
from tests.helpers.fleets import FULL_BATCH
from tests.helpers.plans import altered
from tests.helpers.tasks import logistic_bundle

BUNDLE = logistic_bundle()
LONG_RUN = Recipe(
    "fedavg",
    rounds=100_000,
    local=LocalTraining(epochs=1, batch_size=16, lr=0.2),
    min_contributors=1,
    quorum=0.5,
    deadline_s=300.0,
    seed=1,
)
"""A run of real programs that outlasts any test."""
SLOWLY = {"SHOAL_EDGE_MAX_KBPS": "32"}
"""Environment of a device in such a run: some rounds a second are enough, and leave the cores to other tests."""


class RunPlace:
    """An owner's and an aggregator's directory."""

    def __init__(self, root):
        self.owner = FleetDirectory.create(root / "owner", "reef", "mqtt://127.0.0.1:1")
        self.server = root / "server"
        card = aggregators.init(self.server)
        self.owner.add_aggregator(card.read_bytes())
        self.owner.add_device(enrolment.init(root / "dev-1", "dev-1").read_bytes())
        grant = self.owner.add_aggregator(card.read_bytes())
        self.member = aggregators.join(self.server, grant.read_bytes(), self.owner.fingerprint)

    def sign(self, **changes):
        """Let the owner sign a run and carry it here."""
        plan = make_plan(self.owner, BUNDLE, Recipe("fedavg", rounds=2, local=FULL_BATCH, min_contributors=1))
        plan = altered(plan, **changes)
        path = write_run(self.owner, plan, BUNDLE, np.zeros((1, plan.length), np.float32))
        shutil.copy(path, self.server / "runs")
        return plan

    def sign_for_workers(self, root, count=2):
        """Let the owner sign a run of ``cfl``, which compares updates, for so many workers, and carry it here."""
        for number in range(count):
            self.owner.add_helper("worker", workers.init(root / f"worker-{number}", f"worker-{number}").read_bytes())
        bundle = logistic_bundle(12)
        plan = make_plan(self.owner, bundle, Recipe("cfl", rounds=2, local=FULL_BATCH, min_contributors=1))
        path = write_run(self.owner, plan, bundle, np.zeros((1, plan.length), np.float32))
        shutil.copy(path, self.server / "runs")
        return plan

    def finish(self, plan):
        store = Store(self.directory(plan), plan)
        store.record(plan.recipe.rounds + 1, {"round": plan.recipe.rounds + 1, "final": True, "missing": []})
        store.close()

    def directory(self, plan):
        return self.server / f"run-{plan.run:06d}"
