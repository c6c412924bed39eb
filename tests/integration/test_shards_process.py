"""A sharded aggregator of real programs: coordinator and workers, a real broker, sums over Gloo, and kill -9 of any of them."""

import contextlib
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import time

import numpy as np
import pytest
from shoal_lab.loopback.fleet import draw_origins

from aggregator.shards import membership as worker_membership
from aggregator.shards.part_store import DATABASE, PARTS
from shoal.protocol.recipe import LocalTraining
from shoal.protocol.shards import borders
from shoal.simulation.process_fleet import ONE_THREAD, Stage
from shoal.transport.local_broker import find_mosquitto, start_broker
from tests.helpers.fleets import CLASSES, grouped_data, same_partition, truth_of
from tests.helpers.forked_stages import ForkedStage
from tests.helpers.plans import a_recipe
from tests.helpers.processes import found_in_memory
from tests.helpers.run_places import SLOWLY
from tests.helpers.tasks import logistic_bundle
from tests.helpers.trees import ROOT
from tests.helpers.waiting import until

pytestmark = [pytest.mark.broker, pytest.mark.process, pytest.mark.torch]

INPUTS, DEVICES, WAIT_S = 40, 4, 90.0
QUICK = LocalTraining(epochs=2, batch_size=10, lr=0.5)
KILLS = 100
"""Kills of the long test; SHOAL_KILLS in the environment is another number."""


def begin(stage, tmp_path, rounds=5, algorithm="fedgroup", settings=None):
    """Sign a run, start the devices, and return the plan."""
    bundle, data = logistic_bundle(INPUTS, CLASSES), grouped_data(DEVICES, 2, inputs=INPUTS)
    options = a_recipe(
        algorithm,
        settings={"groups": "2", "alpha": "2"} if settings is None else settings,
        rounds=rounds,
        min_contributors=1,
        quorum=1.0,
        deadline_s=60.0,
        seed=1,
        mode="permutation",
        local=QUICK,
        pretrain=QUICK,
    )
    plan = stage.add_run(bundle, draw_origins(bundle.manifest, 1, 1), options)
    for name, batch in data.items():
        np.savez(tmp_path / f"{name}.npz", x=batch.x, y=batch.y)
        stage.start_device(name, tmp_path / f"{name}.npz")
    return plan


def start_worker(stage, name):
    """Start `shoal-aggregator shard serve`."""
    return stage._start(name, "aggregator", ["shard", "serve", str(stage.worker_dir(name)), "--interface", "lo"])


def broker_of(tmp_path, port=0):
    (tmp_path / "broker").mkdir(exist_ok=True)
    return start_broker("mosquitto" if find_mosquitto() else "amqtt", tmp_path / "broker", port)


@contextlib.contextmanager
def serving_stage(tmp_path, kind=ForkedStage):
    """A stage with a coordinator and two workers that serve, each a program of its own."""
    with (
        broker_of(tmp_path) as broker,
        kind(tmp_path / "fleet", broker.url, tuple(grouped_data(DEVICES)), shards=2) as stage,
    ):
        stage.start_aggregator("--interface", "lo")
        for name in stage.workers:
            start_worker(stage, name)
        yield stage


def wait_for(stage, run, reached):
    until(lambda: reached(stage.records(run)), lambda: "\n".join(p.tail() for p in stage.programs.values()), WAIT_S)


@pytest.mark.long
def test_managed_workers_serve_a_run(tmp_path):
    """Workers of a service manager serve a run."""
    with serving_stage(tmp_path) as stage:
        plan = begin(stage, tmp_path)
        records = stage.wait(plan.run, WAIT_S)
    assert [r["round"] for r in records] == list(range(1, 7))
    assert not any(r["missing"] for r in records)
    assert same_partition(records[-1]["clusters"], truth_of(DEVICES, 2))


@pytest.mark.long
def test_torchrun_starts_workers_too(tmp_path):
    """Torchrun starts coordinator and workers."""
    with (
        broker_of(tmp_path) as broker,
        ForkedStage(tmp_path / "fleet", broker.url, tuple(grouped_data(DEVICES)), shards=2) as stage,
    ):
        plan = begin(stage, tmp_path, rounds=3)
        command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "3", "-m", "aggregator", "serve"]
        arguments = [str(stage.aggregator_dir), "--shards", str(stage.root / "workers"), "--interface", "lo"]
        with (tmp_path / "torchrun.log").open("wb") as log:
            launcher = subprocess.Popen(
                [*command, *arguments], cwd=ROOT, env={**os.environ, **ONE_THREAD}, stdout=log, stderr=log
            )
            try:
                wait_for(stage, plan.run, lambda records: records and records[-1]["final"])
            finally:
                launcher.send_signal(signal.SIGTERM)
                launcher.wait(20)
        assert len(stage.records(plan.run)) == 4


def test_lost_disk_of_a_worker_ends_the_run(tmp_path):
    """No stop ends the run, since its last rounds need all workers; another run has a new worker of the same name."""
    with serving_stage(tmp_path) as stage:
        lost = begin(stage, tmp_path, rounds=10_000, algorithm="fedavg", settings={})
        wait_for(stage, lost.run, lambda records: records)
        stage.stop("worker-1", signal.SIGKILL)
        shutil.rmtree(stage.worker_dir("worker-1"))
        (stage.aggregator_dir / "runs" / f"{lost.run:06d}.run").unlink()
        card = worker_membership.init(stage.worker_dir("worker-1"), "worker-1")
        grant = stage.fleet.add_helper("worker", card.read_bytes())
        worker_membership.join(stage.worker_dir("worker-1"), grant.read_bytes(), stage.fleet.fingerprint)
        start_worker(stage, "worker-1")
        data = logistic_bundle(INPUTS, CLASSES)
        plan = stage.add_run(data, draw_origins(data.manifest, 1, 1), a_recipe("fedavg", rounds=3, local=QUICK))
        assert len(stage.wait(plan.run, WAIT_S)) == 4


def parts_in(directory, length):
    """Return device -> bytes of the parts, of ``length`` coordinates, that a worker has of its newest round."""
    with contextlib.closing(sqlite3.connect(directory / DATABASE)) as store:
        query = "SELECT round, device, start FROM parts WHERE round = (SELECT max(round) FROM parts)"
        rows = store.execute(query).fetchall()
    files = {round_: (directory / PARTS / f"{round_:06d}.f32").read_bytes() for round_, *_ in rows}
    return {device: files[round_][start : start + 4 * length] for round_, device, start in rows}


@pytest.mark.long
def test_no_process_holds_a_foreign_part(tmp_path, monkeypatch):
    """All memory of coordinator and workers is searched while a round is open, which a stopped device keeps open."""
    for name, value in SLOWLY.items():
        monkeypatch.setenv(name, value)
    with serving_stage(tmp_path, Stage) as stage:
        plan = begin(stage, tmp_path, rounds=10_000, algorithm="fedavg", settings={})
        wait_for(stage, plan.run, lambda records: len(records) >= 3)
        *others, last = stage.devices
        stopped = stage.programs[last].pid
        os.kill(stopped, signal.SIGSTOP)
        try:
            stores = {name: stage.worker_dir(name) / f"run-{plan.run:06d}" for name in stage.workers}
            cuts = borders(plan.length, len(stage.workers))

            def parts():
                return {
                    name: parts_in(directory, stop - start)
                    for (name, directory), (start, stop) in zip(stores.items(), cuts, strict=True)
                }

            wait_for(stage, plan.run, lambda _: all(set(found) == set(others) for found in parts().values()))
            # The first and the last coordinates of each part: 32 bytes that are nowhere by chance.
            needles = {
                name: [piece for part in found.values() for piece in (part[:32], part[-32:])]
                for name, found in parts().items()
            }
            assert len({piece for own in needles.values() for piece in own}) == 2 * len(stage.workers) * len(others)
            foreign = {
                program: {
                    f"{worker} {place}": piece
                    for worker, own in needles.items()
                    for place, piece in enumerate(own)
                    if worker != program
                }
                for program in ("aggregator", *stage.workers)
            }
            found = {
                program: found_in_memory(stage.programs[program].pid, {**pieces, "run": plan.run_id}, files=True)
                for program, pieces in foreign.items()
            }
        finally:
            os.kill(stopped, signal.SIGCONT)
    # Every process has the run's id, so the search finds something.
    assert found == {program: {"run"} for program in foreign}


def chaos(tmp_path, kills, rounds, seed=0):
    """Kill -9 at random points, ``kills`` times or until the run is over; return kills, records, restarts of devices."""
    pick = random.Random(seed)
    done = 0
    broker = broker_of(tmp_path)
    try:
        with ForkedStage(tmp_path / "fleet", broker.url, tuple(grouped_data(DEVICES)), shards=2) as stage:
            start = {"aggregator": lambda: stage.start_aggregator("--interface", "lo")}
            start |= {name: lambda name=name: start_worker(stage, name) for name in stage.workers}
            for launch in start.values():
                launch()
            plan = begin(stage, tmp_path, rounds)
            wait_for(stage, plan.run, lambda records: records)
            taken_over = 0

            def revive():
                """Start devices again that took their own connection, cut by the broker's death, for another client's."""
                ended = [n for n in stage.devices if stage.programs[n].process.poll() is not None]
                for name in ended:
                    assert "uses the id" in stage.programs[name].tail(), stage.programs[name].tail()
                    stage.stop(name)
                    stage.start_device(name, tmp_path / f"{name}.npz")
                return len(ended)

            while done < kills and not stage.finished(plan.run):
                time.sleep(pick.uniform(0.05, 1.2))
                victim = pick.choice([*start, "broker"])
                if victim == "broker":
                    broker.kill()
                    broker.stop()
                    broker.start()
                else:
                    stage.stop(victim, signal.SIGKILL)
                    time.sleep(pick.uniform(0.0, 0.3))
                    start[victim]()
                done += 1
                taken_over += revive()
            end = time.monotonic() + 600.0
            while not stage.finished(plan.run):
                taken_over += revive()
                assert time.monotonic() < end, stage.programs["aggregator"].tail()
                time.sleep(0.2)
            return done, stage.records(plan.run), taken_over
    finally:
        broker.stop()


def check(records, rounds):
    assert [r["round"] for r in records] == list(range(1, rounds + 2))
    assert all(r["contributed"] == DEVICES for r in records), [r["contributed"] for r in records]
    assert not any(r["out_of_step"] for r in records), "devices' states have one digest"


@pytest.mark.long
def test_kills_change_nothing(tmp_path):
    done, records, _ = chaos(tmp_path, 6, 12)
    check(records, 12)
    assert done


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_a_hundred_kills_change_nothing(tmp_path):
    kills = int(os.environ.get("SHOAL_KILLS", KILLS))
    done, records, taken_over = chaos(tmp_path, kills, 6 * kills)
    check(records, 6 * kills)
    assert done == kills
    assert taken_over <= kills / 4
