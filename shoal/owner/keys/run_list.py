"""The signed runs in the owner's directory: their plans, numbers and summaries. Imports no numpy, so that listing is fast."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from shoal.errors import ShoalError
from shoal.membership.signed_plans import open_package
from shoal.owner.keys.vault import RUNS
from shoal.protocol.codec import decode
from shoal.protocol.documents import RunPackage, RunPlan
from shoal.protocol.recipe import Recipe, knobs
from shoal.util.console import counted, mask_words
from shoal.util.files import read_private

if TYPE_CHECKING:
    from shoal.owner.keys.directory import FleetDirectory


def signed_plans(fleet: FleetDirectory, complain: Callable[[str], None], *, turns: bool = False) -> list[RunPlan]:
    """Return the plans of the runs in the owner's directory, by number; ``complain`` is called for invalid files.

    With ``turns`` those of all later runs of standing orders are among them, with as many origins as they may begin with.
    """
    found = []
    for path in sorted((fleet.path / RUNS).glob("*.run")):
        try:
            package = decode(read_private(path), RunPackage)
            found.append(open_package(package, fleet.owner.member.sign_key))
        except ShoalError as error:
            complain(f"{path.name} is no run of this fleet: {error}")
    if turns:
        orders = [(plan, plan.schedule) for plan in found if plan.schedule is not None]
        found += [p.at_turn(t, p.max_models - p.statistics) for p, order in orders for t in range(1, order.count)]
    return sorted(found, key=lambda plan: plan.run)


def summary(plan: RunPlan) -> dict[str, Any]:
    """Return the fields of a plan that `shoal-fleet show` prints."""
    chosen = {name: getattr(plan.recipe, name) for name in knobs(Recipe)}
    keeper = "" if plan.keeper is None else plan.keeper.name
    return {"run": plan.run, "algorithm": plan.recipe.algorithm, "keeper": keeper, **chosen}


def summary_line(r: Mapping[str, Any]) -> str:
    """Return a `summary` as one line."""
    blur = f", norm noise of {r['norm_noise']:g}" if r["norm_noise"] else ""
    what = f"{r['algorithm']}, mask {mask_words(r['mode'])}, {counted(r['rounds'], 'round')}"
    cap = f", weight cap {r['weight_cap']:g}" if r["weight_cap"] else ", no weight cap"
    rule = f", robust {r['robust']}"
    ways = {r["precision_up"], r["precision_down"]}
    thin = "" if ways == {"float32"} else f", {r['precision_up']} up, {r['precision_down']} down"
    named = f", for {r['only']} only" if r["only"] else ""
    named += f", keeper {r['keeper']}" if r["keeper"] else ""
    weights = f"{r['weighting']}{cap if r['weighting'] == 'samples' else ''}"
    return f"run {r['run']}: {what}, weighting {weights}{rule}{blur}{thin}{named}"
