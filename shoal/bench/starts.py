"""`shoal bench start`: seconds from the start of a device's program to its first update of a run, on a real broker.

One device, the model of `shoal bench round`, and a run whose round is open and waits for it. The device is started twice: first
it has to fetch the run, and again after SIGKILL it has the run on its disk. The time ends when the aggregator has closed a round
with the device's update, so it contains imports, ONNX Runtime's sessions, the connection, the first loss, local training, the
mask and the upload.
"""

from __future__ import annotations

import signal
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, Final

from shoal.bench.rounds import LOCAL, make_task, write_data
from shoal.owner.runs.plan import RunOptions
from shoal.simulation.process_fleet import Stage, StageError
from shoal.transport.local_broker import start_broker

DEVICE: Final = "dev-0"
STARTS: Final = 5
ROUNDS: Final = 100_000
"""Rounds of the run, which must not end while the device is started again."""
WITHIN_S: Final = 60.0
"""Longest wait for a round to close."""
SETTLE_S: Final = 1.0
"""Pause before a start, in which the programs that were just started or killed come to rest."""
_POLL_S: Final = 0.002


@dataclass(frozen=True, slots=True)
class StartFigures:
    """Results of the benchmark.

    Attributes:
        first_s: seconds of each start without the run on the device's disk.
        again_s: seconds of each start with it.
        broker: kind of the broker.
    """

    first_s: tuple[float, ...]
    again_s: tuple[float, ...]
    broker: str

    def data(self) -> dict[str, Any]:
        """Return the figures as `--json` prints them."""
        return {
            "seconds_first_median": median(self.first_s),
            "seconds_first": list(self.first_s),
            "seconds_again_median": median(self.again_s),
            "seconds_again": list(self.again_s),
            "starts": len(self.first_s),
            "broker": self.broker,
        }


def measure(starts: int = STARTS, broker_kind: str = "auto") -> StartFigures:
    """Run the benchmark once, each start in a fleet of its own.

    Args:
        starts: number of starts of each kind.
        broker_kind: the broker to start, as `start_broker` knows it.

    Raises:
        ConfigError: there is no such broker.
        StageError: no round was closed within WITHIN_S.
    """
    bundle, origins = make_task()
    options = RunOptions("fedavg", rounds=ROUNDS, local=LOCAL, min_contributors=1, quorum=1.0, seed=0)
    first_s, again_s = [], []
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        root = Path(folder)
        (root / "broker").mkdir()
        source = write_data(root / "data.npz", 0)
        with start_broker(broker_kind, root / "broker") as broker:
            for number in range(starts):
                with Stage(root / f"fleet-{number}", broker.url, (DEVICE,), f"start-{number}") as stage:
                    run = stage.add_run(bundle, origins, options).run
                    stage.start_aggregator("--log", "warning")
                    first_s.append(_seconds_to_an_update(stage, run, source))
                    stage.stop(DEVICE, signal.SIGKILL)
                    again_s.append(_seconds_to_an_update(stage, run, source))
            return StartFigures(tuple(first_s), tuple(again_s), broker.kind)


def _seconds_to_an_update(stage: Stage, run: int, source: Path) -> float:
    """Start the device; return the seconds until another round of the run is closed."""
    time.sleep(SETTLE_S)
    before = len(stage.records(run))
    began_s = time.monotonic()
    program = stage.start_device(DEVICE, source, "--log", "warning")
    while len(stage.records(run)) == before:
        if time.monotonic() > began_s + WITHIN_S:
            raise StageError(f"no round was closed within {WITHIN_S:.0f} s:\n{program.tail()}")
        time.sleep(_POLL_S)
    return time.monotonic() - began_s
