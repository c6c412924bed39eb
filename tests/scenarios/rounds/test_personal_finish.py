"""The personal finish in a fleet: nothing of it travels, a new run never waits for it, and the simulator agrees with it."""

import numpy as np
import pytest
from shoal_lab.loopback.fleet import draw_origins

from edge_client.answers import inference
from edge_client.learning.data import split
from edge_client.run.jobs import split_seed
from edge_client.storage.finished_models import FinishedModels
from shoal.protocol.recipe import LocalTraining
from tests.helpers.fleets import (
    CLASSES,
    INPUTS,
    begin_run,
    finish_of,
    grouped_data,
    make_fleet,
    restart_device,
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


@pytest.mark.torch
@pytest.mark.parametrize("weight", [pytest.param(0.0, marks=pytest.mark.long), 0.3])
def test_device_and_simulator_choose_alike(tmp_path, compile_once, weight):
    """One fleet under a fixed seed, with the shares that its devices cut; the mask's rounding is all that differs."""
    from shoal.owner.task_compiler.builtin import build
    from shoal.simulation.data import Population, Shard
    from shoal.simulation.engine import personal, simulate
    from shoal.simulation.engine.fleet import sim_options
    from shoal.simulation.trainers.networks import Softmax

    data = grouped_data(4, 2, n=80)
    bundle = compile_once(*build("logistic", inputs=INPUTS, classes=CLASSES)[:3], name="small", kind="classification")
    with make_fleet(tmp_path / "fleet", data, bundle=bundle, local=MINI, rounds=4, min_contributors=3) as fleet:
        fleet._personal = weight
        for name in fleet.stage.devices:
            restart_device(fleet, name)
        fleet.run(100)
        fleet.settle()
        cut = [split(data[name], split_seed(fleet.devices[name].runtime._membership)) for name in fleet.stage.devices]
        models = np.stack([fleet.model(name).theta for name in fleet.stage.devices])
        for name in fleet.stage.devices:
            finish_of(fleet, name)
        by_device = [choice(fleet, name) for name in fleet.stage.devices]
        kept = [FinishedModels(fleet.stage.device_dir(name)) for name in fleet.stage.devices]
        thetas = [store.personal(store.models()[-1])[1] for store in kept]
        origin = draw_origins(fleet.bundle.manifest, 1, fleet.plan.seed)[0]
        lengths = fleet.bundle.manifest.lengths

    def shards(share):
        return tuple(Shard(getattr(c, share).x, getattr(c, share).y) for c in cut)

    names = tuple(sorted(data))
    population = Population(shards("train"), shards("validation"), shards("test"), names=names)
    network = Softmax(INPUTS, CLASSES)
    options = sim_options(rounds=4, local=MINI, seed=fleet.plan.seed, mode="none", min_contributors=1)
    done = simulate.simulate("fedavg", {}, population, network, options, start=origin[None])
    start = personal.drawn_start(network, origin, fleet.plan.seed)
    assert [int(np.prod(shape)) for shape in network.shapes] == list(lengths)
    np.testing.assert_allclose(done.thetas[0], models[0], atol=1e-5)
    found = personal.chosen(done.workforce, models, done.all_rounds + 1, start, weight=weight)
    assert {told.choice for told in by_device} != {"cluster"}
    for told, theta, simulated in zip(by_device, thetas, found, strict=True):
        assert [fit.name for fit in told.fits] == list(simulated.losses)
        np.testing.assert_allclose([fit.loss for fit in told.fits], list(simulated.losses.values()), rtol=1e-4)
        assert (told.choice, told.samples) == (simulated.choice, simulated.samples)
        if told.choice != "cluster":
            np.testing.assert_allclose(np.frombuffer(theta, "<f4"), simulated.theta, atol=1e-4)
