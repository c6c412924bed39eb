"""The personal finish in a fleet: nothing of it travels, and a new run never waits for it.

test_private_segments.py compares it with the simulator.
"""

import numpy as np
from shoal_lab.loopback.fleet import draw_origins

from edge_client.answers import inference
from edge_client.storage.finished_models import FinishedModels
from shoal.protocol.recipe import LocalTraining
from tests.helpers.fleets import (
    begin_run,
    finish_of,
    grouped_data,
    make_fleet,
)
from tests.scenarios.round_fleets import held_states

NAME = "dev-00"
MINI = LocalTraining(epochs=2, batch_size=8, lr=0.2)


def choice(fleet, name=NAME):
    store = FinishedModels(fleet.stage.device_dir(name))
    found = store.personal(store.models()[-1])
    return None if found is None else found[0]


def test_nothing_of_the_finish_is_published(tmp_path, tap):
    with make_fleet(tmp_path / "fleet", grouped_data(4, 2), faults=tap) as fleet:
        fleet.run(100)
        fleet.settle()
        sent = {name: device.transport.bytes_sent for name, device in fleet.devices.items()}
        heard = len(tap.heard)
        for name in fleet.stage.devices:
            assert finish_of(fleet, name)
            fleet.settle()
            assert choice(fleet, name) is not None
        assert {name: device.transport.bytes_sent for name, device in fleet.devices.items()} == sent
        assert len(tap.heard) == heard


def test_no_device_stores_the_origin(tmp_path):
    """With the first state it would show the clear mean of the first round to a thief."""
    with make_fleet(tmp_path / "fleet", rounds=4) as fleet:
        origin = draw_origins(fleet.bundle.manifest, 1, fleet.plan.seed)[0]

        def holding(theta):
            files = (p for p in fleet.stage.device_dir(NAME).rglob("*") if p.is_file())
            return [p.name for p in files if theta[:8].astype("<f4").tobytes() in p.read_bytes()]

        fleet.run_until(lambda: fleet.closed() == 3, 100)
        (state,) = held_states(fleet, NAME).values()
        assert holding(state)  # the search can find a model
        assert holding(origin) == []
        fleet.run(100)
        fleet.settle()
        assert finish_of(fleet, NAME)
        assert holding(origin) == []


def test_new_run_cancels_the_finish(tmp_path):
    """The finish is under way when the next run is announced: it ends before its first step, and the run takes every device."""
    with make_fleet(tmp_path / "fleet", grouped_data(4, 2)) as fleet:
        fleet.run(100)
        fleet.settle()
        for device in fleet.devices.values():
            device.runtime.tick(fleet.now_s)
            assert device.runtime.finishing
        begin_run(fleet, local=MINI)
        fleet.run_until(lambda: bool(fleet.records()), 100)
        for device in fleet.devices.values():
            assert not device.runtime.finishing
            assert not device.finish_worker.work()
        records = fleet.run(100)
        fleet.settle()
        assert [len(record["clusters"]) for record in records] == [4] * len(records)
        assert [m.run for m in FinishedModels(fleet.stage.device_dir(NAME)).models()] == [1, 2]
        assert finish_of(fleet, NAME)
        assert choice(fleet).run_id == fleet.plan.run_id


def test_choice_is_better_on_unfit_data(tmp_path):
    """The choice answers and is better on data that one model does not fit."""
    with make_fleet(tmp_path / "fleet", grouped_data(4, 2), local=MINI, rounds=5) as fleet:
        fleet.run(100)
        fleet.settle()
        data = grouped_data(4, 2)[NAME]
        folder = fleet.stage.device_dir(NAME)
        np.savez(tmp_path / "x.npz", x=data.x)
        before = (inference.choose(folder).predict(tmp_path / "x.npz") == data.y).mean()
        finish_of(fleet, NAME)
        after = (inference.choose(folder).predict(tmp_path / "x.npz") == data.y).mean()
        assert after > before + 0.1


def test_models_on_the_path_are_candidates(tmp_path):
    """Models of the devices path are candidates."""
    cfl = {"algorithm": "cfl", "rounds": 8, "local": LocalTraining(epochs=2, batch_size=10, lr=0.5)}
    with make_fleet(tmp_path / "fleet", grouped_data(8, 2), settings={"path": "on"}, **cfl) as fleet:
        fleet.run(10)
        fleet.settle()
        finish_of(fleet, NAME)
        assert [fit.name for fit in choice(fleet).fits] == ["cluster", "1", "3", "10", "node-0", "alone"]
