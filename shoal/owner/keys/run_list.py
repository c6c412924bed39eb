"""The signed runs in the owner's directory: their plans, numbers and summaries. Imports no numpy, so that listing is fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from crypto.seal.signed import open_document
from shoal.errors import ShoalError
from shoal.owner.keys.run_files import RUNS
from shoal.protocol.codec import decode
from shoal.protocol.documents import RunPackage, RunPlan
from shoal.util.files import read_private

if TYPE_CHECKING:
    from shoal.owner.keys.directory import FleetDirectory


def signed_plans(fleet: FleetDirectory, complain: Callable[[str], None]) -> list[RunPlan]:
    """Return the plans of the runs in the owner's directory, by number; ``complain`` is called for invalid files."""
    found = []
    for path in sorted((fleet.path / RUNS).glob("*.run")):
        try:
            package = decode(read_private(path), RunPackage)
            found.append(open_document(package.plan, RunPlan, fleet.owner.member.sign_key))
        except ShoalError as error:
            complain(f"{path.name} is no run of this fleet: {error}")
    return sorted(found, key=lambda plan: plan.run)


def summary(plan: RunPlan) -> dict[str, Any]:
    """Return the fields of a plan that `shoal-fleet show` prints."""
    return {
        "run": plan.run,
        "algorithm": plan.algorithm,
        "mode": plan.mode,
        "rounds": plan.rounds,
        "min_contributors": plan.min_contributors,
        "weighting": plan.weighting,
        "norm_noise": plan.norm_noise,
        "max_samples": plan.max_samples,
        "weight_cap": plan.weight_cap,
        "robust": plan.robust,
        "precision_up": plan.precision_up,
        "precision_down": plan.precision_down,
    }
