"""A device's side of the protocol for attacks that send it something: the owner's plan and every check before use."""

from __future__ import annotations

import dataclasses
import tempfile
from pathlib import Path
from typing import Final

import numpy as np

from crypto.mask.masking import unmask
from edge_client.run.policy import check_announcement, check_mean
from shoal.owner.runs.plan import RunOptions
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import Announcement
from shoal.protocol.states import MeanHeader, MeanRef, Offer, Recipe, RetainedStep, RoundModels, StateId, Step, Term
from shoal.simulation.process_fleet import Stage
from shoal.types import Float32Vector, MaskedVector
from shoal_lab.bench.attacks.lab import FLEET, RUN_ID, Lab

MIN_CONTRIBUTORS: Final = 3
ROUNDS: Final = 50


def signed_plan(lab: Lab, mode: str) -> RunPlan:
    """Return the plan of a FedAvg run of 50 rounds as the owner makes it, for the lab's task and keys."""
    return lab.once(("plan", mode), lambda: _signed_plan(lab, mode))


def _signed_plan(lab: Lab, mode: str) -> RunPlan:
    options = RunOptions("fedavg", rounds=ROUNDS, mode=mode, min_contributors=MIN_CONTRIBUTORS, seed=0)
    with tempfile.TemporaryDirectory(prefix="shoal-privacy-") as folder:
        stage = Stage(Path(folder), "mqtt://nobody", ("dev-00",))
        plan = stage.add_run(lab.bundle, lab.origin[None], options)
    return dataclasses.replace(plan, fleet=FLEET, run_id=RUN_ID)


def device_model(lab: Lab, mode: str, mean: Float32Vector, *, contributors: int = MIN_CONTRIBUTORS) -> Float32Vector:
    """Return the model (d,) that a device makes of its origin and the masked ``mean`` (d,) of round 1, which may be forged.

    Raises:
        UntrustedError: the device's policy refuses it.
        IntegrityError: it can't be unmasked.
    """
    plan, values = signed_plan(lab, mode), np.asarray(mean, np.float32)
    norm = float(np.linalg.norm(values.astype(np.float64)))
    recipe = Recipe(0, 1, (Term(0, 0, 1.0),), 1.0)
    step = RetainedStep(Step(1, (recipe,), (recipe.state,)), (MeanRef(0, "x", b"\1" * 16, contributors),))
    announcement = Announcement(
        fleet=plan.fleet,
        run=plan.run,
        run_id=plan.run_id,
        roster_sequence=plan.roster_sequence,
        round=2,
        nonce=bytes(16),
        deadline_s=60.0,
        finished=False,
        assignments=(),
        assignment_of=(),
        held=RoundModels(plan.key_version, (Offer(0, StateId(0, 1)),), (step,)),
    )
    check_announcement(announcement, plan)
    key = lab.key(mode)
    header = MeanHeader(
        fleet=plan.fleet, run_id=plan.run_id, round=1, key_id=key.key_id, model=0, length=plan.length, segment=""
    )
    check_mean(header, plan, "", 4 * values.size, norm, plan.norm_limit)
    return lab.origin + unmask(MaskedVector(values, key.key_id), key)
