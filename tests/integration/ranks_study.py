"""An experiment of ten small devices, for simulations by several processes.

``python -m tests.integration.ranks_study simulate tiny`` runs it. Its result has all models at the end. Each process writes a
line with its number on stderr when a round closes.
"""

from __future__ import annotations

import json
import os
import socket
import sys
from pathlib import Path

from shoal_lab.experiments import registry
from shoal_lab.experiments.common.experiment import Study
from shoal_lab.experiments.common.paper import paper_options

from shoal.protocol.recipe import LocalTraining
from shoal.simulation.engine import ranks
from shoal.simulation.engine.fleet import sim_options
from shoal.simulation.engine.simulate import simulate
from tests.helpers.forked_stages import ForkedProgram
from tests.helpers.simulations import NETWORK, population
from tests.helpers.trees import ONE_THREAD, ROOT

MINI = LocalTraining(epochs=2, batch_size=5, lr=0.3)
SETTINGS = {
    "fedavg": {},
    "ifca": {"k": "2"},
    "cfl": {"validate": "off", "eps1": "0.9", "cool_down": "1"},
    "fedgroup": {"groups": "2"},
    "fesem": {"k": "2"},
    "one-shot": {"k": "2"},
    "local": {},
}
WAIT_S = "SHOAL_TEST_WAIT_S"
LEAST_COLUMNS = ranks.LEAST_COLUMNS


def run(study, options, progress):
    """Simulate one strategy.

    Settings: ``paper``, the papers' options in the place of a fleet's; ``even``, devices of equal size; ``cohort``, the share
    that takes part; ``columns``, the fewest coordinates of vectors whose products ranks divide.
    """
    ranks.LEAST_COLUMNS = options.values["columns"]
    made = {
        "rounds": options.rounds or 6,
        "local": MINI,
        "seed": options.seed,
        "mode": options.mask,
        "min_contributors": 1,
        "threads": options.threads,
        "checkpoint": options.checkpoint,
        "count": "all",
    }
    if options.values["cohort"]:
        made["participation"] = options.values["cohort"]
    chosen = paper_options(**made) if options.values["paper"] else sim_options(**made)

    def closed(record):
        progress.round(options.algorithm, record.round, chosen.recipe.rounds, None)
        sys.stderr.write(f"rank {os.environ.get('RANK', '0')} closed {record.round}\n")
        sys.stderr.flush()

    data = population(uneven=not options.values["even"])
    done = simulate(options.algorithm, SETTINGS[options.algorithm], data, NETWORK, chosen, closed)
    return study.result(
        options,
        accuracy=done.final.accuracy,
        clusters=done.history[-1].clusters,
        rounds=len(done.history),
        cpu_seconds_per_round=done.cpu_seconds_per_round,
        history=[r.as_dict() for r in done.history],
        extra={
            "models": {str(model): theta.tolist() for model, theta in done.thetas.items()},
            "cluster_of": dict(done.clusters),
            "taken": done.taken().tolist(),
        },
    )


STUDY = Study(
    "tiny",
    "a paper",
    "ten devices",
    tuple(SETTINGS),
    {},
    run,
    resumable=tuple(SETTINGS),
    values={"paper": False, "even": False, "cohort": 0.0, "columns": LEAST_COLUMNS},
)


def free_port():
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return found.getsockname()[1]


def environment(**others):
    return {**os.environ, **ONE_THREAD, "PYTHONPATH": str(ROOT), **others}


class Rank(ForkedProgram):
    """One process of a simulation, with its output in files."""

    def __init__(self, arguments, environment, folder):
        self.out, self.errors = (Path(folder, name) for name in ("out", "errors"))
        self.out.touch()
        self.errors.touch()
        super().__init__("tests.integration.ranks_study", arguments, environment, self.out, self.errors)


def start_ranks(folder, *arguments, world=2, each=None, wait_s=None):
    """Start the ranks of one simulation without torchrun's agent, which would end all when one ends.

    Args:
        folder: for the files with what they print.
        arguments: of ``simulate tiny``.
        world: number of ranks.
        each: further arguments of each rank.
        wait_s: most seconds that a rank waits for another.
    """
    port, further = str(free_port()), {} if wait_s is None else {WAIT_S: str(wait_s)}
    started = []
    for rank in range(world):
        own = folder / f"rank-{rank}"
        own.mkdir()
        variables = environment(
            RANK=str(rank),
            LOCAL_RANK=str(rank),
            WORLD_SIZE=str(world),
            LOCAL_WORLD_SIZE=str(world),
            MASTER_ADDR="localhost",
            MASTER_PORT=port,
            **further,
        )
        started.append(Rank(["simulate", "tiny", *arguments, *(each or {}).get(rank, ())], variables, own))
    return started


def ended(processes, timeout_s=60.0):
    """Return (status, stdout, stderr) of processes that end by themselves; kill those that do not, which is an error."""
    try:
        found = [process.wait(timeout_s) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    return [(s, p.out.read_text(), p.errors.read_text()) for s, p in zip(found, processes, strict=True)]


def data_of(text):
    """Return the data of the one JSON object in a program's output."""
    (line,) = text.splitlines()
    return json.loads(line)["data"]


def main():
    """Run the console program with this experiment."""
    registry.register(STUDY)
    from shoal.cli import main as program

    ranks.LONGEST_WAIT_S = float(os.environ.get(WAIT_S, ranks.LONGEST_WAIT_S))
    program()


if __name__ == "__main__":
    main()
