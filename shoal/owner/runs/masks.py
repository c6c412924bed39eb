"""The masks of a run's rounds, which the owner can derive at any time."""

from __future__ import annotations

from typing import TYPE_CHECKING

from crypto.mask.derivation import MaskKey, derive
from shoal.errors import ConfigError

if TYPE_CHECKING:
    from crypto.mask.schedule import RunChain
    from shoal.owner.keys.directory import FleetDirectory
    from shoal.protocol.documents import RunPlan


def run_chain(fleet: FleetDirectory, plan: RunPlan) -> RunChain:
    """Return the chain of a run's round keys from round 0 on, under the key version that the plan names.

    Raises:
        ConfigError: the fleet has another key version.
    """
    version = fleet.version_key
    if plan.key_version != version.number:
        raise ConfigError(
            f"the plan is for key version {plan.key_version}, and the fleet's is {version.number}",
            hint="sign the run again",
        )
    return version.begin_run_of(plan)


def round_mask(fleet: FleetDirectory, plan: RunPlan, round_: int) -> MaskKey:
    """Return the mask of a round of a run.

    Raises:
        ConfigError: as `run_chain`.
    """
    chain = run_chain(fleet, plan)
    chain.skip_to(round_)
    keys = chain.take()
    return derive(keys.mask, keys.context_of(plan))
