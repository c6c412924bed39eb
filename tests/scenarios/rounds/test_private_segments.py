"""Private parameters in whole fleets: they are trained and used on the device, and no byte of them leaves it."""

import functools
import itertools

import numpy as np
import pytest
from shoal_lab.loopback.fleet import draw_origins
from shoal_lab.loopback.transport import Hop

from edge_client.answers import inference
from edge_client.learning.data import split
from edge_client.models.private_values import parse_values
from edge_client.protocol.round_state import Stage
from edge_client.run.jobs import split_seed
from edge_client.storage.finished_models import FinishedModels
from edge_client.storage.pending_upload import PENDING_FILES
from edge_client.storage.state import DeviceState
from shoal.protocol.recipe import LocalTraining
from tests.helpers.cases import with_long
from tests.helpers.fleets import (
    CLASSES,
    INPUTS,
    begin_run,
    finish_of,
    grouped_data,
    make_exact_fleet,
    make_fleet,
    open_upload,
    restart_aggregator,
    restart_device,
    thetas,
    uploads_of,
)
from tests.helpers.power_cuts import PowerCut, cut
from tests.helpers.tasks import logistic_bundle
from tests.scenarios.round_fleets import held_states

INITIAL = np.array([0.5, -0.25, 0.125, 1.0], np.float32)
BUNDLE = logistic_bundle(INPUTS, CLASSES, private=INITIAL)
FEDERATED = INPUTS * CLASSES
MODES = ("rotation", "permutation", "signed-permutation", "none")
MINI = LocalTraining(epochs=1, batch_size=8, lr=0.3)
NAME = "dev-01"


def stored(fleet, name):
    """Return the private values (before, after) the last round of a device, from its disk; None if it has none."""
    found = DeviceState(fleet.stage.device_dir(name)).pending.load().private
    return parse_values(found, fleet.plan.run_id, CLASSES)[1:] if found else None


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """Device -> bytes of the model it ends a calm run with."""
    with make_exact_fleet(tmp_path_factory.mktemp("calm") / "fleet", bundle=BUNDLE, local=MINI, rounds=5) as fleet:
        fleet.run(30)
        return thetas(fleet)


def test_devices_share_the_federated_part(calm):
    """Devices share the federated part and no private one."""
    cut = 4 * FEDERATED
    assert len({theta[:cut] for theta in calm.values()}) == 1
    assert len({theta[cut:] for theta in calm.values()}) == len(calm)
    assert INITIAL.tobytes() not in {theta[cut:] for theta in calm.values()}


@pytest.mark.parametrize("mode", MODES)
def test_only_federated_values_are_uploaded(tmp_path, calm, mode, tap):
    """The vectors have d coordinates (rotation pads them inside the mask only), and the run ends as in any other mode."""
    with make_fleet(tmp_path / "fleet", bundle=BUNDLE, local=MINI, rounds=5, mode=mode, faults=tap) as fleet:
        assert fleet.plan.length == FEDERATED
        fleet.run(30)
        bodies = [open_upload(fleet, NAME, sealed) for sealed in uploads_of(fleet, tap, NAME)]
        assert [upload.length for upload, _ in bodies] == [FEDERATED] * 5 + [0]
        found = fleet.model(NAME).theta
    np.testing.assert_allclose(found, np.frombuffer(calm[NAME], np.float32), atol=1e-5)


def test_no_private_byte_leaves_a_device(tmp_path, tap):
    """Neither sealed nor opened, in uploads, states, checkpoints or on the aggregator's disk, under no mask."""
    with make_fleet(tmp_path / "fleet", bundle=BUNDLE, local=MINI, rounds=4, mode="none", faults=tap) as fleet:
        values, changes = set(), []
        for rounds in range(1, 5):
            fleet.run_until(lambda rounds=rounds: fleet.closed() >= rounds, 30)
            for before, after in (stored(fleet, name) for name in fleet.stage.devices):
                values |= {before.tobytes(), after.tobytes()}
                changes.append(after - before)
        fleet.run(30)
        for name in fleet.stage.devices:
            assert finish_of(fleet, name)
        values -= {INITIAL.tobytes()}
        assert len(values) > 10
        # Single values too: no float32 of them may stand anywhere by itself.
        pieces = {value[at : at + 4] for value in values for at in range(0, len(value), 4)} | values
        uploads = {name: uploads_of(fleet, tap, name) for name in fleet.stage.devices}
        clear = [open_upload(fleet, name, sealed) for name, each in uploads.items() for sealed in each]
        vectors = np.concatenate([np.frombuffer(body[: 4 * upload.length], "<f4") for upload, body in clear])
        assert not {vector.tobytes() for vector in vectors} & pieces
        windows = np.lib.stride_tricks.sliding_window_view(vectors, CLASSES)
        assert min(np.abs(windows - change).max(1).min() for change in changes) > 1e-4
        assert not [body for _, body in clear if any(value in body for value in values)]
        assert not [p.topic for p in tap.heard if any(value in p.payload for value in values)]
        server = [path for path in fleet.stage.aggregator_dir.rglob("*") if path.is_file()]
        assert server
        assert not [path for path in server if any(value in path.read_bytes() for value in values)]
        for state in itertools.chain.from_iterable(held_states(fleet, n).values() for n in fleet.stage.devices):
            assert len(state) == FEDERATED


def test_values_are_the_users_and_the_runs(tmp_path):
    """They are private to the device's user, begin anew in a run of the same task, and are not stored with another's."""
    with make_fleet(tmp_path / "fleet", bundle=BUNDLE, local=MINI) as fleet:
        fleet.run(30)
        assert [(fleet.stage.device_dir(NAME) / f).stat().st_mode & 0o777 for f in PENDING_FILES] == [0o600, 0o600]
        before, after = stored(fleet, NAME)
        assert not np.array_equal(before, after)
        np.testing.assert_array_equal(fleet.model(NAME).theta[FEDERATED:], after)
        begin_run(fleet, local=MINI)
        fleet.run_until(lambda: bool(fleet.records()), 30)
        np.testing.assert_array_equal(stored(fleet, NAME)[0], INITIAL)
        begin_run(fleet, bundle=logistic_bundle(INPUTS, CLASSES), local=MINI)
        fleet.run(30)
        assert fleet.model(NAME).run == 3
        assert stored(fleet, NAME) is None
        # The finished model of the earlier run keeps them, as it keeps the rest of that model.
        store = FinishedModels(fleet.stage.device_dir(NAME))
        first = store.models()[0]
        np.testing.assert_array_equal(store.load(first, first.own).theta[FEDERATED:], after)


@pytest.mark.parametrize("victim", ["between two writes", "sending device", "aggregator"])
def test_a_kill_changes_no_bit(tmp_path, calm, monkeypatch, victim, tap):
    """A round is trained once, even if it is worked on twice."""
    with make_exact_fleet(tmp_path / "fleet", bundle=BUNDLE, local=MINI, rounds=5, quorum=1.0, faults=tap) as fleet:
        fleet.run_until(lambda: fleet.closed() == 2, 30)
        if victim == "aggregator":
            restart_aggregator(fleet, steps=1)
        elif victim == "sending device":
            hold = tap.lose(client=fleet.client_id(NAME), ending="/up", hop=Hop.UP)
            fleet.run_until(lambda: fleet.devices[NAME].runtime.session.round.stage is Stage.SENDING, 30)
            fleet.settle()
            fleet.kill_device(NAME)
            tap.forgive(hold)
            fleet.step()
            fleet.revive_device(NAME)
        else:
            uplink = fleet.devices[NAME].runtime._uplink
            monkeypatch.setattr(uplink, "keep", cut)
            earlier = stored(fleet, NAME)[1].copy()
            with pytest.raises(PowerCut):
                fleet.run_until(lambda: fleet.finished, 30)
            np.testing.assert_array_equal(stored(fleet, NAME)[1], earlier)
            restart_device(fleet, NAME)
        fleet.run(100)
        assert thetas(fleet) == calm


def test_path_models_take_newest_values(tmp_path):
    """The newest private values, with any model of CFL's path."""
    cfl = {"algorithm": "cfl", "rounds": 8, "local": LocalTraining(epochs=2, batch_size=10, lr=0.5)}
    with make_fleet(tmp_path / "fleet", grouped_data(8, 2), bundle=BUNDLE, settings={"path": "on"}, **cfl) as fleet:
        fleet.run(30)
        fleet.settle()
        store = FinishedModels(fleet.stage.device_dir(NAME))
        model = store.models()[-1]
        assert model.above, "the clusters have split"
        for node in (*model.above, model.own):
            np.testing.assert_array_equal(store.load(model, node).theta[FEDERATED:], stored(fleet, NAME)[1])
        assert finish_of(fleet, NAME)
        choice, _ = store.personal(model)
        assert [fit.name for fit in choice.fits] == ["cluster", "1", "3", "10", "node-0", "alone"]


def test_torn_values_are_trained_again(tmp_path, caplog):
    """A power cut has torn the newest slot: the round is trained again, from the values of the round before."""
    with make_exact_fleet(tmp_path / "fleet", bundle=BUNDLE, local=MINI, rounds=5, quorum=1.0) as fleet:
        fleet.run_until(lambda: fleet.closed() == 2, 30)
        fleet.kill_device(NAME)
        files = DeviceState(fleet.stage.device_dir(NAME)).pending
        values = files.load().private
        for name in PENDING_FILES:
            path = fleet.stage.device_dir(NAME) / name
            path.write_bytes(path.read_bytes().replace(values, values[:-1] + b"\0"))
        fleet.revive_device(NAME)
        assert "a slot is damaged" in caplog.text
        fleet.run(100)
        assert fleet.model(NAME).round == 6


def test_last_newcomer_has_initial_values(tmp_path):
    """A device that joins for the final round has the initial values."""
    with make_fleet(tmp_path / "fleet", count=4, bundle=BUNDLE, local=MINI, rounds=2, quorum=0.5) as fleet:
        fleet.kill_device("dev-03")
        fleet.run_until(lambda: fleet.closed() == 1, 100)
        fleet.revive_device("dev-03")
        fleet.run(100)
        model = fleet.model("dev-03")
        np.testing.assert_array_equal(model.theta[FEDERATED:], INITIAL)
        np.testing.assert_array_equal(model.theta[:FEDERATED], fleet.model(NAME).theta[:FEDERATED])
        assert stored(fleet, "dev-03") is None


def test_answers_use_the_private_values(tmp_path):
    """Answers exports and the finish use the private values."""
    with make_fleet(tmp_path / "fleet", grouped_data(4, 2, n=120), bundle=BUNDLE, local=MINI) as fleet:
        fleet.run(30)
        fleet.settle()
        folder, data = fleet.stage.device_dir(NAME), grouped_data(4, 2, n=120)[NAME]
        np.savez(tmp_path / "x.npz", x=data.x)
        theta = fleet.model(NAME).theta
        expected = (data.x @ theta[:FEDERATED].reshape(INPUTS, CLASSES) + theta[FEDERATED:]).argmax(1)
        assert np.array_equal(inference.choose(folder).predict(tmp_path / "x.npz"), expected)
        exported = inference.choose(folder).export(tmp_path / "own.onnx")
        np.testing.assert_array_equal(exported.theta, theta)
        assert theta.astype("<f4").tobytes() in (tmp_path / "own.onnx").read_bytes()
        store = FinishedModels(folder)
        before = store.models()[-1].validation.loss
        assert finish_of(fleet, NAME)
        choice, _ = store.personal(store.models()[-1])
        assert choice.fits[0].name == "cluster"
        assert choice.fits[0].loss == pytest.approx(before, rel=1e-4)
        assert len(inference.choose(folder).at(None).theta) == BUNDLE.length


HIDDEN = 16


@pytest.fixture
def compiled(compile_once):
    """Return a function (private, shared) -> a small compiled network with private and shared parameters of these prefixes."""
    import torch

    from shoal.owner.task_compiler.builtin import build

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)  # the private values that devices begin with
        source = build("mlp", inputs=INPUTS, hidden=HIDDEN, classes=CLASSES)
    return functools.partial(compile_once, *source[:3], name="heads", kind="classification")


@pytest.mark.long
@pytest.mark.torch
def test_private_heads_serve_permuted_labels(tmp_path, compiled):
    """FedAvg alone gets no group right; with the last layer private one body serves four groups."""
    data = grouped_data(8, 4, n=150)
    local = LocalTraining(epochs=3, batch_size=10, lr=0.2)
    accuracy = {}
    for private in ((), ("readout",)):
        options = {"bundle": compiled(private=private), "local": local, "rounds": 8}
        with make_fleet(tmp_path / f"fleet{len(private)}", data, **options) as fleet:
            last = fleet.run(60)[-1]
            accuracy[private] = last["correct"] / last["tested"]
            assert len(set(last["clusters"].values())) == 1
    assert accuracy[()] < 0.5
    assert accuracy["readout",] > 0.8


@pytest.mark.torch
@pytest.mark.parametrize(
    ("private", "algorithm", "shared", "weight"),
    [
        *with_long([("readout", "fedavg", (), 0.0), ("hidden", "fedavg", (), 0.0), ("", "fedavg", (), 0.0)]),
        ("", "fedavg", (), 0.3),
        ("readout", "ifca", (), 0.3),
        ("readout.bias", "ifca", ("hidden",), 0.0),
    ],
)
def test_device_and_simulator_train_the_same(tmp_path, compiled, private, algorithm, shared, weight):
    """One fleet under a fixed seed, with the shares that its devices cut; the mask's rounding is all that differs.

    Without private parameters too. They have the same candidates at the end, also the one that begins afresh, and choose alike.
    """
    from shoal.simulation.data import Population, Shard
    from shoal.simulation.engine import personal, simulate
    from shoal.simulation.engine.fleet import sim_options
    from shoal.simulation.engine.private import PrivateStart
    from shoal.simulation.trainers.networks import OneHidden

    settings, count = ({}, 1) if algorithm == "fedavg" else ({"k": "2"}, 2)
    data = grouped_data(4, 2, n=80)
    bundle = compiled(private=(private,) if private else (), shared=shared)
    manifest = bundle.manifest
    options = {"algorithm": algorithm, "settings": settings, "rounds": 4, "local": MINI, "min_contributors": 1}
    with make_fleet(tmp_path / "fleet", data, bundle=bundle, **options) as fleet:
        devices, fleet._personal = fleet.stage.devices, weight
        for name in devices:
            restart_device(fleet, name)
        fleet.run(100)
        fleet.settle()
        cut = [split(data[name], split_seed(fleet.devices[name].runtime._membership)) for name in devices]
        owns = [fleet.model(name) for name in devices]
        seed = fleet.plan.seed
        for name in devices:
            assert finish_of(fleet, name)
        kept = [FinishedModels(fleet.stage.device_dir(name)) for name in devices]
        chosen = [store.personal(store.models()[-1]) for store in kept]

    def shards(share):
        return tuple(Shard(getattr(c, share).x, getattr(c, share).y) for c in cut)

    network = OneHidden(INPUTS, HIDDEN, CLASSES)
    body, bias = INPUTS * HIDDEN + HIDDEN, network.length - CLASSES
    spans = {"hidden": (0, body), "readout": (body, network.length), "readout.bias": (bias, network.length), "": (0, 0)}
    places = np.arange(*spans[private])
    assert len(places) == manifest.private_length
    start = PrivateStart(places, np.frombuffer(bundle.private, "<f4")) if private else None
    population = Population(shards("train"), shards("validation"), shards("test"), names=tuple(devices))
    segments = tuple((s.name, s.length) for s in bundle.segments)
    done = simulate.simulate(
        algorithm,
        settings,
        population,
        network,
        sim_options(rounds=4, local=MINI, seed=seed, mode="none", min_contributors=1, segments=segments),
        start=draw_origins(manifest, count, seed),
        private=start,
    )
    taken = done.taken()
    assert [own.cluster for own in owns] == list(taken)
    models = np.stack([done.thetas[int(model)] for model in taken])
    whole = done.workforce.whole(models, np.arange(len(devices)))
    order = np.concatenate((start.federated(network.length), places)) if private else slice(None)
    for own, found in zip(owns, whole, strict=True):
        np.testing.assert_allclose(own.theta, found[order], atol=1e-4)
    fresh = personal.drawn_start(network, draw_origins(manifest, count, seed)[0], seed, start)
    found = personal.chosen(done.workforce, whole, done.all_rounds + 1, fresh, weight=weight)
    for (told, theta), simulated in zip(chosen, found, strict=True):
        assert [fit.name for fit in told.fits] == list(simulated.losses)
        np.testing.assert_allclose([fit.loss for fit in told.fits], list(simulated.losses.values()), rtol=1e-3)
        assert (told.choice, told.samples) == (simulated.choice, simulated.samples)
        if told.choice != "cluster":
            np.testing.assert_allclose(np.frombuffer(theta, "<f4"), simulated.theta[order], atol=1e-3)
    assert private or {told.choice for told, _ in chosen} != {"cluster"}
