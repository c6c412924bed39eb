"""A fleet of real programs whose run is given up while devices upload, by its file, and taken up again."""

from __future__ import annotations

import contextlib
import random
import time

from shoal.protocol.recipe import LocalTraining, Recipe
from tests.helpers.forked_stages import (
    begin,
    stage_of,
)
from tests.helpers.run_places import SLOWLY
from tests.helpers.waiting import until

NAMES = ("dev-0", "dev-1", "dev-2")
LOCAL = LocalTraining(epochs=1, batch_size=32, lr=0.2)
ROUNDS = 50_000
CONTINUES_S = 10.0
"""A run whose file is put back goes on within this time."""
WAIT_S = 60.0
STOPPED = "run stopped: its file was taken away"


class Place:
    """A broker, an aggregator and three devices, with a run that does not end by itself."""

    def __init__(self, stage, root):
        self.stage, self.root = stage, root

    def sign(self, rounds=ROUNDS):
        """Sign a run of ``rounds`` rounds and carry it to the aggregator."""
        options = Recipe("fedavg", rounds=rounds, local=LOCAL, min_contributors=1, quorum=1.0, deadline_s=300.0, seed=1)
        self.run = begin(self.stage, options).run
        self.path = self.stage.aggregator_dir / "runs" / f"{self.run:06d}.run"

    def start_devices(self):
        for name in NAMES:
            self.stage.start_device(name, self.root / f"{name}.npz")

    @property
    def log(self):
        return self.stage.root.joinpath("logs", "aggregator.log").read_text()

    def end_of_run(self):
        """Wait until the run is over."""
        until(lambda: self.stage.finished(self.run), f"the end of run {self.run}")

    def closed(self):
        """Return the last round that is closed."""
        return self.stage.closed(self.run)

    def goes_on(self, rounds=3, seconds=CONTINUES_S):
        """Wait until so many more rounds are closed."""
        start = self.closed()
        until(lambda: self.closed() >= start + rounds, f"{rounds} rounds after round {start}", seconds)

    def take_away(self):
        """Take the run's file away, and wait until the aggregator has noticed."""
        stopped = self.log.count(STOPPED)
        self.path.rename(self.path.with_suffix(".aside"))

        def noticed():
            self.stage.check()
            return self.log.count(STOPPED) > stopped

        until(noticed, "the end of the run")

    def put_back(self):
        self.path.with_suffix(".aside").rename(self.path)

    def give_up_and_take_up(self, tries, seed=0):
        """Give the run up while devices upload and take it up again, so many times."""
        draw = random.Random(seed)
        self.goes_on(seconds=WAIT_S)
        for _ in range(tries):
            time.sleep(draw.uniform(0.0, 0.3))
            self.take_away()
            time.sleep(draw.uniform(0.0, 0.5))
            self.put_back()
            self.goes_on()
            self.stage.check()


@contextlib.contextmanager
def place(root):
    """Yield a `Place` under the empty directory ``root`` with nothing started but the broker."""
    with stage_of(root, NAMES, environment=SLOWLY) as (stage, _):
        yield Place(stage, root)
