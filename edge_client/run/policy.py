"""Device-side policy: refuse every announcement, assignment and model that the owner's signed run plan does not allow.

The checks read the plan's limits and its `Capabilities`, never the algorithm's name or settings.
"""

from __future__ import annotations

from typing import Final

from shoal.errors import UntrustedError
from shoal.limits import MAX_SCALE
from shoal.protocol.documents import RunPlan
from shoal.protocol.messages import (
    CARRIED_FIRST,
    NO_TRANSFER,
    PROPOSAL_MODEL,
    SHARED_MODEL,
    Announcement,
    Assignment,
    ModelHeader,
    ModelRef,
    Phase,
)
from shoal.protocol.states import MeanHeader, Recipe, RoundModels

TRAINING_PHASES: Final = (Phase.TRAIN, Phase.TRIAL, Phase.PRETRAIN)
ROLLOVER_PHASES: Final = (Phase.CHECKPOINT, Phase.ENDORSE)
WEIGHTS_TOLERANCE: Final = 1e-9
"""Largest distance from 1 of the sum of a recipe's weights: rounding of float64 sums over the models of a run."""


def check_plan(plan: RunPlan, *, fleet: str, modes: tuple[str, ...]) -> None:
    """Check that this device can follow the plan.

    Raises:
        UntrustedError: the plan is of another fleet, or has a mask mode that this version does not know.
    """
    if plan.fleet != fleet:
        raise UntrustedError(f"a run plan of fleet {plan.fleet!r}")
    if plan.mode not in modes:
        raise UntrustedError(
            f"a run plan with mask mode {plan.mode!r}", hint=f"this device has {', '.join(modes)}: update it"
        )


def check_announcement(announcement: Announcement, plan: RunPlan, since: int = 0, generation: int = 0) -> None:
    """Check that the plan allows an announced round or step of a rollover.

    Args:
        announcement: of the run's current mask epoch.
        plan: the run's plan for that epoch.
        since: the round after which the epoch began.
        generation: key version of the epoch.

    Raises:
        UntrustedError: another run, mask epoch, mode or key; a mask epoch that is too long or too short; too many rounds or
            models; an unknown origin; a mean of too few devices.
    """
    a = announcement
    if (a.fleet, a.run, a.run_id) != (plan.fleet, plan.run, plan.run_id):
        raise UntrustedError("an announcement of another run")
    if (a.held is not None) != (plan.keys == "round"):
        raise UntrustedError("an announcement with other keys than the plan's")
    if a.held is not None:
        check_held_models(a, a.held, plan)
        return
    if (a.epoch, a.key_id, a.mode) != (plan.epoch, plan.key_id, plan.mode):
        raise UntrustedError("an announcement under another mask key or mode than the plan's")
    _check_place(a, plan, since, generation)
    if len(a.models) > plan.max_models:
        raise UntrustedError(f"{len(a.models)} models where the plan allows {plan.max_models}")
    if len({m.model for m in a.models}) != len(a.models):
        raise UntrustedError("an announcement names a model twice")
    for model in a.models:
        if model.model == SHARED_MODEL:
            raise UntrustedError("an announcement has a model with the shared part's number")
        if model.model >= CARRIED_FIRST:
            raise UntrustedError(f"an announcement has a model with number {model.model}, which no model has")
        _check_ref(model, f"model {model.model}", plan)
    if a.shared is not None:
        if {s.name for s in plan.segments} != {"shared", "cluster"} or a.shared.model != SHARED_MODEL:
            raise UntrustedError("an announcement with a shared part that the plan does not have")
        _check_ref(a.shared, "the shared part", plan)
    _check_rollover(a, plan, generation)


def check_held_models(a: Announcement, held: RoundModels, plan: RunPlan) -> None:
    """Check that the plan allows the models of an announced round under round keys.

    Args:
        a: an announcement of the plan's run.
        held: its models.
        plan: the run's plan.

    Raises:
        UntrustedError: another mode; too many rounds or models; a state that can't exist yet or an unknown origin; a mean of
            too few devices; a recipe that isn't a mean of models.
    """
    if a.mode != plan.mode or a.step or a.models or a.shared or a.carried or a.proposal:
        raise UntrustedError("an announcement under another mask mode, or with the parts of a rollover")
    if not 1 <= a.round <= plan.rounds + 1 or (a.round > plan.rounds) != a.finished:
        raise UntrustedError(f"round {a.round} of a run of {plan.rounds}")
    models = [offer.model for offer in held.offers if offer.model != SHARED_MODEL]
    if len(models) > plan.max_models:
        raise UntrustedError(f"{len(models)} models where the plan allows {plan.max_models}")
    if len(models) < len(held.offers) and {s.name for s in plan.segments} != {"shared", "cluster"}:
        raise UntrustedError("a shared part that the plan does not have")
    states = [offer.at for offer in held.offers] + [ref.state for ref in held.checkpoints]
    for retained in held.steps:
        if retained.step.round >= a.round:
            raise UntrustedError(f"the step of round {retained.step.round} in round {a.round}")
        for recipe in retained.step.recipes:
            _check_recipe(recipe, plan)
            states += [term.state for term in recipe.terms]
        for mean in retained.means:
            if mean.contributors < plan.min_contributors:
                raise UntrustedError(f"a mean of {mean.contributors} devices, the plan wants {plan.min_contributors}")
    for state in states:
        if state.round >= a.round or (state.round == 0 and state.model >= plan.origins):
            raise UntrustedError(f"state {state.round} of model {state.model} in round {a.round}")
    if any(ref.round > a.round or ref.state.round >= ref.round for ref in held.checkpoints):
        raise UntrustedError("a checkpoint that was sealed in a later round, or before its state existed")


def _check_recipe(recipe: Recipe, plan: RunPlan) -> None:
    """Check that a recipe is a mean of models to which the mean update is added, or what the capability ``scale`` allows."""
    weights = [term.weight for term in recipe.terms]
    if recipe.mean not in (None, 1.0):
        raise UntrustedError(f"a recipe that adds {recipe.mean:g} times the mean update")
    if plan.capabilities.scale:
        return
    if min(weights) < 0 or abs(sum(weights) - 1) > WEIGHTS_TOLERANCE:
        raise UntrustedError(f"a recipe whose weights add up to {sum(weights):g}, which the plan does not allow")


def check_mean(header: MeanHeader, plan: RunPlan, segment: str, body_bytes: int, norm: float) -> None:
    """Check that a masked mean may be added to a model.

    Args:
        header: as received.
        plan: the run's plan.
        segment: the segment that the model's states have; empty for whole vectors.
        body_bytes: length of the vector that follows, in bytes.
        norm: its l2 norm.

    Raises:
        UntrustedError: another run or segment; a wrong length; a norm that is not finite or above the plan's limit.
    """
    if (header.fleet, header.run_id) != (plan.fleet, plan.run_id):
        raise UntrustedError("a mean of another run")
    span = plan.span(segment)
    if header.segment != segment or header.length != span.stop - span.start or body_bytes != 4 * header.length:
        raise UntrustedError(f"a mean of {header.length} coordinates in {body_bytes} bytes, segment {header.segment!r}")
    if not norm <= plan.norm_limit:  # also true for NaN
        raise UntrustedError(f"a mean update of norm {norm:.3g}, the plan's limit is {plan.norm_limit:.3g}")


def _check_place(a: Announcement, plan: RunPlan, since: int, generation: int) -> None:
    if a.step:
        if a.finished or not since <= a.round <= plan.rounds:
            raise UntrustedError(f"a rollover after round {a.round} of a run of {plan.rounds}")
        if a.generation < generation:
            raise UntrustedError(f"a rollover to keys of roster {a.generation} after {generation}")
        # The plan has a fixed number of mask epochs; with more rollovers the run would use the epochs of another run.
        # A rollover to a newer key version may take place after any round.
        if a.generation == generation and (a.round != since + plan.epoch_rounds or a.round == plan.rounds):
            raise UntrustedError(
                f"a rollover after round {a.round}, under a mask of {plan.epoch_rounds} rounds, used since {since}"
            )
    elif not 1 <= a.round <= plan.rounds + 1 or (a.round > plan.rounds) != a.finished:
        raise UntrustedError(f"round {a.round} of a run of {plan.rounds}")
    elif not since < a.round <= since + plan.epoch_rounds + a.finished:
        raise UntrustedError(f"round {a.round} under a mask of {plan.epoch_rounds} rounds, used since {since}")


def _check_rollover(a: Announcement, plan: RunPlan, generation: int) -> None:
    if not a.step and (a.carried or a.proposal or a.generation):
        raise UntrustedError("a round with the parts of a rollover")
    if a.carried and (not plan.capabilities.carry or len(a.carried) > plan.max_models):
        raise UntrustedError(f"{len(a.carried)} vectors that are no models")
    if a.carried and a.generation != generation:
        # As in `check_assignment`: a revoked device could derive the new mask.
        raise UntrustedError("vectors to carry in a rollover to a new key version")
    if a.proposal is not None and a.proposal.model != PROPOSAL_MODEL:
        raise UntrustedError("a checkpoint under a model's number")
    names = {m.model for m in (*a.models, *a.carried)}
    if len(names) != len(a.models) + len(a.carried) or {SHARED_MODEL, PROPOSAL_MODEL} & names:
        raise UntrustedError("an announcement names a vector twice")
    for vector in a.carried:
        if vector.scale != 0 or vector.model < CARRIED_FIRST or vector.transfer == NO_TRANSFER:
            raise UntrustedError(f"vector {vector.model} is a model")
        if vector.contributors < plan.min_contributors:
            raise UntrustedError(f"vector {vector.model} is a mean of {vector.contributors} devices")


def _check_scale(scale: float, what: str, plan: RunPlan) -> None:
    if not (scale == 1 or (plan.capabilities.scale and 1 <= scale <= MAX_SCALE)):
        raise UntrustedError(f"{what} is {scale:g} times its origin, which the plan does not allow")


def _check_ref(ref: ModelRef, what: str, plan: RunPlan) -> None:
    _check_scale(ref.scale, what, plan)
    if ref.origin >= plan.origins:
        raise UntrustedError(f"{what} starts from origin {ref.origin} of {plan.origins}")
    if ref.transfer != NO_TRANSFER and ref.contributors < plan.min_contributors:
        raise UntrustedError(f"{what} is a mean of {ref.contributors} devices, the plan wants {plan.min_contributors}")


def check_assignment(assignment: Assignment, announcement: Announcement, plan: RunPlan, generation: int = 0) -> None:
    """Check that the plan allows an assignment.

    Args:
        assignment: this device's part.
        announcement: one that passed `check_announcement`.
        plan: the run's plan for the current mask epoch.
        generation: as in `check_announcement`.

    Raises:
        UntrustedError: the assignment names a model that is not announced, trains in the final round, or needs a capability
            that the plan does not have.
    """
    known = {m.model for m in announcement.models}
    if announcement.held is not None:
        known = {offer.model for offer in announcement.held.offers} - {SHARED_MODEL}
        if not set(assignment.seal) <= known | {SHARED_MODEL}:
            raise UntrustedError("an order to seal a model that is not announced")
        if not set(assignment.compare) <= known or len(set(assignment.compare)) != len(assignment.compare):
            raise UntrustedError("an order to compare with a model that is not announced, or twice with one")
    elif assignment.seal or assignment.compare:
        raise UntrustedError("an order to seal or compare models, in a run whose models the aggregator holds")
    if not set(assignment.candidates) <= known:
        raise UntrustedError("an order names a model that is not announced")
    if len(set(assignment.candidates)) != len(assignment.candidates):
        raise UntrustedError("an order names a candidate twice")
    if (assignment.phase in ROLLOVER_PHASES) != (announcement.step > 0):
        raise UntrustedError("a rollover in a round, or work of a round in a rollover")
    if (assignment.phase == Phase.ENDORSE) != (announcement.proposal is not None):
        raise UntrustedError("an order to sign without a proposed checkpoint, or to fold despite one")
    if assignment.keep > announcement.round or (assignment.renew and assignment.phase != Phase.ENDORSE):
        raise UntrustedError(
            "an order to keep an update of a later round, or to mask one again outside the signing step"
        )
    if assignment.renew and announcement.generation != generation:
        # A revoked device may still hold the old secrets. It could unmask the old form of the update, and with the
        # aggregator derive the new mask from this known pair.
        raise UntrustedError("an order to mask an update again in a rollover to a new key version")
    if assignment.train and (announcement.round > plan.rounds or assignment.phase not in TRAINING_PHASES):
        raise UntrustedError("an order to train where there is nothing to train for")
    if assignment.train and assignment.margins:
        raise UntrustedError("an order to train and report margins at once")
    _check_capabilities(assignment, announcement, plan)


def _check_capabilities(assignment: Assignment, announcement: Announcement, plan: RunPlan) -> None:
    allowed = plan.capabilities
    if assignment.phase == Phase.PRETRAIN and not allowed.pretrain:
        raise UntrustedError("an order to pre-train, which the plan does not allow")
    if assignment.margins and not allowed.margins:
        raise UntrustedError("an order to report margins, which the plan does not allow")
    if assignment.norm and not (assignment.train and allowed.scale):
        raise UntrustedError("an order to report a model's norm, which the plan does not allow")
    if assignment.compare and not (assignment.train and allowed.compare):
        raise UntrustedError("an order to compare models, which the plan does not allow")
    if (assignment.keep or assignment.renew) and not allowed.keep_updates:
        raise UntrustedError("an order to keep updates, which the plan does not allow")
    if assignment.phase == Phase.KEEP and not (announcement.finished and allowed.keep_path):
        raise UntrustedError("an order to keep a path of models, which the plan does not allow")


def check_model(header: ModelHeader, plan: RunPlan, body_bytes: int, norm: float) -> None:
    """Check that a masked offset, or the segment of one that the header names, may become a model.

    Raises:
        UntrustedError: another run, epoch or key; a segment that the plan does not have; a wrong length; a norm that is not
            finite, or larger than all rounds together allow.
    """
    if (header.fleet, header.run_id) != (plan.fleet, plan.run_id):
        raise UntrustedError("a model of another run")
    if (header.epoch, header.key_id) != (plan.epoch, plan.key_id):
        raise UntrustedError("a model under another mask key")
    parts = [s.name for s in plan.segments] if len(plan.segments) > 1 else []
    if header.segment not in ("", *parts) or (header.model == SHARED_MODEL) != (header.segment == "shared"):
        raise UntrustedError(f"segment {header.segment!r} of model {header.model}")
    span = plan.span(header.segment)
    if header.length != span.stop - span.start or body_bytes != 4 * header.length:
        raise UntrustedError(f"a model of {header.length} coordinates in {body_bytes} bytes")
    if header.origin >= plan.origins:
        raise UntrustedError(f"a model from origin {header.origin} of {plan.origins}")
    if header.scale != 0 or not CARRIED_FIRST <= header.model < PROPOSAL_MODEL or not plan.capabilities.carry:
        _check_scale(header.scale, f"model {header.model}", plan)
    if not 1 <= header.round <= plan.rounds + 1:
        raise UntrustedError(f"a model of round {header.round} of {plan.rounds}")
    if not norm <= plan.norm_limit * header.round:  # also true for NaN
        raise UntrustedError(f"a model whose offset has norm {norm:.3g}, beyond {plan.norm_limit:.3g} a round")
