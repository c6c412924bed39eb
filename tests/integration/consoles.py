"""The owner's console in this process, and a fleet of real programs for it to drive."""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass

import numpy as np
from typer.testing import CliRunner

from shoal.errors import ShoalError
from shoal.owner.cli.main import app
from shoal.owner.runs.plan import make_plan, write_run
from shoal.protocol.recipe import LocalTraining, Recipe
from tests.helpers.forked_stages import stage_of
from tests.helpers.run_places import SLOWLY
from tests.helpers.tasks import logistic_bundle
from tests.helpers.waiting import until
from tests.integration.taken_away import NAMES

OPTIONS = Recipe(
    "fedavg",
    rounds=50_000,
    local=LocalTraining(epochs=1, batch_size=16, lr=0.2),
    min_contributors=3,
    quorum=1.0,
    deadline_s=300.0,
    seed=1,
)


@dataclass(frozen=True)
class Told:
    """Output of a command, and the error that ended it, if one did."""

    out: str
    err: str
    error: ShoalError | None


class Console:
    """`shoal-fleet` on the owner's directory of a stage."""

    def __init__(self, stage):
        self.stage = stage

    def __call__(self, *arguments, status=0):
        done = CliRunner().invoke(app, list(map(str, arguments)))
        error = done.exception if isinstance(done.exception, ShoalError) else None
        assert (done.exit_code if error is None else error.exit_code) == status, (done.output, done.exception)
        return Told(done.stdout, done.stderr, error)

    def data(self, *arguments):
        """Return the data of a command with ``--json``."""
        return json.loads(self(*arguments, "--json").out)["data"]

    def run(self, verb, *arguments, status=0):
        """Call ``run VERB DIR ...``."""
        return self("run", verb, self.stage.fleet.path, *arguments, status=status)

    def status(self, *arguments):
        """Return the data of ``status``."""
        return self.data("status", self.stage.fleet.path, *arguments)

    def sign(self, options=OPTIONS):
        """Sign a run without sending it; return its number."""
        bundle, fleet = logistic_bundle(), self.stage.fleet
        plan = make_plan(fleet, bundle, options)
        write_run(fleet, plan, bundle, np.zeros((1, bundle.length), np.float32))
        return plan.run

    def closed(self, run):
        """Return the last closed round of a run."""
        return self.stage.closed(run)

    def goes_on(self, run, rounds=3):
        """Wait for so many more closed rounds."""
        at = self.closed(run)
        until(lambda: self.closed(run) >= at + rounds, f"{rounds} rounds after round {at}")

    def restart(self, number):
        """End the aggregator by a signal, and start it again."""
        self.stage.stop("aggregator", number)
        self.stage.start_aggregator()


@contextlib.contextmanager
def console_of(root):
    """Yield (console, broker) of a fleet of which nothing runs but the broker."""
    with stage_of(root, NAMES, environment=SLOWLY) as (stage, broker):
        yield Console(stage), broker
