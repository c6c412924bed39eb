"""Run plans: values that follow from fleet, task and options, refusals before anything is allocated, and the sealed run file.

Checks of a run against the roster: refusals and warnings.

Masks of rounds that the owner derives.
"""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from aggregator.shards import membership as workers
from aggregator.strategies.fedavg import FedAvg
from aggregator.strategies.registry import plan_settings, settings_of
from crypto.mask.schedule import VersionKey
from crypto.seal.envelope import GroupKey, SealError, open_from_group, read_head
from crypto.seal.identity import Identity, open_document
from edge_client.run.policy import origins_purpose, task_purpose
from shoal import limits
from shoal.errors import ConfigError, UsageError
from shoal.membership.grants import AGGREGATOR_ROLE, make_card
from shoal.owner.keys.directory import FleetDirectory
from shoal.owner.keys.vault import run_file
from shoal.owner.runs.plan import (
    EXPIRES_SOON_S,
    check_devices,
    check_roster,
    chosen_origins,
    doubts,
    draft_plan,
    make_plan,
    origins_needed,
    roster_doubts,
    round_mask,
    run_chain,
    write_run,
)
from shoal.protocol.codec import decode
from shoal.protocol.documents import Capabilities, Roster, RunPackage, RunPlan
from shoal.protocol.recipe import LocalTraining, as_settings
from shoal.task.bundle import TaskBundle
from shoal.task.data_declaration import DataDeclaration
from tests.helpers.fleets import FULL_BATCH, make_fleet
from tests.helpers.plans import a_recipe, run_plan
from tests.helpers.receiving import device_card, founded
from tests.helpers.refusals import refused
from tests.helpers.tasks import logistic_bundle

BUNDLE = logistic_bundle()
LARGER = logistic_bundle(12)
"""With coordinates for two workers."""
OPTIONS = a_recipe("fedavg", rounds=4, local=FULL_BATCH, min_contributors=1)
ORIGINS = np.arange(BUNDLE.length, dtype=np.float32)[None]
FIGURES = DataDeclaration(features=tuple("abcd"), low=(0,) * 4, high=(1,) * 4, standardise="federated")


@pytest.fixture
def fleet(tmp_path):
    return founded(tmp_path / "owner", "mqtts://broker.example", Identity.generate("dev-1"))


def test_draft_allocates_nothing(fleet):
    """Neither does an unknown setting; a plan names the key version and allocates a run number alone."""
    fleet.rotate()
    before = FleetDirectory(fleet.path).secrets
    assert draft_plan(fleet, BUNDLE, OPTIONS).origins == 1
    with pytest.raises(ConfigError):
        make_plan(fleet, BUNDLE, a_recipe("fedavg", settings={"nonsense": "1"}))
    with pytest.raises(ConfigError, match="no algorithm 'fedsum'"):
        origins_needed(a_recipe("fedsum"))
    assert FleetDirectory(fleet.path).secrets == before
    plan = make_plan(fleet, BUNDLE, OPTIONS)
    assert (plan.run, plan.key_version) == (before.next_run, fleet.roster.keys_since)
    assert FleetDirectory(fleet.path).secrets == dataclasses.replace(before, next_run=plan.run + 1)


def test_unsupported_mask_mode_is_refused(fleet, monkeypatch):
    """A mask mode that the strategy does not support is refused."""
    monkeypatch.setattr(FedAvg, "modes", frozenset({"none"}))
    with pytest.raises(ConfigError, match="fedavg does not work in mask mode rotation"):
        draft_plan(fleet, BUNDLE, OPTIONS)


def test_a_seed_is_used_or_drawn(fleet):
    """Zero is a seed. The id of the run is drawn in any case."""
    fixed = [draft_plan(fleet, BUNDLE, dataclasses.replace(OPTIONS, seed=0)) for _ in range(2)]
    drawn = [draft_plan(fleet, BUNDLE, OPTIONS) for _ in range(4)]
    assert [plan.seed for plan in fixed] == [0, 0]
    assert len({plan.seed for plan in drawn}) > 1
    assert len({plan.run_id for plan in fixed + drawn}) == 6


def test_plan_has_fleet_task_and_settings(fleet):
    """A plan has the fleet the task and the recipe with sorted settings."""
    settings = as_settings({"restarts": "2", "k": "3", "restart_rounds": "1"})
    chosen = dataclasses.replace(OPTIONS, max_samples=7, weight_cap=0.0, robust="off", mode="permutation", seed=3)
    chosen = dataclasses.replace(chosen, algorithm="ifca", settings=settings)
    plan = make_plan(fleet, BUNDLE, chosen)
    assert (plan.fleet, plan.run, plan.roster_sequence) == ("reef", 1, fleet.roster.sequence)
    assert plan.task_digest == BUNDLE.digest
    assert [(s.name, s.value) for s in plan.recipe.settings] == [("k", "3"), ("restart_rounds", "1"), ("restarts", "2")]
    assert dataclasses.replace(plan.recipe, settings=settings) == chosen
    assert plan.origins == origins_needed(chosen) == 6
    assert plan.max_models >= plan.origins
    assert [(s.name, s.length) for s in plan.segments] == [("cluster", BUNDLE.length)]


OWN, OF_TASK = LocalTraining(epochs=3, lr=0.5), BUNDLE.manifest.hyper


@pytest.mark.parametrize(
    ("changes", "local", "pretrain"),
    [
        ({"local": None}, OF_TASK, OF_TASK),
        ({"local": OWN}, OWN, OWN),
        ({"local": None, "pretrain": OWN}, OF_TASK, OWN),
    ],
)
def test_training_defaults_to_the_tasks(fleet, changes, local, pretrain):
    """Local training defaults to the tasks and pretraining to local."""
    plan = draft_plan(fleet, BUNDLE, dataclasses.replace(OPTIONS, **changes))
    assert (plan.local, plan.pretrain) == (local, pretrain)


def test_run_needs_aggregator_and_a_device(tmp_path):
    empty = FleetDirectory.create(tmp_path / "empty", "reef", "mqtt://broker.example")
    needed = {
        "match": "needs an aggregator and at least one device",
        "hint_is": "shoal-fleet add-aggregator, shoal-fleet add-device",
    }
    with refused(ConfigError, **needed):
        draft_plan(empty, BUNDLE, OPTIONS)
    empty.add_aggregator(make_card(Identity.generate("aggregator"), AGGREGATOR_ROLE))
    with refused(ConfigError, **needed):
        draft_plan(empty, BUNDLE, OPTIONS)
    empty.add_device(device_card(Identity.generate("dev-1")))
    draft_plan(empty, BUNDLE, OPTIONS)
    empty.revoke("dev-1")
    with refused(ConfigError, **needed):
        draft_plan(empty, BUNDLE, OPTIONS)


@pytest.mark.parametrize(
    ("changes", "message", "hint"),
    [
        (
            {"algorithm": "fedgroup", "settings": as_settings({"groups": 1, "eta_g": 0.5}), "norm_noise": 0.1},
            "norm_noise hides nothing",
            "leave out norm_noise, or eta_g",
        ),
        (
            {"algorithm": "ifca", "settings": as_settings({"k": 2, "normalise": "samples"}), "weighting": "uniform"},
            "report no sample counts under weighting uniform",
            "choose weighting samples, or another normalise",
        ),
    ],
)
def test_revealing_setting_is_refused(fleet, changes, message, hint):
    """A setting that reveals a hidden value is refused."""
    with refused(ConfigError, message, hint_is=hint):
        draft_plan(fleet, BUNDLE, dataclasses.replace(OPTIONS, **changes))


def open_sealed(fleet, key, sealed):
    head, at = read_head(sealed)
    return head.purpose, bytes(open_from_group(key, sealed, head, at, fleet.owner.member.sign_key))


def round_0(fleet, plan, number=None):
    """Return the content key of round 0 of a run, or of run ``number``, as a device derives it."""
    key = VersionKey("reef", plan.key_version, fleet.secrets.version_secret)
    key.skip_to_run(number or plan.run)
    return GroupKey("reef", "content", key.begin_run(plan.run_id).take().content)


@pytest.mark.parametrize("earlier", [0, 3])
def test_round_0_seals_task_and_origins(fleet, earlier):
    """Whatever number the run has. The keys that the aggregator has open neither, nor do those of another run."""
    for _ in range(earlier):
        fleet.take_run()
    plan = make_plan(fleet, BUNDLE, OPTIONS)
    path = write_run(fleet, plan, BUNDLE, ORIGINS)
    assert path == run_file(fleet.path, plan.run)
    assert path.stat().st_mode & 0o777 == 0o600
    package = decode(path.read_bytes(), RunPackage)
    assert open_document(package.plan, RunPlan, fleet.owner.member.sign_key) == plan
    purpose, task = open_sealed(fleet, round_0(fleet, plan), package.task)
    assert (purpose, TaskBundle.from_bytes(task)) == (task_purpose(BUNDLE.digest), BUNDLE)
    purpose, origins = open_sealed(fleet, round_0(fleet, plan), package.origins)
    assert (purpose, origins) == (origins_purpose(plan.run_id), ORIGINS.astype("<f4").tobytes())
    broadcast = GroupKey("reef", "content", fleet.secrets.broadcast_key)
    for key in (fleet.broadcast, broadcast, round_0(fleet, plan, plan.run + 1)):
        for sealed in (package.task, package.origins):
            with pytest.raises(SealError):
                open_sealed(fleet, key, sealed)


def test_earlier_key_version_is_not_written(fleet):
    """A plan of an earlier key version is not written, and has no masks here."""
    plan = make_plan(fleet, BUNDLE, OPTIONS)
    fleet.rotate()
    earlier = f"for key version {plan.key_version}, and the fleet's is"
    with refused(ConfigError, earlier, hint_is="sign the run again"):
        write_run(fleet, plan, BUNDLE, ORIGINS)
    assert not run_file(fleet.path, plan.run).exists()
    with pytest.raises(ConfigError, match=earlier):
        run_chain(fleet, plan)


@pytest.mark.parametrize("shape", [(2, BUNDLE.length), (1, BUNDLE.length - 1), (BUNDLE.length,)])
def test_other_shapes_origins_write_nothing(fleet, shape):
    """Origins of another shape are refused and no file is written."""
    plan = make_plan(fleet, BUNDLE, OPTIONS)
    with pytest.raises(ConfigError, match=f"for 1 models of {BUNDLE.length} coordinates"):
        write_run(fleet, plan, BUNDLE, np.zeros(shape, np.float32))
    assert not run_file(fleet.path, plan.run).exists()


def test_figures_task_has_an_origin_of_zeros(fleet):
    """The last origin is the model of the statistics: `aggregator.strategies.statistics`."""
    plain, bundle = logistic_bundle(), logistic_bundle(data=FIGURES)
    plan = make_plan(fleet, bundle, a_recipe("fedavg", min_contributors=1))
    assert (plan.statistics, plan.origins, plan.max_models) == (True, 2, 3)
    assert plan.without_statistics.origins == 1
    path = write_run(fleet, plan, bundle, np.ones((1, plan.length), np.float32))
    _, sealed = open_sealed(fleet, round_0(fleet, plan), decode(path.read_bytes(), RunPackage).origins)
    assert np.frombuffer(sealed, "<f4").tolist() == [1.0] * plan.length + [0.0] * plan.length
    with pytest.raises(ConfigError, match="has no setting 'statistics'"):
        make_plan(fleet, plain, a_recipe("fedavg", {"statistics": "on"}))


@pytest.mark.parametrize(
    ("ways", "most", "message"),
    [
        ({"precision_up": "int8"}, limits.MAX_STATISTICS, "needs float32 both ways"),
        ({"precision_down": "float16"}, limits.MAX_STATISTICS, "needs float32 both ways"),
        ({"min_contributors": 1}, 8, "of 4 features are more than a device can hide"),
    ],
)
def test_federated_figures_are_not_rounded(fleet, monkeypatch, ways, most, message):
    """Nor are they of more features than a device hides."""
    monkeypatch.setattr(limits, "MAX_STATISTICS", most)
    with refused(ConfigError, message, hint="--standardise local"):
        make_plan(fleet, logistic_bundle(data=FIGURES), a_recipe("fedavg", **ways))


MODELS = {0: np.zeros(3, np.float32), 4: np.ones(3, np.float32)}


def test_run_begins_with_all_models_or_one():
    """A run begins with all models of another or with one."""
    assert chosen_origins(MODELS, settings_of("cfl", {}), None).tolist() == [[0, 0, 0], [1, 1, 1]]
    assert chosen_origins(MODELS, settings_of("fedavg", {}), 4).tolist() == [[1, 1, 1]]


@pytest.mark.parametrize(
    ("algorithm", "settings", "model", "message", "hint"),
    [
        (
            "fedavg",
            {},
            None,
            "begins with 1 models, and --from gives 2",
            "--from-model N chooses one of 0, 4; an algorithm",
        ),
        ("ifca", {"k": "3"}, None, "begins with 3 models, and --from gives 2", "--set k=2 begins with as many"),
        ("ifca", {"k": "2"}, 0, "begins with 2 models, and --from gives 1", "--set k=1 begins with as many"),
        ("fedgroup", {"groups": "3"}, None, "begins with 1 models", "one of 0, 4; --set groups=2 begins with as many"),
        ("fedavg", {}, 9, "--from-model 9: there is no such model", "the folder has the models 0, 4"),
    ],
)
def test_unfit_models_are_refused(algorithm, settings, model, message, hint):
    """Models that do not fit the algorithm are refused."""
    with refused(UsageError, message, hint=hint):
        chosen_origins(MODELS, settings_of(algorithm, settings), model)


@pytest.mark.parametrize("algorithm", ["cfl", "fedgroup", "ifca", "one-shot", "fesem"])
def test_clusters_begin_with_earlier_models(fleet, algorithm):
    """A run that forms clusters begins with a model for each of an earlier run, or as ever with one."""
    plans = [draft_plan(fleet, BUNDLE, dataclasses.replace(OPTIONS, algorithm=algorithm), earlier=n) for n in (0, 1, 2)]
    assert [plan.origins for plan in plans] == [1, 1, 2]
    with pytest.raises(ConfigError, match=f"{algorithm} begins with 1 models, and the run has 2000"):
        draft_plan(fleet, BUNDLE, dataclasses.replace(OPTIONS, algorithm=algorithm), earlier=2000)


def test_too_many_comparisons_are_refused(fleet, tmp_path, monkeypatch):
    """A run whose workers would compare too many updates is refused."""
    for name in ("worker-0", "worker-1"):
        fleet.add_helper("worker", workers.init(tmp_path / name, name).read_bytes())
    options = dataclasses.replace(OPTIONS, algorithm="cfl")
    assert len(draft_plan(fleet, LARGER, options).workers) == 2
    monkeypatch.setattr("aggregator.strategies.registry.MOST_COMPARED", 0)
    before = fleet.secrets
    with refused(ConfigError, "cfl would compare 1 updates", hint="fedavg"):
        make_plan(fleet, LARGER, options)
    assert fleet.secrets == before
    assert draft_plan(fleet, LARGER, OPTIONS).recipe.algorithm == "fedavg"


def roster(count):
    return tuple(f"dev-{n}" for n in range(count))


def told(algorithm, count, settings=None, **changes):
    plan = run_plan(algorithm, settings, **{"min_contributors": 3, **changes})
    parsed = plan_settings(plan)
    check_devices(plan, roster(count), parsed)
    return list(doubts(plan, roster(count), parsed))


@pytest.mark.parametrize(
    ("algorithm", "count", "settings"),
    [
        ("ifca", 6, {"k": 2}),
        ("one-shot", 6, {"k": 2}),
        ("fesem", 6, {}),
        ("fedgroup", 9, {"groups": 3}),
        ("cfl", 6, {}),
    ],
)
def test_as_many_as_clusters_need(algorithm, count, settings):
    """With one fewer the owner gets a warning."""
    assert told(algorithm, count, settings) == []
    (doubt,) = told(algorithm, count - 1, settings)
    assert "a cluster of fewer devices than min_contributors keeps its starting model" in doubt


def test_single_model_needs_enough_devices():
    """With fewer it would never change."""
    assert told("fedavg", 3) == []
    with pytest.raises(ConfigError, match=r"min_contributors 3 wants 3 devices .* there are 2"):
        told("fedavg", 2)
    with pytest.raises(ConfigError, match="draws 2 of 10 devices for a round"):
        told("fedavg", 10, participation=0.2)


SCALED = {"capabilities": Capabilities(pretrain=True, scale=True)}


@pytest.mark.parametrize(
    ("algorithm", "count", "settings", "changes", "doubt"),
    [
        ("cfl", 5, {}, {}, "CFL can't split 5 devices: each side needs min_contributors, 3 of them"),
        ("cfl", 10, {}, {"participation": 0.5}, "CFL can't split 5 devices a round"),
        ("fedgroup", 9, {"eta_g": 0.1}, {"robust": "rfa", **SCALED}, "robust rfa has no effect"),
        ("fedgroup", 9, {"eta_g": 0.1}, {"robust": "off", **SCALED}, None),
        ("ifca", 10, {"k": 2}, {"participation": 0.5}, None),
        ("ifca", 5, {"k": 2}, {"participation": 0.7}, "5 devices for 2 clusters"),
        ("ifca", 10, {"k": 6}, {"participation": 0.5, "min_contributors": 1}, "5 devices a round for 6 clusters"),
        ("ifca", 4, {}, {}, None),
        ("one-shot", 4, {}, {}, None),
        ("fedgroup", 4, {}, {}, None),
    ],
    ids=[
        *("a split", "a split of drawn devices", "plain means", "means as asked for", "given clusters take turns"),
        *("few for two", "few for six", "ifca finds k", "one-shot finds k", "fedgroup finds k"),
    ],
)
def test_what_can_not_work_is_doubted(algorithm, count, settings, changes, doubt):
    """Devices drawn for a round are what counts; a number of clusters that is to be found raises no doubt."""
    found = told(algorithm, count, settings, **changes)
    assert (found == []) if doubt is None else (doubt in found[0])


@pytest.mark.parametrize(
    ("algorithm", "setting"), [("ifca", "k"), ("one-shot", "k"), ("fesem", "k"), ("fedgroup", "groups")]
)
def test_too_many_clusters_are_refused(algorithm, setting):
    """More clusters than devices are refused."""
    assert told(algorithm, 4, {setting: 4}, min_contributors=1) == []
    with refused(ConfigError, f"{setting} is 5, and there are 4 devices", hint=f"lower {setting}"):
        told(algorithm, 4, {setting: 5}, min_contributors=1)


def test_ending_roster_is_told():
    """1 700 000 000 is the 14th of November 2023."""
    ends_s = 1_700_000_000
    held = Roster(
        fleet="reef",
        sequence=1,
        issued_at_s=ends_s - 10**7,
        expires_at_s=ends_s,
        aggregator=None,
        devices=(),
        revoked=(),
    )
    check_roster(held, ends_s)
    assert list(roster_doubts(held, ends_s - EXPIRES_SOON_S)) == []
    (doubt,) = roster_doubts(held, ends_s - EXPIRES_SOON_S + 1)
    assert doubt.startswith("the roster expires on 2023-11-14")
    with refused(ConfigError, "expired on 2023-11-14", hint_is="shoal-fleet renew, then shoal-fleet publish"):
        check_roster(held, ends_s + 1)


def test_owner_derives_masks_of_the_uploads(tmp_path):
    """Each round has its own; the id is the one that the aggregator received."""
    with make_fleet(tmp_path / "fleet", rounds=3) as fleet:
        fleet.run_until(lambda: fleet.closed() == 2, 30)
        owner = fleet.stage.fleet
        (kept,) = {mean.key_id for step in fleet.service.state.held.steps[-1:] for mean in step.means}
        ids = [round_mask(owner, fleet.plan, round_).key_id for round_ in (1, 2, 3)]
        assert len(set(ids)) == 3
        assert kept == ids[1]
