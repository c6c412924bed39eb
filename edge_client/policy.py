"""What a device puts up with: nothing that its owner's run plan does not allow."""

from __future__ import annotations

from typing import Final

from wire.documents import RunPlan
from wire.errors import UntrustedError
from wire.messages import NO_TRANSFER, Announcement, ModelHeader, Order, Phase

TRAINING_PHASES: Final = (Phase.TRAIN, Phase.TRIAL, Phase.PRETRAIN)


def check_plan(plan: RunPlan, *, fleet: str, modes: tuple[str, ...]) -> None:
    """Return if the plan is one that this device can follow.

    Raises:
        UntrustedError: another fleet's, or a mask mode that this version does not have.
    """
    if plan.fleet != fleet:
        raise UntrustedError(f"a run plan of fleet {plan.fleet!r}")
    if plan.mode not in modes:
        raise UntrustedError(
            f"a run plan with mask mode {plan.mode!r}", hint=f"this device has {', '.join(modes)}: update it"
        )


def check_announcement(announcement: Announcement, plan: RunPlan) -> None:
    """Return if the round lies within the plan.

    Raises:
        UntrustedError: another run, mask epoch or key; too many rounds or models; an unknown origin; a mean of too
            few devices.
    """
    a = announcement
    if (a.fleet, a.run, a.run_id) != (plan.fleet, plan.run, plan.run_id):
        raise UntrustedError("an announcement of another run")
    if (a.epoch, a.key_id) != (plan.epoch, plan.key_id):
        raise UntrustedError("an announcement under another mask key than the plan's")
    if not 1 <= a.round <= plan.rounds + 1 or (a.round > plan.rounds) != a.finished:
        raise UntrustedError(f"round {a.round} of a run of {plan.rounds}")
    if len(a.models) > plan.max_models:
        raise UntrustedError(f"{len(a.models)} models where the plan allows {plan.max_models}")
    if len({m.model for m in a.models}) != len(a.models):
        raise UntrustedError("an announcement names a model twice")
    for model in a.models:
        if model.origin >= plan.origins:
            raise UntrustedError(f"model {model.model} starts from origin {model.origin} of {plan.origins}")
        if model.transfer != NO_TRANSFER and model.contributors < plan.min_contributors:
            raise UntrustedError(
                f"model {model.model} is a mean of {model.contributors} devices, the plan wants {plan.min_contributors}"
            )


def check_order(order: Order, announcement: Announcement, plan: RunPlan) -> None:
    """Return if the order can be carried out.

    Raises:
        UntrustedError: it names a model that is not announced, or trains in the final round.
    """
    known = {m.model for m in announcement.models}
    if not set(order.candidates) <= known:
        raise UntrustedError("an order names a model that is not announced")
    if len(set(order.candidates)) != len(order.candidates):
        raise UntrustedError("an order names a candidate twice")
    if order.train and (announcement.round > plan.rounds or order.phase not in TRAINING_PHASES):
        raise UntrustedError("an order to train where there is nothing to train for")
    if order.train and order.margins:
        raise UntrustedError("an order to train and report margins at once")


def check_model(header: ModelHeader, plan: RunPlan, body_bytes: int, norm: float) -> None:
    """Return if a masked offset may become a model.

    Raises:
        UntrustedError: another run's, epoch's or key's; a wrong length; not finite or longer than all rounds could
            make it.
    """
    if (header.fleet, header.run_id) != (plan.fleet, plan.run_id):
        raise UntrustedError("a model of another run")
    if (header.epoch, header.key_id) != (plan.epoch, plan.key_id):
        raise UntrustedError("a model under another mask key")
    if header.length != plan.length or body_bytes != 4 * plan.length:
        raise UntrustedError(f"a model of {header.length} coordinates in {body_bytes} bytes")
    if header.origin >= plan.origins:
        raise UntrustedError(f"a model from origin {header.origin} of {plan.origins}")
    if not 1 <= header.round <= plan.rounds + 1:
        raise UntrustedError(f"a model of round {header.round} of {plan.rounds}")
    if not norm <= plan.norm_limit * header.round:
        raise UntrustedError(f"a model whose offset has norm {norm:.3g}, beyond {plan.norm_limit:.3g} a round")
