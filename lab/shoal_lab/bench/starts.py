"""`shoal bench start`: seconds from the start of a device's program to its first loss and its first update, on a real broker.

One device, the model of `shoal bench round`, and a run whose round is open and waits for it. The device is started twice: first
it has to fetch the run, and again after SIGKILL it has the run on its disk.

The time to the first loss ends when the device's log has the loss of the first step of training: it contains imports, the
connection, the run, ONNX Runtime's session and the data. The time to the first update ends when the aggregator has closed a round
with it, so it also contains local training, the mask and the upload.
"""

from __future__ import annotations

import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final

from edge_client.learning.training import FIRST_STEP
from shoal.protocol.recipe import Recipe
from shoal.simulation.process_fleet import Program, Stage, StageError
from shoal.transport.local_broker import start_broker
from shoal_lab.bench.rounds import LOCAL, make_task, write_data

DEVICE: Final = "dev-0"
ROUNDS: Final = 100_000
"""Rounds of the run, which must not end while the device is started again."""
WITHIN_S: Final = 60.0
"""Longest wait for a round to close."""
SETTLE_S: Final = 1.0
"""Pause before a start, in which the programs that were just started or killed come to rest."""
_POLL_S: Final = 0.002


Start = tuple[float, float, float]
"""Seconds until a round with the device's update was closed, seconds until its first loss, and its program's CPU until then."""


def figures(first: Sequence[Start], again: Sequence[Start], broker: str) -> dict[str, Any]:
    """Return each time of each start, and their medians: of the starts without the run on the device's disk, and with it."""
    found: dict[str, Any] = {}
    for kind, starts in (("first", first), ("again", again)):
        names = (f"seconds_{kind}", f"seconds_to_loss_{kind}", f"cpu_seconds_to_loss_{kind}")
        for name, values in zip(names, map(list, zip(*starts, strict=True)), strict=True):
            found |= {f"{name}_median": median(values), name: values}
    return {**found, "starts": len(first), "broker": broker}


def words(data: Mapping[str, Any]) -> list[str]:
    """Return the figures as text."""
    return [
        f"{said}: {data[f'{name}_median']:.2f} s to the {end} (median of {data['starts']}, "
        f"{min(data[name]):.2f} to {max(data[name]):.2f})"
        for kind, said in (("first", "fetching the run"), ("again", "with the run on its disk"))
        for name, end in (
            (f"seconds_to_loss_{kind}", f"first loss ({data[f'cpu_seconds_to_loss_{kind}_median']:.2f} s of CPU)"),
            (f"seconds_{kind}", "first update"),
        )
    ]


def measure(starts: int) -> dict[str, Any]:
    """Run the benchmark once, each start in a fleet of its own.

    Args:
        starts: number of starts of each kind.

    Raises:
        StageError: no loss was logged or no round was closed within WITHIN_S.
    """
    bundle, origins = make_task()
    options = Recipe("fedavg", rounds=ROUNDS, local=LOCAL, min_contributors=1, quorum=1.0, seed=0)
    first, again = [], []
    with tempfile.TemporaryDirectory(prefix="shoal-bench-") as folder:
        root = Path(folder)
        (root / "broker").mkdir()
        source = write_data(root / "data.npz", 0)
        with start_broker("auto", root / "broker") as broker:
            for number in range(starts):
                with Stage(root / f"fleet-{number}", broker.url, (DEVICE,), f"start-{number}") as stage:
                    run = stage.add_run(bundle, origins, options).run
                    stage.start_aggregator("--log", "warning")
                    first.append(_start(stage, run, source))
                    stage.stop(DEVICE, signal.SIGKILL)
                    again.append(_start(stage, run, source))
            return figures(first, again, broker.kind)


def _start(stage: Stage, run: int, source: Path) -> Start:
    """Start the device; return its times once another round of the run is closed."""
    time.sleep(SETTLE_S)
    rounds, losses = stage.closed(run), _losses(stage)
    began_s = time.monotonic()
    program = stage.start_device(DEVICE, source, "--log", "debug")
    loss_s = _wait(lambda: _losses(stage) > losses, began_s, "no loss was logged", program)
    loss_cpu_s = program.cpu_s()
    update_s = _wait(lambda: stage.closed(run) > rounds, began_s, "no round was closed", program)
    return update_s, loss_s, loss_cpu_s


def _losses(stage: Stage) -> int:
    """Return the number of local trainings whose first loss the device has logged."""
    log = stage.log_of(DEVICE)
    return log.read_text(errors="replace").count(FIRST_STEP) if log.exists() else 0


def _wait(happened: Callable[[], bool], began_s: float, otherwise: str, program: Program) -> float:
    """Wait until ``happened``; return the seconds since ``began_s``.

    Raises:
        StageError: it took longer than WITHIN_S.
    """
    while not happened():
        if time.monotonic() > began_s + WITHIN_S:
            raise StageError(f"{otherwise} within {WITHIN_S:.0f} s:\n{program.tail()}")
        time.sleep(_POLL_S)
    return time.monotonic() - began_s
