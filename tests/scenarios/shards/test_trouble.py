"""Workers, coordinator and messages that are lost: every update counts once, and devices end with the same bits."""

import numpy as np
import pytest

from aggregator.run_service import UNCLOSABLE_HINT
from aggregator.strategies.fedavg import FedAvg
from aggregator.strategies.registry import STRATEGIES
from shoal.protocol.chunking import ChunkKind, parse
from shoal.protocol.shards import borders
from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    grouped_data,
    make_fleet,
    restart_aggregator,
    restart_device,
    thetas,
)
from tests.helpers.tasks import logistic_bundle

INPUTS, CLASSES, DEVICES = 60, 4, 4
LENGTH = (INPUTS + 1) * CLASSES


def sharded_fleet(root, shards=2, **options):
    data = grouped_data(DEVICES, groups=2, inputs=INPUTS, classes=CLASSES)
    return make_fleet(root, data, bundle=logistic_bundle(INPUTS, CLASSES), shards=shards, mode="permutation", **options)


@pytest.fixture(scope="module")
def expected(tmp_path_factory):
    with sharded_fleet(tmp_path_factory.mktemp("undisturbed") / "fleet") as fleet:
        fleet.run(30)
        return thetas(fleet)


def kill_worker(fleet, name):
    """Kill a worker as a crash does."""
    fleet.workers.pop(name).close()
    fleet._cut(name)


def contributed(fleet):
    return [r["contributed"] for r in fleet.records()]


def test_lost_parts_and_reports_come_again(tmp_path, expected, tap):
    tap.lose(client="shoal-demo-worker-1", ending="/report", times=3)
    for worker in (0, 1):
        tap.lose(client="shoal-demo-dev-01", ending=f"/part/{worker}", times=2)
    with sharded_fleet(tmp_path / "fleet", faults=tap) as fleet:
        fleet.run(60)
        assert thetas(fleet) == expected
        assert contributed(fleet) == [DEVICES] * 4


def test_round_waits_for_a_killed_worker(tmp_path, expected):
    """A round waits for a killed worker and names it."""
    with sharded_fleet(tmp_path / "fleet") as fleet:
        fleet.run_until(lambda: fleet.closed() == 1, 20)
        kill_worker(fleet, "worker-1")
        fleet.run_until(lambda: "worker-1" in fleet.service.status(), 20)
        before = len(fleet.records())
        for _ in range(50):
            fleet.step()
        assert len(fleet.records()) <= before + 1
        assert fleet.service.status() == "worker worker-1 is not connected"
        fleet.revive_worker("worker-1")
        fleet.run(60)
        assert thetas(fleet) == expected


@pytest.mark.parametrize("seed", with_long(range(6), 0, 1, 2))
def test_kills_at_any_step_change_nothing(tmp_path, expected, seed):
    random = np.random.default_rng(seed)
    with sharded_fleet(tmp_path / "fleet") as fleet:
        for _ in range(8):
            for _ in range(int(random.integers(1, 12))):
                if not fleet.finished:
                    fleet.step()
            victim = str(random.choice(["worker-0", "worker-1", "aggregator", "dev-02"]))
            if victim == "aggregator":
                restart_aggregator(fleet, steps=1)
            elif victim.startswith("worker"):
                kill_worker(fleet, victim)
                fleet.step()
                fleet.revive_worker(victim)
            else:
                restart_device(fleet, victim, steps=1)
        fleet.run(300)
        fleet.run_until(
            lambda: all(d.runtime.runs_done or d.runtime.session.round.answered for d in fleet.devices.values()), 100
        )
        assert thetas(fleet) == expected
        assert contributed(fleet) == [DEVICES] * 4


@pytest.mark.parametrize("shards", [2, 3])
def test_no_party_holds_more_than_its_share(tmp_path, shards, tap):
    """The bytes of every part are searched for in all files of coordinator and workers, while a round is open."""
    with sharded_fleet(tmp_path / "fleet", shards=shards, faults=tap) as fleet:
        stage = fleet.stage
        fleet.run_until(lambda: fleet.closed() == 2, 30)
        cuts = borders(LENGTH, shards)
        assert max(b - a for a, b in cuts) <= (1 / shards + 0.05) * LENGTH
        reader = [fleet.workers[name]._store for name in stage.workers]
        round_ = fleet.service.state.round - 1
        for store, (start, stop) in zip(reader, cuts, strict=True):
            read = store.reader(round_)
            rows = [read(device) for device in stage.devices]
            assert all(len(row) == stop - start for row in rows)
            for row in rows:
                raw = row.tobytes()
                own = [p for p in stage.worker_dir(stage.workers[reader.index(store)]).rglob("*") if p.is_file()]
                assert any(raw in p.read_bytes() for p in own)
                others = [p for name in stage.workers for p in stage.worker_dir(name).rglob("*") if p.is_file()]
                foreign = [p for p in others if p not in own]
                foreign += [p for p in stage.aggregator_dir.rglob("*") if p.is_file()]
                assert not any(raw[:256] in p.read_bytes() for p in foreign)
        up = [p for p in tap.sent(ending="/up") if parse(p.payload)[0].kind is ChunkKind.UPLOAD]
        assert up
        assert max(len(p.payload) for p in up) < 4 * LENGTH + 1200


class OnArrays(FedAvg):
    """A strategy of another package, written for whole updates."""

    name = "on-arrays"

    def mean(self, contributions, *_):
        return np.stack([c.vector for c in contributions]).mean(0)


def test_strategy_is_told_of_missing_arrays(tmp_path, monkeypatch):
    """Such an error once ended the aggregator, again after each start."""
    monkeypatch.setitem(STRATEGIES, OnArrays.name, OnArrays)
    with sharded_fleet(tmp_path / "fleet", algorithm=OnArrays.name) as fleet:
        fleet.run_until(lambda: fleet.service.obstacle, 20)
        assert "takes updates as arrays, which an aggregator with workers does not have" in fleet.service.status()
        assert fleet.service.facts().advice == UNCLOSABLE_HINT
        assert not fleet.records()
