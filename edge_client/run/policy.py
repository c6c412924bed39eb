"""Device-side policy: refuse every announcement, assignment and mean that the owner's signed run plan does not allow.

The checks read the plan's limits and its `Capabilities`, never the algorithm's name or settings.

`open_plan` and `task_of` read the plan and the task of the owner's run packages.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from crypto.mask.modes.registry import MODES
from shoal.errors import IntegrityError, UntrustedError
from shoal.membership.signed_plans import open_package
from shoal.protocol.codec import decode
from shoal.protocol.documents import RunPackage, RunPlan
from shoal.protocol.messages import (
    SHARED_MODEL,
    STATISTICS_MODEL,
    STATISTICS_MODELS,
    Announcement,
    Assignment,
    Phase,
    statistics_model,
)
from shoal.protocol.precision.lengths import encoded_bytes, norm_room
from shoal.protocol.states import MeanHeader, RoundModels, StateRecipe
from shoal.task.bundle import TaskBundle

if TYPE_CHECKING:
    from edge_client.membership import DeviceMembership

TRAINING_PHASES: Final = (Phase.TRAIN, Phase.TRIAL, Phase.ADAPT, Phase.PRETRAIN, Phase.STATISTICS)
MEAN_RATIO: Final = 100.0
"""Largest norm of a mean, as a multiple of the device's longest update in the run."""
LIMIT_RATIO: Final = 10.0
"""Largest announced limit, as a multiple of what a mean may have: aggregators announce ten times the median norm."""
LEAST_REST: Final = 0.5
"""Least time between two runs of a standing order, as a share of its interval: a device counts only while its program runs."""
WEIGHTS_TOLERANCE: Final = 1e-9
"""Largest distance from 1 of the sum of a recipe's weights: rounding of float64 sums over the models of a run."""


def check_turn(plan: RunPlan, *, rested_s: float, now_s: int) -> None:
    """Check that a run of a standing order may begin now; any other run may.

    Args:
        plan: the run's plan.
        rested_s: monotonic time since the end of the device's last run, without the times at which its program did not run.
        now_s: unix seconds by the device's clock.

    Raises:
        UntrustedError: the order is over, or the run comes too early.
    """
    schedule = plan.schedule
    if schedule is None:
        return
    if now_s > schedule.until_s:
        raise UntrustedError(f"run {plan.run} of a standing order that is over", hint="check this machine's clock")
    if schedule.turn and rested_s < LEAST_REST * schedule.interval_s:
        raise UntrustedError(
            f"run {plan.run} comes {rested_s:.0f} s after the end of the last one, and its order has {schedule.interval_s} s"
        )


def check_announcement(announcement: Announcement, plan: RunPlan) -> None:
    """Check that the plan allows an announced round and its models.

    Raises:
        UntrustedError: another run; too many rounds or models; a state that can't exist yet or an unknown origin; a mean
            of too few devices; a recipe that isn't a mean of models.
    """
    a, held = announcement, announcement.held
    if (a.fleet, a.run, a.run_id) != (plan.fleet, plan.run, plan.run_id):
        raise UntrustedError("an announcement of another run")
    if not 1 <= a.round <= plan.recipe.rounds + 1 or (a.round > plan.recipe.rounds) != a.finished:
        raise UntrustedError(f"round {a.round} of a run of {plan.recipe.rounds}")
    if a.unit and (plan.keeper is None or plan.recipe.precision_up == "float32" or not 0 < a.unit < math.inf):
        raise UntrustedError(f"updates in steps of {a.unit:g}, which the plan does not have")
    models = [offer.model for offer in held.offers if offer.model != SHARED_MODEL]
    if len(models) > plan.max_models:
        raise UntrustedError(f"{len(models)} models where the plan allows {plan.max_models}")
    if len(models) < len(held.offers) and {s.name for s in plan.segments} != {"shared", "cluster"}:
        raise UntrustedError("a shared part that the plan does not have")
    _check_states(a.round, held, plan)


def _check_states(round_: int, held: RoundModels, plan: RunPlan) -> None:
    """Check the states, steps and checkpoints of an announced round."""
    states = [offer.at for offer in held.offers] + [ref.state for ref in held.checkpoints]
    for retained in held.steps:
        if retained.step.round >= round_:
            raise UntrustedError(f"the step of round {retained.step.round} in round {round_}")
        for recipe in retained.step.recipes:
            _check_recipe(recipe, plan)
            states += [term.state for term in recipe.terms]
        for mean in retained.means:
            if mean.contributors < plan.recipe.min_contributors:
                raise UntrustedError(
                    f"a mean of {mean.contributors} devices, the plan wants {plan.recipe.min_contributors}"
                )
    for state in states:
        if state.round >= round_ or (state.round == 0 and state.model >= plan.origins):
            raise UntrustedError(f"state {state.round} of model {state.model} in round {round_}")
    if any(ref.round > round_ or ref.state.round >= ref.round for ref in held.checkpoints):
        raise UntrustedError("a checkpoint that was sealed in a later round, or before its state existed")


def _check_recipe(recipe: StateRecipe, plan: RunPlan) -> None:
    """Check that a recipe is a mean of models to which the mean update is added, or what the capability ``scale`` allows."""
    weights = [term.weight for term in recipe.terms]
    if recipe.mean not in (None, 1.0):
        raise UntrustedError(f"a recipe that adds {recipe.mean:g} times the mean update")
    if plan.capabilities.scale:
        return
    if min(weights) < 0 or abs(sum(weights) - 1) > WEIGHTS_TOLERANCE:
        raise UntrustedError(f"a recipe whose weights add up to {sum(weights):g}, which the plan does not allow")


def mean_limit(announced: float, longest: float, model_norm: float, plan: RunPlan) -> float:
    """Return the largest norm that a mean of a step may have: a hundred of this device's updates, or a whole model.

    Args:
        announced: the step's limit.
        longest: norm of the longest update that this device has made in the run; 0 if it has made none to compare with.
        model_norm: of the longest state that it holds. A device whose data a model fits already makes tiny updates.
        plan: the run's plan. With the capability ``scale`` models of other groups are added, so the device's own updates say
            nothing about the length of a step.

    Raises:
        UntrustedError: the announced limit is out of proportion to this device's updates.
    """
    limit = min(announced, plan.recipe.norm_limit)
    if not longest or plan.capabilities.scale:
        return limit
    most = max(MEAN_RATIO * longest, model_norm)
    if announced > LIMIT_RATIO * most:
        raise UntrustedError(
            f"a step with means of norm up to {announced:.3g}, where this device's longest update has {longest:.3g}"
        )
    return min(limit, most)


def check_mean(header: MeanHeader, plan: RunPlan, segment: str, body_bytes: int, norm: float, limit: float) -> None:
    """Check that a masked mean may be added to a model.

    Args:
        header: as received.
        plan: the run's plan.
        segment: the segment that the model's states have; empty for whole vectors.
        body_bytes: length of the vector that follows, in bytes, as encoded.
        norm: its l2 norm.
        limit: see `mean_limit`.

    Raises:
        UntrustedError: another run or segment; a wrong length; a norm that is not finite or above the limit.
    """
    if (header.fleet, header.run_id) != (plan.fleet, plan.run_id):
        raise UntrustedError("a mean of another run")
    span = plan.span(segment)
    if (
        header.segment != segment
        or header.length != span.stop - span.start
        or body_bytes != encoded_bytes(header.length, plan.recipe.precision_down)
    ):
        raise UntrustedError(f"a mean of {header.length} coordinates in {body_bytes} bytes, segment {header.segment!r}")
    if not norm <= limit * norm_room(plan.recipe.precision_down):  # also true for NaN
        raise UntrustedError(f"a mean update of norm {norm:.3g}, where at most {limit:.3g} is allowed for one step")


def check_assignment(assignment: Assignment, announcement: Announcement, plan: RunPlan) -> None:
    """Check that the plan allows an assignment.

    Args:
        assignment: this device's part.
        announcement: one that passed `check_announcement`.
        plan: the run's plan.

    Raises:
        UntrustedError: the assignment names a model that is not announced, trains in the final round, or needs a capability
            that the plan does not have.
    """
    known = {offer.model for offer in announcement.held.offers} - {SHARED_MODEL}
    if not set(assignment.seal) <= known | {SHARED_MODEL}:
        raise UntrustedError("an order to seal a model that is not announced")
    if not set(assignment.compare) <= known or len(set(assignment.compare)) != len(assignment.compare):
        raise UntrustedError("an order to compare with a model that is not announced, or twice with one")
    if not set(assignment.candidates) <= known:
        raise UntrustedError("an order names a model that is not announced")
    if len(set(assignment.candidates)) != len(assignment.candidates):
        raise UntrustedError("an order names a candidate twice")
    if assignment.train and (announcement.round > plan.recipe.rounds or assignment.phase not in TRAINING_PHASES):
        raise UntrustedError("an order to train where there is nothing to train for")
    if assignment.trains and assignment.margins and assignment.phase != Phase.ADAPT:
        raise UntrustedError("an order to train and report margins at once")
    if assignment.phase == Phase.ADAPT and not (
        assignment.train and assignment.margins and len(assignment.candidates) == 2
    ):
        raise UntrustedError("an order to adapt models where there is nothing to report")
    if assignment.phase == Phase.PLACE and (
        announcement.round > plan.recipe.rounds or len(assignment.candidates) > 1 or not assignment.compare
    ):
        raise UntrustedError("an order to find a direction where there is nothing to compare")
    _check_statistics(assignment, plan)
    _check_capabilities(assignment, announcement, plan)


def _check_statistics(assignment: Assignment, plan: RunPlan) -> None:
    """Check that statistics are asked for where the plan has them, and that no model is trained from them."""
    named = [model for model in assignment.models if model in STATISTICS_MODELS]
    if (assignment.phase == Phase.STATISTICS) != (plan.statistics and bool(named)):
        raise UntrustedError("an order to mix statistics and models")
    if assignment.phase == Phase.STATISTICS:
        last = assignment.candidates[-1]
        only = assignment.models in ((STATISTICS_MODEL,), (statistics_model(last), last)) and assignment.train
        if not only or assignment.evaluate or assignment.margins or assignment.norm:
            raise UntrustedError("an order for statistics that asks for more")


def _check_capabilities(assignment: Assignment, announcement: Announcement, plan: RunPlan) -> None:
    allowed = plan.capabilities
    if assignment.phase == Phase.PRETRAIN and not allowed.pretrain:
        raise UntrustedError("an order to pre-train, which the plan does not allow")
    if assignment.margins and not allowed.margins:
        raise UntrustedError("an order to report margins, which the plan does not allow")
    if assignment.norm and not (assignment.train and allowed.scale):
        raise UntrustedError("an order to report a model's norm, which the plan does not allow")
    if assignment.compare and not (assignment.trains and allowed.compare):
        raise UntrustedError("an order to compare models, which the plan does not allow")
    if assignment.phase == Phase.KEEP and not (announcement.finished and allowed.keep_path):
        raise UntrustedError("an order to keep a path of models, which the plan does not allow")


def task_purpose(plan_digest: bytes) -> str:
    """Return the purpose under which the owner seals a task to its devices."""
    return f"task/{plan_digest.hex()}"


def origins_purpose(run_id: bytes) -> str:
    """Return the purpose under which the owner seals a run's origins to its devices."""
    return f"origins/{run_id.hex()}"


def owners_plan(package: bytes | memoryview, membership: DeviceMembership) -> RunPlan:
    """Return the plan of a package after checking the owner's signature alone; see `check_followable` for the rest.

    Raises:
        UntrustedError: the plan is not signed by the owner.
        WireVersionError: the run is in a wire version that this software does not speak.
        WireError: the bytes are not a run package.
    """
    return open_package(decode(package, RunPackage), membership.owner_key)


def check_followable(plan: RunPlan, membership: DeviceMembership) -> None:
    """Check that this device can follow a plan.

    Raises:
        UntrustedError: the plan is of another fleet, or has a mask mode that this version does not know.
    """
    if plan.fleet != membership.fleet:
        raise UntrustedError(f"a run plan of fleet {plan.fleet!r}")
    if plan.recipe.mode not in MODES:
        raise UntrustedError(
            f"a run plan with mask mode {plan.recipe.mode!r}", hint=f"this device has {', '.join(MODES)}: update it"
        )


def open_plan(package: bytes | memoryview, membership: DeviceMembership) -> RunPlan:
    """Return the plan of a package that the owner signed and that this device can follow.

    Raises:
        UntrustedError: the plan is not signed by the owner, or this device can't follow it.
        WireError: the bytes are not a run package.
    """
    plan = owners_plan(package, membership)
    check_followable(plan, membership)
    return plan


def task_of(data: memoryview, plan: RunPlan) -> TaskBundle:
    """Return the task bundle in ``data``.

    Raises:
        IntegrityError: it is not the task that the plan names.
    """
    bundle = TaskBundle.from_bytes(bytes(data))
    if bundle.digest != plan.task_digest or bundle.segments != plan.mask_segments:
        raise IntegrityError("the task is not the one that the run plan names")
    return bundle
