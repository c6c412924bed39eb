"""Make and sign a run: the plan that limits the aggregator, the sealed task and the sealed origins.

A run is checked against its devices first: one that can't change any model is refused, and the owner is warned of one that may
not find clusters.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from aggregator.strategies.base import StrategySettings
from aggregator.strategies.drawing import drawn
from aggregator.strategies.registry import check_compared, make_strategy, models_needed, plan_settings, settings_of
from crypto.mask.derivation import MaskKey, derive
from crypto.mask.modes import registry
from crypto.seal.envelope import GroupKey, seal_to_group, seal_to_member
from crypto.seal.identity import sign_document
from crypto.sums.deals import deal
from crypto.sums.ring import SEED_BYTES
from edge_client.run.policy import origins_purpose, task_purpose
from shoal import limits
from shoal.errors import ConfigError, UsageError, WireError
from shoal.membership.grants import OWNER_NAME
from shoal.membership.roster import has_expired
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.keys.vault import run_file
from shoal.protocol.cells import LookDeal, deal_head
from shoal.protocol.codec import encode
from shoal.protocol.documents import STATISTICS_SETTING, Member, Roster, RunPackage, RunPlan, Schedule, SegmentSpec
from shoal.protocol.messages import Sealed
from shoal.protocol.recipe import DEFAULTS, Recipe, Setting
from shoal.protocol.sums import precision_in
from shoal.task.data_declaration import STANDARDISE_LOCALLY
from shoal.task.manifest import statistics_length
from shoal.util.console import counted, day
from shoal.util.files import write_atomic
from shoal.version import WIRE

KEEPER_CHOICES: Final[Mapping[str, Any]] = {"weighting": "uniform", "robust": "off"}
"""What a run with a keeper needs: sample counts and single updates are hidden."""
LEAST_SUMMED: Final = 64
"""Fewest updates for which the sums of a run have room."""
SUMMED_GROWTH: Final = 2
"""Room in the sums for a fleet that grows during the run, as a multiple of its devices."""
LOOKS: Final = 20
"""Looks at cosines that a run may have, or all runs of a standing order together; CFL needs 3 to 9 in 60 rounds."""

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from crypto.mask.schedule import RunChain
    from shoal.task.bundle import TaskBundle
    from shoal.types import Float32Vector


ONLY_HINT: Final = (
    "`shoal-fleet show` lists the labels, and `shoal-fleet label OWNER DEVICE --label KEY=VALUE` gives them"
)


def origins_needed(recipe: Recipe) -> int:
    """Return the number of origins in the run.

    Raises:
        ConfigError: no such algorithm, or a setting that it does not have or refuses.
    """
    return settings_of(recipe.algorithm, recipe.values).origins


def make_plan(
    fleet: FleetDirectory,
    bundle: TaskBundle,
    recipe: Recipe,
    *,
    earlier: int = 0,
    schedule: Schedule | None = None,
    keeper: Member | None = None,
) -> RunPlan:
    """Allocate a run number and return the plan, which the strategy has checked.

    Args:
        fleet: the owner's directory.
        bundle: the task.
        recipe: the owner's choices.
        earlier: models of an earlier run that it begins with (`chosen_origins`); 0 for as many new ones as the algorithm takes.
        schedule: of a standing order, which takes one number more than it has runs.
        keeper: opens sums of updates and no single one; None without one.

    Raises:
        ConfigError: as `draft_plan`; nothing is allocated then.
    """
    with fleet.changing():
        draft = draft_plan(fleet, bundle, recipe, earlier=earlier, schedule=schedule, keeper=keeper)
        return dataclasses.replace(draft, run=fleet.take_run(1 if schedule is None else schedule.count + 1))


def draft_plan(
    fleet: FleetDirectory,
    bundle: TaskBundle,
    recipe: Recipe,
    *,
    earlier: int = 0,
    schedule: Schedule | None = None,
    keeper: Member | None = None,
) -> RunPlan:
    """Return a plan without allocating its run number, to check the recipe first; see `make_plan`.

    Raises:
        ConfigError: a setting is unknown or out of range, or the fleet has no aggregator or no device yet.
    """
    if fleet.roster.aggregator is None or not fleet.roster.active():
        raise ConfigError(
            "a run needs an aggregator and at least one device",
            hint="shoal-fleet add-aggregator, shoal-fleet add-device",
        )
    members = fleet.roster.only(recipe.only).active()
    if not members:
        raise ConfigError(f"no device has the label {recipe.only!r}", hint=ONLY_HINT)
    registry.find(recipe.mode)
    try:
        plan = _written(fleet, bundle, recipe, earlier, schedule, keeper)
    except WireError as error:
        raise ConfigError(str(error)) from error
    _check_hidden(plan)
    if keeper is not None:
        check_keeper(plan)
    _check_statistics(plan, bundle.manifest.width)
    make_strategy(plan)
    check_compared(plan, len(members))
    settings = settings_of(recipe.algorithm, recipe.values)
    # Later runs of a standing order begin with as many models as the run before has ended with.
    ways = [n for n in range(1, limits.MAX_FOLLOWED_MODELS + 1) if schedule is not None and settings.begins_with(n)]
    begun = [
        plan,
        *(dataclasses.replace(plan, origins=n + plan.statistics, max_models=limits.MAX_MODELS) for n in ways),
    ]
    return dataclasses.replace(plan, max_models=max(map(models_needed, begun)))


def _written(
    fleet: FleetDirectory,
    bundle: TaskBundle,
    recipe: Recipe,
    earlier: int,
    schedule: Schedule | None,
    keeper: Member | None,
) -> RunPlan:
    settings = settings_of(recipe.algorithm, recipe.values)
    origins = earlier or settings.origins
    statistics = (Setting(STATISTICS_SETTING, "on"),) if bundle.manifest.data.standardise == "federated" else ()
    return RunPlan(
        wire=WIRE,
        fleet=fleet.name,
        run=fleet.secrets.next_run,
        run_id=os.urandom(16) if schedule is None else schedule.run_id(0),
        roster_sequence=fleet.roster.sequence,
        task_digest=bundle.digest,
        recipe=dataclasses.replace(
            recipe,
            settings=(*recipe.settings, *statistics),
            local=recipe.local or bundle.manifest.hyper,
            seed=int.from_bytes(os.urandom(4), "little") if recipe.seed is None else recipe.seed,
        ),
        origins=origins + len(statistics),
        max_models=origins + len(statistics),
        segments=tuple(SegmentSpec(s.name, s.length) for s in bundle.segments),
        capabilities=settings.capabilities,
        key_version=fleet.roster.keys_since,
        workers=fleet.workers if keeper is None else (),
        schedule=schedule,
        keeper=keeper,
        most_summed=0 if keeper is None else most_summed(len(fleet.roster.active())),
        looks=LOOKS if keeper is not None and settings.looks else 0,
    )


def with_keeper(recipe: Recipe) -> Recipe:
    """Return a recipe with what a run with a keeper needs, where the owner has left the default."""
    unchanged = {
        name: value for name, value in KEEPER_CHOICES.items() if getattr(recipe, name) == getattr(DEFAULTS, name)
    }
    return dataclasses.replace(recipe, **unchanged)


def most_summed(devices: int) -> int:
    """Return for how many updates the sums of a fleet have room."""
    return max(LEAST_SUMMED, SUMMED_GROWTH * devices)


def check_keeper(plan: RunPlan) -> None:
    """Refuse algorithms that compare single updates, which a keeper hides.

    Raises:
        ConfigError: the plan's algorithm is one of them.
    """
    if not plan_settings(plan).sums_suffice:
        raise ConfigError(
            f"{plan.recipe.algorithm} with these settings compares single updates or models, which a keeper hides",
            hint="give a number of clusters, such as --set k=4 or --set groups=4; take cfl with its trials; or no keeper",
        )


def _check_statistics(plan: RunPlan, width: int) -> None:
    """Refuse statistics that no device could hide, and rounded ones: squares of small features would drown in errors.

    Raises:
        ConfigError: the task standardises with the fleet's figures of too many features, or in vectors that are not float32.
    """
    if not plan.statistics:
        return
    if statistics_length(width) > limits.MAX_STATISTICS:
        raise ConfigError(
            f"the fleet's figures of {width} features are more than a device can hide", hint=STANDARDISE_LOCALLY
        )
    if {precision_in(plan, 0.0), plan.recipe.precision_down} != {"float32"}:
        raise ConfigError(
            "a task that standardises with the fleet's figures needs float32 both ways",
            hint=f"leave --precision-up and --precision-down away, or {STANDARDISE_LOCALLY}",
        )


def _check_hidden(plan: RunPlan) -> None:
    """Check that no setting of the plan reveals a value that another setting hides.

    Raises:
        ConfigError: norm_noise with reported norms, or uniform weighting with reported sample counts.
    """
    if plan.recipe.norm_noise and plan.capabilities.scale:
        raise ConfigError(
            "norm_noise hides nothing where devices report the norm of their model, which eta_g needs",
            hint="leave out norm_noise, or eta_g",
        )
    if plan.recipe.weighting == "uniform" and plan.recipe.values.get("normalise") == "samples":
        raise ConfigError(
            "devices report no sample counts under weighting uniform, and normalise=samples needs them",
            hint="choose weighting samples, or another normalise",
        )


def chosen_origins(
    models: Mapping[int, Float32Vector], settings: StrategySettings, model: int | None
) -> NDArray[np.float32]:
    """Return trained models as the origins of a run, shape (count, d), float32.

    Args:
        models: model -> (d,), those of an earlier run.
        settings: the algorithm's.
        model: the one to begin with; None takes all of them.

    Raises:
        UsageError: the number of models does not fit the algorithm, or there is no such model.
    """
    known = ", ".join(map(str, models)) or "none"
    if model is not None and model not in models:
        raise UsageError(f"--from-model {model}: there is no such model", hint=f"the folder has the models {known}")
    chosen = list(models.values()) if model is None else [models[model]]
    if not settings.begins_with(len(chosen)):
        ways = [f"--from-model N chooses one of {known}"] if settings.begins_with(1) else []
        if settings.clusters_setting:
            ways.append(f"--set {settings.clusters_setting}={len(chosen)} begins with as many")
        elif settings.most_kept == 1:
            ways.append("an algorithm that forms clusters begins with all of them")
        raise UsageError(
            f"the algorithm begins with {settings.origins} models, and --from gives {len(chosen)}", hint="; ".join(ways)
        )
    return np.stack(chosen)


def write_run(fleet: FleetDirectory, plan: RunPlan, bundle: TaskBundle, origins: NDArray[np.float32]) -> Path:
    """Sign, seal and write the run file, which the aggregator forwards to the devices; return its path.

    Args:
        fleet: the owner's directory.
        plan: from `make_plan`.
        bundle: the task.
        origins: (n, plan.length), float32, n those of the algorithm (`RunPlan.without_statistics`).

    Raises:
        ConfigError: the origins have another shape, or the plan has another key version than the fleet.
    """
    if plan.statistics:
        # The model of the statistics starts from zero, so that it becomes their mean.
        origins = np.concatenate([origins, np.zeros((1, plan.length), np.float32)])
    if origins.shape != (plan.origins, plan.length):
        raise ConfigError(f"origins of shape {origins.shape} for {plan.origins} models of {plan.length} coordinates")
    return write_package(fleet, plan, bundle.to_bytes(), origins.astype("<f4").tobytes())


def write_package(fleet: FleetDirectory, plan: RunPlan, task: bytes, origins: bytes) -> Path:
    """Sign a plan, seal its task and its origins, which the caller has checked, and write the run file; return its path.

    Raises:
        ConfigError: the plan has another key version than the fleet.
    """
    keys = run_chain(fleet, plan).take()
    deals = () if plan.keeper is None else tuple(_deals(fleet, plan, plan.keeper))
    task_keys = keys if plan.schedule is None else fleet.version_key.peek_run(*plan.task_run)
    package = RunPackage(
        sign_document(fleet.owner, plan),
        _seal(fleet, GroupKey(fleet.name, "content", task_keys.content), task_purpose(plan.task_digest), task),
        _seal(fleet, GroupKey(fleet.name, "content", keys.content), origins_purpose(plan.run_id), origins),
        deals=deals,
    )
    path = run_file(fleet.path, plan.run)
    write_atomic(path, encode(package))
    return path


def _deals(fleet: FleetDirectory, plan: RunPlan, keeper: Member) -> Iterator[bytes]:
    """Yield the sealed numbers for the looks of a run: the aggregator's seed, then the keeper's numbers for each look."""

    def sealed(member: Member, index: int, seed: bytes, share: bytes = b"") -> bytes:
        told = LookDeal(run_id=plan.task_run[1], index=index, seed=seed, share=share)
        head = deal_head(fleet.name, OWNER_NAME, member.name)
        return seal_to_member(fleet.owner, member.seal_key, head, encode(told))

    aggregator = fleet.roster.aggregator
    if not plan.looks or aggregator is None:
        return
    ours = os.urandom(SEED_BYTES)
    yield sealed(aggregator, 0, ours)
    for index in range(plan.looks):
        theirs = os.urandom(SEED_BYTES)
        share = deal(ours, theirs, index=index)[1].share
        yield sealed(keeper, index, theirs, share.astype("<u4", copy=False).tobytes())


def _seal(fleet: FleetDirectory, group: GroupKey, purpose: str, plain: bytes) -> bytes:
    return seal_to_group(fleet.owner, group, Sealed(fleet.name, purpose, OWNER_NAME, "*"), plain)


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


LOWER_HINT: Final = "lower min_contributors, at the price that devices can read means of so few; or add devices first"
KEEPS: Final = (
    "a cluster of fewer devices than min_contributors keeps its starting model; with a lower one devices can read means of "
    "so few"
)

EXPIRES_SOON_S: Final = 30 * 24 * 3600
RENEW: Final = "shoal-fleet renew, then shoal-fleet publish"


def check_roster(roster: Roster, now_s: int) -> None:
    """Check that the roster has not expired: devices ignore runs under an expired one.

    Raises:
        ConfigError: the roster has expired.
    """
    if has_expired(roster, now_s):
        raise ConfigError(
            f"the roster expired on {day(roster.expires_at_s)}: no device would follow the run", hint=RENEW
        )


def roster_doubts(roster: Roster, now_s: int) -> Iterator[str]:
    """Yield a warning if the roster expires within EXPIRES_SOON_S of ``now_s``."""
    if has_expired(roster, now_s + EXPIRES_SOON_S):
        yield f"the roster expires on {day(roster.expires_at_s)}, and ends the run then: {RENEW}"


def check_devices(plan: RunPlan, devices: tuple[str, ...], settings: StrategySettings) -> None:
    """Check that a run with these devices can change a model.

    Args:
        plan: the run's plan.
        devices: those that may take part, at least one.
        settings: the algorithm's.

    Raises:
        ConfigError: no round has ``min_contributors`` devices, or there are fewer devices than clusters.
    """
    count, least = len(devices), plan.recipe.min_contributors
    per_round = len(drawn(plan, 1, devices))
    if least > count:
        raise ConfigError(
            f"min_contributors {least} wants {counted(least, 'device')} in each mean, and there are {count}: "
            "no model would ever change",
            hint=LOWER_HINT,
        )
    if least > per_round:
        raise ConfigError(
            f"participation {plan.recipe.participation:g} draws {per_round} of {counted(count, 'device')} for a round, and "
            f"min_contributors wants {least} in each mean: no model would ever change",
            hint=f"raise participation; or {LOWER_HINT}",
        )
    if settings.clusters > count:
        raise ConfigError(
            f"{settings.clusters_setting} is {settings.clusters}, and there are {counted(count, 'device')}",
            hint=f"lower {settings.clusters_setting}, or add devices first",
        )


def doubts(plan: RunPlan, devices: tuple[str, ...], settings: StrategySettings) -> Iterator[str]:
    """Yield reasons why a run that `check_devices` accepts may not find clusters."""
    per_round, least = len(drawn(plan, 1, devices)), plan.recipe.min_contributors
    taking_part = counted(per_round, "device") + ("" if per_round == len(devices) else " a round")
    # Where a mean needs more than one device, clusters of a given number take turns.
    at_hand, shared = (len(devices), counted(len(devices), "device")) if least > 1 else (per_round, taking_part)
    if at_hand / settings.clusters < least:
        clusters = counted(settings.clusters, "cluster")
        yield f"{shared} for {clusters} are fewer than min_contributors {least} for each: {KEEPS}"
    if settings.splits and per_round < 2 * least:
        yield (
            f"{plan.recipe.algorithm.upper()} can't split {taking_part}: each side needs min_contributors, {least} of them; "
            f"{KEEPS}"
        )
    if plan.capabilities.scale and plan.recipe.robust != "off":
        yield (
            f"eta_g computes the lengths of models from plain means: robust {plan.recipe.robust} has no effect in this run, "
            "and false updates count in full"
        )
