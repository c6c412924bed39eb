"""The signed runs in the owner's directory: their plans, numbers and summaries. Imports no numpy, so that listing is fast."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from crypto.seal.signed import open_document
from shoal.errors import ShoalError
from shoal.owner.keys.run_files import RUNS
from shoal.protocol.codec import decode
from shoal.protocol.documents import RunPackage, RunPlan
from shoal.protocol.sizes import epoch_bytes
from shoal.util.files import read_private

if TYPE_CHECKING:
    from shoal.owner.keys.directory import FleetDirectory


def signed_plans(fleet: FleetDirectory, complain: Callable[[str], None]) -> list[RunPlan]:
    """Return the plans of the runs in the owner's directory, by number; ``complain`` is called for invalid files."""
    return [plan for plan, _ in _signed(fleet, complain)]


def largest_epoch_bytes(fleet: FleetDirectory, complain: Callable[[str], None]) -> int:
    """Return the largest size in bytes of a sealed mask epoch of any run in the owner's directory; 0 without a run."""
    devices = len(fleet.roster.devices)
    sizes = (epoch_bytes(plan, plan.max_models, task, devices) for plan, task in _signed(fleet, complain))
    return max(sizes, default=0)


def _signed(fleet: FleetDirectory, complain: Callable[[str], None]) -> list[tuple[RunPlan, int]]:
    """Return each run's plan and the bytes of its sealed task, by number."""
    found = []
    for path in sorted((fleet.path / RUNS).glob("*.run")):
        try:
            package = decode(read_private(path), RunPackage)
            plan = open_document(package.plan, RunPlan, fleet.owner.member.sign_key)
            found.append((plan, len(package.task)))
        except ShoalError as error:
            complain(f"{path.name} is no run of this fleet: {error}")
    return sorted(found, key=lambda run: run[0].run)


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
    }
