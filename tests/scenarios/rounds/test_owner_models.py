"""The owner fetches the models of a finished run from the broker: they are those that the devices ended with, bit for bit."""

import dataclasses
import json

import numpy as np
import pytest

from edge_client.learning.model import OrtModel
from edge_client.learning.standardisation import standardised
from edge_client.storage.scales import Scales
from shoal.errors import ConfigError, NotReadyError, UntrustedError
from shoal.owner.models.files import write_models
from shoal.protocol.recipe import LocalTraining
from shoal.protocol.states import StateId
from shoal.task.data_declaration import DataDeclaration
from shoal.util.telemetry import import_onnxruntime
from tests.helpers.fleets import (
    CLASSES,
    INPUTS,
    grouped_data,
    make_fleet,
    names,
    restart_aggregator,
    same_partition,
    truth_of,
)
from tests.helpers.owner_models import reader_of
from tests.helpers.tasks import logistic_bundle

ROTATION = {"mode": "rotation"}
CFL = {"algorithm": "cfl", "rounds": 8, "local": LocalTraining(epochs=2, batch_size=10, lr=0.5)}
IFCA = {"algorithm": "ifca", "rounds": 6, "settings": {"k": "2"}}


def flat(folder, entry, manifest):
    """Return the vector in a model's file of parameters, (d,) float32."""
    with np.load(folder / entry["state"]["file"], allow_pickle=False) as found:
        assert set(found) == {p.name for p in manifest.parameters}
        return np.concatenate([found[p.name].reshape(-1) for p in manifest.parameters])


def fetched(fleet, folder):
    """Write the models of the fleet's finished run, and return models.json and each model's vector by its id."""
    document = write_models(reader_of(fleet).finished_run(), fleet.stage.fleet.path, folder)
    assert json.loads((folder / "models.json").read_text()) == document
    return document, {e["model"]: flat(folder, e, fleet.bundle.manifest) for e in document["models"]}


def equal_to_devices(fleet, thetas):
    """Whether each device ended with the bits that the owner has of its cluster's model."""
    owns = [fleet.model(name) for name in fleet.stage.devices]
    return all(own.theta.tobytes() == thetas[own.cluster].tobytes() for own in owns)


@pytest.mark.parametrize("mode", ["permutation", "rotation"])
def test_fedavg(tmp_path, mode):
    with make_fleet(tmp_path / "fleet", count=4, rounds=3, mode=mode, min_contributors=3) as fleet:
        fleet.run(20)
        document, thetas = fetched(fleet, tmp_path / "models")
        assert equal_to_devices(fleet, thetas)
    (model,) = document["models"]
    assert (document["complete"], document["final_round"], document["shared"]) == (True, 4, None)
    assert model["made_in"] == {"model": 0, "round": 3}
    assert (model["devices"], model["contributors"], model["parents"]) == (list(names(4)), 4, [])
    assert len(model["certified_by"]) == 3
    assert model["sealed_in"] == 4


@pytest.mark.parametrize(("settings", "parents"), [({}, [0, 0]), ({"path": "on"}, [0, 1, 1])], ids=["own", "path"])
def test_cfl_after_a_split(tmp_path, settings, parents):
    """The document names the models above a cluster where devices keep the path."""
    with make_fleet(tmp_path / "fleet", grouped_data(8, 2), settings=settings, **CFL, **ROTATION) as fleet:
        records = fleet.run(100)
        document, thetas = fetched(fleet, tmp_path / "models")
        assert equal_to_devices(fleet, thetas)
    clusters = {device: e["model"] for e in document["models"] for device in e["devices"]}
    assert clusters == records[-1]["clusters"]
    assert same_partition(clusters, truth_of(8, 2))
    tree = {e["model"]: e["parents"] for e in document["models"]}
    assert sorted(len(above) for above in tree.values()) == parents
    assert {root for above in tree.values() for root in above} == tree.keys() - set(clusters.values())


@pytest.mark.parametrize("segment", ["cluster", "shared"])
def test_ifca_with_or_without_shared_weights(tmp_path, segment):
    """Ifca with and without shared weights."""
    bundle = logistic_bundle(INPUTS, CLASSES, segment=segment)
    with make_fleet(tmp_path / "fleet", grouped_data(6, 2), bundle=bundle, **IFCA, **ROTATION) as fleet:
        fleet.run(50)
        document, thetas = fetched(fleet, tmp_path / "models")
        assert equal_to_devices(fleet, thetas)
    assert sorted(thetas) == [0, 1]
    assert (document["shared"] is None) == (segment == "cluster")
    assert document["models"][0]["devices"] is None, "devices choose in the final round"


def test_a_run_under_way_has_no_models_yet(tmp_path):
    with make_fleet(tmp_path / "fleet", rounds=8, **ROTATION) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 2, 60)
        with pytest.raises(NotReadyError, match=r"run 1 is in round \d of 8"):
            reader_of(fleet).finished_run()
        fleet.run(60)
        assert reader_of(fleet, 1).finished_run().models
        with pytest.raises(NotReadyError, match="the broker holds run 1, not run 2"):
            reader_of(fleet, 2).finished_run()


def test_later_keys_still_open_the_models(tmp_path):
    """Keys drawn after the run still open its models, which an aggregator that restarts leaves there."""
    with make_fleet(tmp_path / "fleet", count=4, **ROTATION) as fleet:
        fleet.run(20)
        restart_aggregator(fleet)
        owner = fleet.stage.fleet
        before = owner.roster.keys_since
        owner.rotate()
        owner.rotate()
        fleet.publish()
        for _ in range(20):
            fleet.step()
        found = reader_of(fleet).finished_run()
        assert found.key_version == before < owner.roster.keys_since
        assert found.models[0].own.state.id == StateId(0, 3)
        assert found.models[0].theta.tobytes() == fleet.model("dev-00").theta.tobytes()
        owner.forget_versions_before(before + 1)
        with pytest.raises(ConfigError, match="does not hold the keys of the key version"):
            reader_of(fleet).finished_run()


def test_newer_keys_of_a_run_open_it(tmp_path):
    """A run that took up newer keys is opened with those."""
    with make_fleet(tmp_path / "fleet", count=4, rounds=8, **ROTATION) as fleet:
        fleet.run_until(lambda: fleet.closed() >= 3, 60)
        owner = fleet.stage.fleet
        owner.rotate()
        fleet.publish()
        fleet.run(60)
        owner.forget_versions_before(owner.roster.keys_since)
        found = reader_of(fleet).finished_run()
        assert found.key_version == owner.roster.keys_since > found.plan.key_version
        assert found.models[0].theta.tobytes() == fleet.model("dev-00").theta.tobytes()


def test_revoked_statements_do_not_count(tmp_path):
    """Statements of revoked devices do not count."""
    with make_fleet(tmp_path / "fleet", count=3, min_contributors=3, **ROTATION) as fleet:
        fleet.run(20)
        sender = reader_of(fleet).finished_run().models[0].own.sealed_by
        gone = next(name for name in names(3) if name != sender)
        fleet.stage.fleet.revoke(gone)
        with pytest.raises(
            UntrustedError, match="2 devices of the roster have signed state 3 of model 0, 3 are needed"
        ):
            reader_of(fleet).finished_run()


def test_private_values_are_the_initial(tmp_path):
    """The owner has the federated coordinates that the devices ended with, and none that a device trained for itself."""
    initial = np.arange(CLASSES, dtype=np.float32)
    bundle = logistic_bundle(INPUTS, CLASSES, private=initial)
    with make_fleet(tmp_path / "fleet", bundle=bundle, count=3) as fleet:
        fleet.run(20)
        document, thetas = fetched(fleet, tmp_path / "models")
        own = fleet.model("dev-00").theta
    assert document["private_coordinates"] == CLASSES
    assert [p["segment"] for p in document["parameters"]] == ["cluster", "private"]
    np.testing.assert_array_equal(thetas[0][:-CLASSES], own[:-CLASSES])
    np.testing.assert_array_equal(thetas[0][-CLASSES:], initial)
    assert not np.array_equal(own[-CLASSES:], initial)


def test_scale_is_in_files_statistics_not(tmp_path):
    """The fleets scale is in the files and its statistics are no model."""
    data = DataDeclaration(
        features=tuple(f"f{i}" for i in range(INPUTS)), low=(-9,) * INPUTS, high=(9,) * INPUTS, standardise="federated"
    )
    plain = logistic_bundle(INPUTS, CLASSES)
    bundle = dataclasses.replace(plain, manifest=dataclasses.replace(plain.manifest, data=data))
    with make_fleet(tmp_path / "fleet", count=4, bundle=bundle, rounds=4, min_contributors=3) as fleet:
        fleet.run(20)
        document, thetas = fetched(fleet, tmp_path / "models")
        assert equal_to_devices(fleet, thetas)
        scale = Scales(fleet.stage.device_dir(names(4)[0])).load(fleet.plan.run_id)
    assert (list(thetas), document["complete"], document["missing"]) == ([0], True, [])
    assert document["data"]["standardise"] == "federated"
    (model,) = document["models"]
    assert (model["means"], model["deviations"]) == (list(scale.means), list(scale.deviations))
    session = import_onnxruntime().InferenceSession(
        tmp_path / "models" / "model-0.onnx", providers=["CPUExecutionProvider"]
    )
    x = np.ones((2, INPUTS), np.float32)
    outputs, *_ = session.run(None, {"x": x})
    np.testing.assert_allclose(
        outputs, OrtModel(bundle).predict(thetas[0], standardised(x, scale)), rtol=1e-4, atol=1e-5
    )
