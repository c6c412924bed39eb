"""The owner's choice of the run whose finished models the devices answer with: `shoal-fleet models rollback`.

Under round keys the devices hold the models, and the aggregator none. So a choice carries no model: the owner signs the id of a
run, and each device takes that run's model from the last ones that it has stored.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from crypto.seal.signed import sign_document
from shoal.errors import UsageError
from shoal.owner.console.numbers import RequestNumbers
from shoal.owner.keys.run_list import signed_plans
from shoal.protocol.documents import ModelChoice

if TYPE_CHECKING:
    from collections.abc import Callable

    from shoal.owner.keys.directory import FleetDirectory

NO_RUN: Final = bytes(16)


def sign_choice(fleet: FleetDirectory, run: int, complain: Callable[[str], None]) -> bytes:
    """Return a signed `ModelChoice`.

    Args:
        fleet: the owner's directory.
        run: number of the run; 0 lets each device follow its own rule again.
        complain: called for files in the directory of runs that are none of this fleet.

    Raises:
        UsageError: the owner has signed no run of this number.
        ConfigError: another `shoal-fleet` has the directory locked for too long, or the disk fails.
    """
    plans = {plan.run: plan for plan in signed_plans(fleet, complain)}
    if run and run not in plans:
        known = ", ".join(map(str, sorted(plans))) or "none"
        raise UsageError(f"there is no signed run {run}", hint=f"the signed runs are: {known}")
    choice = ModelChoice(
        fleet=fleet.name,
        sequence=RequestNumbers(fleet).take(),
        run=run,
        run_id=plans[run].run_id if run else NO_RUN,
        latest=max(plans, default=0),
    )
    return sign_document(fleet.owner, choice)
