"""The files of a finished run's models: what they contain, and that none is replaced without a word."""

import dataclasses
import hashlib
import json
import re

import numpy as np
import onnxruntime as ort
import pytest

from edge_client.learning.model import OrtModel
from edge_client.models.states import ModelState
from shoal.errors import ConfigError, IntegrityError, TaskError
from shoal.owner.models.files import (
    LIST_FILE,
    check_folder,
    files_of,
    models_of,
    npz_bytes,
    read_models,
    state_dict,
    write_models,
)
from shoal.owner.models.final_round import FinalModel, FinishedRun, OpenedState
from shoal.protocol.states import StateId
from shoal.util.files import write_private
from tests.helpers import own_trainers
from tests.helpers.plans import run_plan
from tests.helpers.refusals import refused, unchanged
from tests.helpers.tasks import logistic_bundle

BUNDLE = logistic_bundle(4, 3)
THETA = np.random.default_rng(1).standard_normal((3, BUNDLE.length)).astype(np.float32)


def model(number, **changes):
    state = ModelState.of(StateId(number, 5), THETA[number].copy(), run_id=bytes(16), digest_key=bytes(32))
    own = OpenedState(state, b"", "dev-1", 6, ("dev-1", "dev-2"))
    made = FinalModel(
        model=number, theta=THETA[number], own=own, contributors=3, devices=("dev-1", "dev-2"), parents=()
    )
    return dataclasses.replace(made, **changes)


def finished(*numbers, missing=None):
    plan = dataclasses.replace(run_plan(fleet="reef"), task_digest=BUNDLE.digest)
    return FinishedRun(
        plan=plan,
        round=6,
        key_version=2,
        bundle=BUNDLE,
        models=tuple(model(n) for n in numbers),
        shared=None,
        missing=missing or {},
    )


@pytest.fixture
def place(tmp_path):
    (tmp_path / "owner").mkdir()
    return tmp_path / "owner", tmp_path / "out"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_written_as_onnx_and_by_name(place):
    """A model is written as ONNX and as parameters by name, the same each time, with the digests of its files."""
    owner, out = place
    document = write_models(finished(2, 0), owner, out)
    assert names(out) == ["model-0.npz", "model-0.onnx", "model-2.npz", "model-2.onnx", LIST_FILE]
    assert json.loads((out / LIST_FILE).read_text()) == document
    assert sorted(e["model"] for e in document["models"]) == [0, 2]
    (entry,) = [e for e in document["models"] if e["model"] == 2]
    assert entry["made_in"] == {"model": 2, "round": 5}
    for kind in ("onnx", "state"):
        data = (out / entry[kind]["file"]).read_bytes()
        assert (entry[kind]["bytes"], entry[kind]["sha256"]) == (len(data), hashlib.sha256(data).hexdigest())
    with np.load(out / "model-2.npz", allow_pickle=False) as found:
        arrays = {name: found[name] for name in found}
    assert {n: a.shape for n, a in arrays.items()} == {p.name: p.shape for p in BUNDLE.manifest.parameters}
    assert np.array_equal(np.concatenate([a.reshape(-1) for a in arrays.values()]), THETA[2])
    x = np.random.default_rng(2).standard_normal((5, 4)).astype(np.float32)
    (outputs,) = ort.InferenceSession((out / "model-2.onnx").read_bytes()).run(["outputs"], {"x": x})
    assert outputs.shape == (5, 3)
    assert out.stat().st_mode & 0o777 == 0o700
    again = out.with_name("again")
    write_models(finished(2, 0), owner, again)
    assert {n: (out / n).read_bytes() for n in names(out)} == {n: (again / n).read_bytes() for n in names(again)}


def test_own_code_has_a_flat_vector(place):
    """Where devices train with code of their own there is no ONNX; the layout is in the list."""
    owner, out = place
    bundle = own_trainers.bundle()
    run = dataclasses.replace(finished(0), bundle=bundle, models=(model(0, theta=THETA[0][: bundle.length]),))
    document = write_models(run, owner, out)
    assert names(out) == ["model-0.npy", "model-0.npz", LIST_FILE]
    assert np.array_equal(np.load(out / "model-0.npy", allow_pickle=False), THETA[0][: bundle.length])
    assert [(p["name"], p["shape"]) for p in document["parameters"]] == [("weight", [4, 3]), ("rounds", [])]
    assert files_of(document["models"]) == ["model-0.npy", "model-0.npz"]


def test_nothing_is_replaced_without_force(place):
    """Nothing is replaced without force and no stale model stays; other folders are refused in any case."""
    owner, out = place
    write_models(finished(0, 1), owner, out)
    with unchanged(out), refused(ConfigError, "holds models already", hint="--force"):
        write_models(finished(2), owner, out)
    document = write_models(finished(2, missing={3: "no device has sealed it"}), owner, out, force=True)
    assert names(out) == ["model-2.npz", "model-2.onnx", LIST_FILE]
    assert not document["complete"]
    assert document["missing"] == [{"model": 3, "reason": "no device has sealed it"}]
    write_private(out.with_name("home") / "thesis.tex", b"")
    with pytest.raises(ConfigError, match=re.escape("holds other things, such as thesis.tex")):
        check_folder(owner, out.with_name("home"), force=True)
    with pytest.raises(ConfigError, match="lies in the owner's directory"):
        check_folder(owner, owner / "models", force=False)


def test_cut_output_is_completed_with_force(place):
    """An output that was cut short counts as models; a folder that can't be completed is without its list."""
    owner, out = place
    out.mkdir(mode=0o700)
    (out / "model-0.onnx").write_bytes(b"half")
    (out / f".model-1.npz.{'a' * 16}.999999.new").write_bytes(b"half")
    with pytest.raises(ConfigError, match="holds models already"):
        check_folder(owner, out, force=False)
    write_models(finished(1), owner, out, force=True)
    assert names(out) == ["model-1.npz", "model-1.onnx", LIST_FILE]
    broken = dataclasses.replace(finished(0), models=(model(1), model(2, theta=np.full_like(THETA[0], np.nan))))
    with pytest.raises(TaskError, match="not finite"):
        write_models(broken, owner, out, force=True)
    assert LIST_FILE not in names(out)


def test_arrays_of_any_name_are_archived(tmp_path):
    path = tmp_path / "a.npz"
    path.write_bytes(npz_bytes({"file": np.float32([1]), "0.weight": np.zeros((2, 3), np.float32), "s": np.float32(4)}))
    with np.load(path, allow_pickle=False) as found:
        assert {n: found[n].shape for n in found} == {"file": (1,), "0.weight": (2, 3), "s": ()}


@pytest.mark.torch
def test_torch_loads_the_parameters(compile_once, tmp_path):
    """As docs/operator/models.md says."""
    import torch

    from shoal.owner.task_compiler.builtin import build

    source = build("logistic", inputs=8, classes=3)
    bundle = compile_once(*source[:3], name="logistic", kind=source.kind, hyper=source.hyper)
    theta = np.random.default_rng(3).standard_normal(bundle.length).astype(np.float32)
    (tmp_path / "m.npz").write_bytes(npz_bytes(state_dict(bundle.manifest, theta)))
    net = source.model
    net.load_state_dict({n: torch.from_numpy(v) for n, v in np.load(tmp_path / "m.npz").items()})
    x = np.random.default_rng(4).standard_normal((6, 8)).astype(np.float32)
    expected = OrtModel(bundle).predict(theta, x)
    assert np.allclose(net(torch.from_numpy(x)).detach().numpy(), expected, atol=1e-5)


# --------------------------------------------------------------------------------------------------------- read again


@pytest.mark.parametrize("text", ["no json", "[]", "{}", '{"models": [{"model": 0}], "task": {"digest": ""}}'])
def test_folder_without_list_is_refused(place, text):
    """A folder without a list of models is refused."""
    owner, out = place
    write_models(finished(0), owner, out)
    (out / LIST_FILE).write_text(text)
    with pytest.raises(ConfigError, match="is no list of models"):
        read_models(out, BUNDLE)


def listed(out, document, arrays):
    """Replace a model's archive, and its digest in the list."""
    data = npz_bytes(arrays) if isinstance(arrays, dict) else arrays
    (out / "model-0.npz").write_bytes(data)
    document["models"][0]["state"]["sha256"] = hashlib.sha256(data).hexdigest()
    (out / LIST_FILE).write_text(json.dumps(document))


def test_unlisted_or_damaged_is_refused(place):
    """So is another file than the listed one, and one outside of the folder, about which a list is not believed."""
    owner, out = place
    document = write_models(finished(0), owner, out)
    arrays = state_dict(BUNDLE.manifest, THETA[0].copy())
    write_private(out.with_name("model-0.npz"), (out / "model-0.npz").read_bytes())
    document["models"][0]["state"]["file"] = "../model-0.npz"
    (out / LIST_FILE).write_text(json.dumps(document))
    with pytest.raises(IntegrityError, match="is not the file"):
        read_models(out, BUNDLE)
    document["models"][0]["state"]["file"] = "model-0.npz"
    (out / LIST_FILE).write_text(json.dumps(document))
    (out / "model-0.npz").write_bytes(npz_bytes(arrays) + b"x")
    with pytest.raises(IntegrityError, match=r"is not the file that models\.json lists"):
        read_models(out, BUNDLE)
    first = next(iter(arrays))
    for wrong in (b"", b"no archive", b"PK", {}, {first: arrays[first][:1]}, {**arrays, first: arrays[first] * np.inf}):
        listed(out, document, wrong)
        with pytest.raises(IntegrityError, match=r"is damaged|does not hold the task's parameters"):
            read_models(out, BUNDLE)


def test_models_come_from_the_broker_alike(place):
    """The models of a run are the same from the broker and from a folder, and of another task from neither."""
    owner, out = place
    write_models(finished(2, 0), owner, out)
    found = read_models(out, BUNDLE)
    assert list(found) == [0, 2]
    assert {m: (t.dtype, t.tobytes()) for m, t in found.items()} == {
        m: (np.float32, THETA[m].tobytes()) for m in (0, 2)
    }
    assert {m: t.tobytes() for m, t in models_of(finished(2, 0), BUNDLE).items()} == {
        m: THETA[m].tobytes() for m in (0, 2)
    }
    with pytest.raises(TaskError, match="of another task"):
        read_models(out, logistic_bundle(4, 2))
    with pytest.raises(TaskError, match="the models of run 1 are of another task"):
        models_of(finished(0), logistic_bundle(4, 2))
