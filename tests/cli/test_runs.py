"""`shoal-fleet run`: what it offers, and what it signs."""

from __future__ import annotations

import pytest

from crypto.seal.signed import open_document
from fleet.directory import FleetDirectory
from fleet.task.signed import Source, write_signed
from support.locks import exclusive
from tests.helpers.tasks import logistic_bundle
from wire.codec import decode
from wire.documents import RunPackage, RunPlan, Setting


def test_the_help_lists_every_algorithm_with_its_settings(call):
    told = call("shoal-fleet", "run", "--help").out
    for words in (
        "fedgroup: FedGroup",
        "groups=3 alpha=20 measure=edc",
        "one-shot:",
        "fesem:",
        "local:",
        "(no settings)",
    ):
        assert words in told


@pytest.mark.torch
def test_pretraining_starts_from_local_training_and_differs_where_told(call, fleet):
    """Cold starts may be longer than a round; what is not said is as in a round."""
    pytest.importorskip("torch")
    call("shoal-fleet", "task", "compile", "owner", "logistic", "--out", "task", "--option", "inputs=4")
    extra = ["--local", "lr=0.3", "--local", "epochs=20", "--pretrain", "epochs=0", "--pretrain", "steps=50"]
    extra += ["--norm-blur", "0.01"]
    settings = ["--set", "groups=2", "--set", "measure=madc"]
    path = call("shoal-fleet", "run", "owner", "--task", "task", "--algorithm", "fedgroup", *settings, *extra).last
    owner = FleetDirectory(call.home / "owner").owner
    package = decode((call.home / path).read_bytes(), RunPackage)
    plan = open_document(package.plan, RunPlan, owner.member.sign_key)
    assert plan.settings == (Setting("groups", "2"), Setting("measure", "madc"))
    assert (plan.local.lr, plan.local.epochs, plan.local.steps) == (0.3, 20, 0)
    assert (plan.pretrain.lr, plan.pretrain.epochs, plan.pretrain.steps) == (0.3, 0, 50)
    assert (plan.origins, plan.max_models, plan.norm_blur) == (1, 4, 0.01)


def test_too_much_norm_blur_is_a_mistake_of_usage(call, fleet, task):
    told = call("shoal-fleet", "run", "owner", "--task", task, "--algorithm", "cfl", "--norm-blur", "0.21", status=2)
    assert "norm-blur" in told.err


def test_a_wrong_name_in_pretrain_is_refused(call, fleet, task):
    told = call(
        "shoal-fleet", "run", "owner", "--task", task, "--algorithm", "fedgroup", "--pretrain", "eta=1", status=2
    )
    assert "local training has no 'eta'" in told.err


@pytest.mark.torch
def test_the_origins_are_drawn_before_the_fleet_is_locked(call, fleet):
    """Loading torch and building a model may take long, and other commands needn't wait for it."""
    pytest.importorskip("torch")
    owner = FleetDirectory(call.home / "owner")
    write_signed(logistic_bundle(), Source("model.py:make", {}), owner.owner, call.home / "task")
    (call.home / "model.py").write_text("def make():\n    raise OSError('the model is being built')\n")
    with exclusive(owner.path, wait_s=0, hint="-"):
        told = call("shoal-fleet", "run", "owner", "--task", "task", "--algorithm", "fedavg", status=8)
    assert "the model is being built" in told.err
