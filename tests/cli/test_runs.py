"""`shoal-fleet run start`: its options, and the plan that it signs."""

from __future__ import annotations

import hashlib
import json

import numpy as np
import pytest

from crypto.seal.envelope import GroupKey, open_from_group, read_head
from crypto.seal.identity import Identity, open_document
from edge_client.models.checkpoints import CONTENT_LABEL
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.models.files import npz_bytes, state_dict
from shoal.owner.runs.plan import run_chain
from shoal.owner.task_compiler.signed import Source, read_signed, write_signed
from shoal.protocol.codec import decode
from shoal.protocol.documents import RunPackage, RunPlan
from shoal.task.manifest import Parameter
from shoal.util.files import exclusive, write_private
from tests.helpers.receiving import device_card
from tests.helpers.tasks import logistic_bundle

RUN = ("shoal-fleet", "run", "start", "owner", "--task", "task", "--out", "signed.run")


def grow(call, devices):
    """Add devices to the roster until it has so many."""
    owner = FleetDirectory(call.home / "owner")
    for n in range(len(owner.roster.active()) + 1, devices + 1):
        owner.add_device(device_card(Identity.generate(f"dev-{n}")))


def sign_logistic(call):
    """Write ``task``: the parameters of the built-in `logistic` with 4 inputs, and graphs that no test here runs."""
    inputs, classes = 4, 10
    parameters = (Parameter("fc.weight", (classes, inputs), "cluster"), Parameter("fc.bias", (classes,), "cluster"))
    owner = FleetDirectory(call.home / "owner").owner
    bundle = logistic_bundle(inputs, classes, parameters=parameters)
    write_signed(bundle, Source("logistic", {"inputs": inputs}), owner, call.home / "task")


def test_help_of_start(call):
    told = call("shoal-fleet", "run", "start", "--help").out
    assert "--rounds" in told
    assert "--norm-limit" not in told
    assert "one-shot" in told
    assert len(told.splitlines()) <= 60
    told = " ".join(call("shoal-fleet", "run", "start", "--help-all").out.split())
    words = (
        *("default: random", "--norm-limit", "fedgroup: FedGroup", "groups=auto alpha=20 measure=edc", "one-shot:"),
        *("fesem:", "local:", "(no settings)"),
    )
    assert [word for word in words if word not in told] == []


def test_run_takes_cfl_by_default(call, fleet, task):
    """A run takes cfl unless told otherwise and says so."""
    told = call(*RUN, "--set", "epsilon=1", status=3)
    assert "algorithm cfl, the default; `--help` lists the others" in told.err
    assert "cfl has no setting 'epsilon'" in told.err
    assert "the default" not in call(*RUN, "--algorithm", "cfl", "--set", "epsilon=1", status=3).err


@pytest.mark.torch
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(("fedavg",), id="fedavg", marks=pytest.mark.long),
        pytest.param(("ifca", "--set", "k=2", "--set", "restarts=2"), id="ifca"),
    ],
)
def test_plan_does_not_give_away_the_origins(call, fleet, options):
    """The aggregator knows the plan's seed, and may know the architecture: neither may lead to the initial models."""
    pytest.importorskip("torch")
    from shoal.owner.task_compiler.origin import make_origins

    sign_logistic(call)
    grow(call, 2)
    run = (*RUN, "--algorithm", *options, "--min-contributors", "1", "--seed", "7")
    first, second = (run_in(call, call(*run).last) for _ in range(2))
    assert first[0].seed == second[0].seed == 7
    assert not (first[1] == second[1]).all(axis=1).any()
    guess = make_origins("logistic", first[0].origins, first[0].seed, inputs=4)
    assert not np.isclose(first[1], guess).all(axis=1).any()


def run_in(call, path):
    """Return a run file's plan and its origins (origins, d), opened as a device opens them."""
    owner = FleetDirectory(call.home / "owner")
    package = decode((call.home / path).read_bytes(), RunPackage)
    plan = open_document(package.plan, RunPlan, owner.owner.member.sign_key)
    head, at = read_head(package.origins)
    group = GroupKey(owner.name, CONTENT_LABEL, run_chain(owner, plan).take().content)
    raw = open_from_group(group, package.origins, head, at, owner.owner.member.sign_key)
    return plan, np.frombuffer(raw, "<f4").reshape(plan.origins, plan.length)


@pytest.mark.torch
def test_origins_are_drawn_before_the_lock(call, fleet):
    """Loading torch and building a model may take long, and other commands needn't wait for it."""
    pytest.importorskip("torch")
    owner = FleetDirectory(call.home / "owner")
    write_signed(logistic_bundle(), Source("model.py:make", {}), owner.owner, call.home / "task")
    (call.home / "model.py").write_text("def make():\n    raise OSError('the model is being built')\n")
    with exclusive(owner.path, wait_s=0, hint="-"):
        told = call(*RUN, "--algorithm", "fedavg", "--min-contributors", "1", status=8)
    assert "the model is being built" in told.err


def models_folder(call, thetas):
    """Write ``models`` with these vectors (d,) as `models get` does."""
    bundle, _ = read_signed(call.home / "task", FleetDirectory(call.home / "owner").owner)
    entries = []
    for number, theta in enumerate(thetas):
        data = npz_bytes(state_dict(bundle.manifest, theta))
        write_private(call.home / "models" / f"model-{number}.npz", data)
        state = {"file": f"model-{number}.npz", "sha256": hashlib.sha256(data).hexdigest()}
        entries.append({"model": number, "state": state})
    document = {"task": {"digest": bundle.digest.hex()}, "models": entries}
    write_private(call.home / "models" / "models.json", json.dumps(document).encode())


def test_run_begins_with_all_models_before(call, fleet):
    """A run takes the models of a folder or of a run at the broker, and ships them all."""
    sign_logistic(call)
    grow(call, 2)
    thetas = np.random.default_rng(1).standard_normal((2, 50)).astype(np.float32)
    models_folder(call, thetas)
    more = ("--min-contributors", "1", "--from")
    plan, origins = run_in(call, call(*RUN, "--algorithm", "cfl", *more, "models").last)
    assert plan.origins == 2
    np.testing.assert_array_equal(origins, thetas)
    told = call(*RUN, "--algorithm", "fedavg", *more, "models", status=2)
    assert "the algorithm begins with 1 models, and --from gives 2" in told.err
    plan, origins = run_in(call, call(*RUN, "--algorithm", "fedavg", *more, "models", "--from-model", "1").last)
    np.testing.assert_array_equal(origins, thetas[1:])
    told = call(*RUN, "--algorithm", "cfl", *more, "nowhere", status=3)
    assert "nowhere/models.json" in told.err
    told = call(*RUN, "--algorithm", "cfl", *more, "1", status=5)
    assert "no MQTT broker can be used" in told.err
