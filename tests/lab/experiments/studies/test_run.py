"""Studies that are tables, on tiny files in the true formats: sizes, recipes, methods, and what is measured."""

from __future__ import annotations

import numpy as np
import pytest
from shoal_lab.experiments import registry
from shoal_lab.experiments.common.experiment import Options, Quiet
from shoal_lab.experiments.data.datasets import MissingDataError
from shoal_lab.experiments.figures import panels_of
from shoal_lab.experiments.studies import run as module
from shoal_lab.experiments.studies.alone import Alone
from shoal_lab.experiments.studies.tasks import TASKS, sizes

from shoal.errors import ConfigError, UsageError
from tests.helpers.studies import run

LABELS = {"model": "mlp", "hidden": 24}
FEDGROUP = {"cohort": 5, "epochs": 1, "pretrain_steps": 5}
TINY = {
    "cfl-label-permutation": ({"devices": 8, "samples": 40, "rounds": 2}, LABELS),
    "cfl-label-swap": ({"devices": 8, "samples": 40, "rounds": 2}, LABELS),
    "cfl-news": ({"devices": 8, "samples": 24, "rounds": 2}, {"width": 12, "vocabulary": 40, "words": 8, "lr": 2.0}),
    "ifca-rotated-mnist": ({"devices": 12, "samples": 40, "rounds": 3}, {"hidden": 8}),
    "ifca-rotated-cifar": ({"devices": 20, "samples": 6, "rounds": 2}, {"filters": 2, "dense": 4, "lr": 0.05}),
    "ifca-femnist": ({"rounds": 2}, {"filters": "2,2", "dense": 6, "pretrain_epochs": 1, "lr": 0.05}),
    "fedgroup-mnist-mclr": ({"devices": 20, "rounds": 2}, FEDGROUP),
    "fedgroup-mnist-mlp": ({"devices": 20, "rounds": 2}, {**FEDGROUP, "hidden": 8}),
    "fedgroup-synthetic": ({"devices": 12, "rounds": 2, "seed": 7}, FEDGROUP),
    "fedgroup-femnist": ({"rounds": 2}, FEDGROUP),
    "fedgroup-sent140": ({"rounds": 2}, {**FEDGROUP, "embedding": 6, "hidden": 4}),
}
EVERY = [(name, algorithm) for name in TINY for algorithm in registry.find(name).algorithms]


def tiny(name, folder, algorithm="", *, settings=None, **options):
    sizes, small = TINY[name]
    return run(name, folder, algorithm=algorithm, settings={**small, **(settings or {})}, **{**sizes, **options})


def test_every_table_is_tried():
    assert set(TINY) == {name for name in registry.ids() if registry.find(name).runner == "studies.run:run"}


@pytest.mark.parametrize(("name", "algorithm"), EVERY)
def test_every_row_of_a_table_runs(data_sets, name, algorithm):
    """The parameters are the resolved table, and the published figure is the algorithm's."""
    data, study = tiny(name, data_sets, algorithm), registry.find(name)
    parameters = data["parameters"]
    assert (data["experiment"], data["algorithm"]) == (name, algorithm)
    assert 0 <= data["accuracy"] <= 100
    assert {*study.values, "seed", "mask", "network", "coordinates", "devices", "settings"} <= parameters.keys()
    published = study.published.get(algorithm)
    key = str(parameters.get(study.published_by))
    assert data["published"] == (published.get(key, published) if isinstance(published, dict) else published)


@pytest.mark.parametrize(
    ("name", "algorithm"),
    [
        ("cfl-label-swap", "cfl"),
        ("ifca-rotated-mnist", "ifca"),
        ("ifca-femnist", "ifca"),
        ("fedgroup-mnist-mclr", "fgp-madc"),
        ("fedgroup-mnist-mclr", "fesem"),
    ],
)
def test_masked_and_clear_runs_agree(data_sets, name, algorithm):
    clear, masked = (tiny(name, data_sets, algorithm, mask=mask) for mask in ("none", "permutation"))
    for a, b in zip(clear["history"], masked["history"], strict=True):
        assert a["accuracy"] == pytest.approx(b["accuracy"], abs=0.1)
        assert (a.get("sizes"), a.get("clusters")) == (b.get("sizes"), b.get("clusters"))


def test_the_seed_decides_everything(data_sets):
    one, again, other = (tiny("fedgroup-mnist-mclr", data_sets, seed=seed) for seed in (0, 0, 1))
    assert one["history"] == again["history"]
    assert one["population"] != other["population"]


@pytest.mark.parametrize(
    ("name", "settings", "coordinates"),
    [
        ("cfl-label-swap", {"model": "cnn"}, 44_426),
        ("fedgroup-mnist-mclr", {}, 7_850),
        ("fedgroup-mnist-mlp", {}, 101_770),
        ("fedgroup-synthetic", {}, 610),
        ("fedgroup-femnist", {}, 20_410),
        ("fedgroup-femnist", {"model": "mlp"}, 415_258),
        ("fedgroup-femnist", {"classes": "all"}, 785 * 62),
        ("ifca-rotated-cifar", {}, 107_328 + 4096 * 384 + 384 + 75_850),
        ("ifca-femnist", {}, 52_096 + 3136 * 2048 + 2048 + 127_038),
    ],
)
def test_networks_have_the_published_sizes(data_sets, name, settings, coordinates):
    study, (sizes_, _) = registry.find(name), TINY[name]
    options = study.resolved(Options(data_dir=data_sets, settings=settings, **sizes_))
    assert TASKS[study.task](options).network.length == coordinates


def groups_found(data_sets, **settings):
    given = {"groups": 2, "lr": 0.1, "evaluate_every": 5, **settings}
    return tiny("cfl-label-permutation", data_sets, devices=10, samples=100, rounds=45, settings=given)


def test_groups_are_found(data_sets):
    """The clusters are the hidden groups, and the split raised its devices' accuracy."""
    data = groups_found(data_sets)
    assert (data["ari"], data["purity"], data["clusters"]) == (1.0, 1.0, 2)
    (split,) = data["splits"]
    assert split["right"]
    assert sorted(split["sizes"]) == [5, 5]
    assert split["accuracy_later"] > split["accuracy_before"] + 20
    assert data["true_partition_from_round"] == split["round"]
    assert [row["round"] for row in data["history"]] == list(range(1, 46))
    assert data["accuracy"] > 80
    assert [data["parameters"][share] for share in ("train", "validation", "test")] == [60, 20, 20]


def test_data_without_groups_stay_together(data_sets):
    """No candidate survives its trial where devices differ by chance alone."""
    data = groups_found(data_sets, groups=1)
    assert (data["clusters"], data["splits"], data["true_partition"]) == (1, [], True)


def test_alg_5_alone_has_stricter_tests(data_sets):
    """validate=off brings them; settings by hand win."""
    given = {"validate": "off", "eps1": 0.3}
    found = tiny("cfl-label-swap", data_sets, settings=given)["parameters"]["settings"]
    assert found == {"eps1": "0.3", "eps2": "0.4", "cool_down": "5", "validate": "off"}
    assert tiny("cfl-label-swap", data_sets)["parameters"]["settings"] == {}
    assert "splits" not in tiny("cfl-label-swap", data_sets, "fedavg"), "the baseline has none"


def test_news_gives_perplexities(data_sets):
    """They fall from that of guessing among all words, and no group is ever cut."""
    data = tiny("cfl-news", data_sets, rounds=10, settings={"epochs": 1, "batch_size": 10})
    assert data["history"][0]["perplexity"] > data["perplexity"] > 1
    assert data["perplexity"] == pytest.approx(data["history"][-1]["perplexity"])
    assert data["perplexity"] < 12
    assert data["parameters"]["topics"] == 4
    assert data["wrong_splits"] == data["pure_clusters_split"] == 0
    assert panels_of([data], "perplexity")


@pytest.mark.slow
def test_rotations_are_found(data_sets):
    """And the kept start's rounds are the history."""
    data = tiny("ifca-rotated-mnist", data_sets, rounds=14, settings={"hidden": 16})
    assert data["purity"] == data["identity_test"]["purity"] == 1
    assert [h["round"] for h in data["history"]] == list(range(1, 15))
    losses = [s["loss"] for s in data["starts"]]
    assert (len(losses), data["start_kept"], data["restart_rounds"]) == (6, losses.index(min(losses)), 50)
    assert 1 <= data["pure_from_round"] <= 12
    assert data["accuracy"] > 90


@pytest.mark.parametrize(
    ("rounds", "given", "expected"),
    [
        (30, {}, {"restarts": "6", "restart_rounds": "10"}),
        (11, {}, {"restarts": "6", "restart_rounds": "10"}),
        (3, {}, {"restarts": "6", "restart_rounds": "2"}),
        (1, {}, {}),
        (30, {"restarts": "1"}, {"restarts": "1"}),
        (30, {"restart_rounds": "4", "k": "5"}, {"restarts": "6", "restart_rounds": "4", "k": "5"}),
    ],
)
def test_starts_fit_a_runs_length(rounds, given, expected):
    """A run too short to drop starts has a single one; and a single start is never dropped."""
    study = registry.find("ifca-rotated-cifar")
    options = study.resolved(Options(rounds=rounds, settings=given))
    assert module._settings(options, study.methods["ifca"]) == {"k": "2", **expected}


def test_the_last_layer_alone_is_clustered(data_sets):
    parameters = tiny("ifca-femnist", data_sets)["parameters"]
    assert parameters["clustered_coordinates"] == 6 * 62 + 62
    assert parameters["coordinates"] > parameters["clustered_coordinates"]
    assert parameters["settings"]["normalise"] == "samples"
    assert parameters["participation"] == 6 / 8
    assert tiny("ifca-femnist", data_sets, settings={"k": 3})["published"] == 87.89


@pytest.fixture
def simulated(monkeypatch):
    """Return a function that gives the arguments of the simulator for a run, which ends there."""
    seen = {}

    def simulate(strategy, settings, _population, _network, options, _told, *, watch):
        seen.update(strategy=strategy, settings=settings, options=options, watch=watch)
        raise InterruptedError

    monkeypatch.setattr(module, "simulate", simulate)

    def call(name, *arguments, **changes):
        with pytest.raises(InterruptedError):
            run(name, *arguments, **changes)
        return seen

    return call


@pytest.mark.parametrize(
    ("algorithm", "strategy", "settings", "mu", "weighting"),
    [
        ("fg-madc", "fedgroup", {"measure": "madc", "groups": "5", "alpha": "20"}, 0.0, "samples"),
        ("fgp-edc", "fedgrouprox", {"measure": "edc", "groups": "5", "alpha": "20"}, 0.7, "samples"),
        ("ifca", "ifca", {"k": "5"}, 0.0, "uniform"),
        ("fesem", "fesem", {"discrepancy": "true", "k": "5"}, 0.0, "uniform"),
        ("fedprox", "fedprox", {"discrepancy": "true"}, 0.7, "samples"),
        ("fedavg", "fedavg", {"discrepancy": "true"}, 0.0, "samples"),
    ],
)
def test_methods_are_columns_of_table_3(simulated, algorithm, strategy, settings, mu, weighting):
    """Only FedProx and its groups have a proximal term, and pre-training never has one; the papers limit nothing."""
    seen = simulated("fedgroup-synthetic", algorithm=algorithm, devices=10, settings={"cohort": 5, "mu": 0.7})
    given = seen["options"]
    assert (seen["strategy"], seen["settings"]) == (strategy, settings)
    assert (given.recipe.local.prox_mu, given.recipe.pretrain.prox_mu, given.recipe.weighting) == (mu, 0.0, weighting)
    local = given.recipe.local
    assert (local.epochs, local.batch_size, local.lr, given.recipe.pretrain.steps) == (20, 10, 0.01, 50)
    assert (given.recipe.participation, given.recipe.weight_cap) == (0.5, 0.0)
    assert (given.norm_screen, given.evaluate_every) == (False, 0)


@pytest.mark.parametrize(
    ("algorithm", "strategy", "protocol", "shared"),
    [
        ("ifca", "ifca", "argmin", True),
        ("global", "fedavg", "argmin", False),
        ("one-shot", "one-shot", "assigned", False),
    ],
)
def test_only_ifca_shares_layers(simulated, data_sets, algorithm, strategy, protocol, shared):
    settings = {"filters": 2, "dense": 6, "evaluate_every": 7}
    seen = simulated("ifca-femnist", data_sets, algorithm=algorithm, seed=4, mask="rotation", settings=settings)
    given = seen["options"]
    assert (seen["strategy"], given.protocol, bool(given.segments)) == (strategy, protocol, shared)
    assert (given.recipe.seed, given.recipe.mode, given.evaluate_every, given.recipe.pretrain.epochs) == (
        4,
        "rotation",
        7,
        100,
    )


def test_a_watched_run_stores_every_update(simulated, data_sets):
    given = simulated("cfl-label-swap", data_sets, devices=8, samples=20, settings={**LABELS, "trainer": "loop"})
    assert (given["options"].count, given["options"].deferred, given["options"].trainer) == ("all", False, "loop")


@pytest.mark.parametrize(
    ("accuracies", "mean", "spread"), [([50.0, np.nan, 70.0], 60.0, 10.0), ([np.nan, np.nan, np.nan], None, None)]
)
def test_devices_alone_train_for_their_share(data_sets, monkeypatch, accuracies, mean, spread):
    """Their mean is over those that were tested."""
    seen = {}

    def train_alone(_population, _network, _local, *, rounds, seed, told, threads):
        seen.update(rounds=rounds, seed=seed, threads=threads)
        return Alone(np.array(accuracies), np.array([1.0, 2.0, 3.0]), 8.0)

    monkeypatch.setattr(module, "train_alone", train_alone)
    found = tiny("ifca-rotated-cifar", data_sets, "local", rounds=400, seed=3, threads=2)
    assert seen == {"rounds": 40, "seed": 3, "threads": 2}
    assert (found["accuracy"], found["accuracy_spread"], found["cpu_seconds_per_round"]) == (mean, spread, 0.2)
    assert found["history"] == [{"round": 40, "accuracy": mean, "loss": 2.0, "purity": None}]
    assert (found["clusters"], found["parameters"]["mask"]) == (20, "nothing leaves a device")


@pytest.mark.parametrize(
    ("options", "expected"),
    [({}, (1200, 200)), ({"devices": 4800}, (4800, 50)), ({"samples": 100}, (2400, 100)), ({"devices": 7}, None)],
)
def test_all_images_are_dealt(options, expected):
    given = registry.find("ifca-rotated-mnist").resolved(Options(**options))
    if expected is None:
        with pytest.raises(UsageError, match="7 does not divide"):
            sizes(given)
    else:
        assert sizes(given) == expected


@pytest.mark.parametrize(
    ("name", "options", "error", "message"),
    [
        ("cfl-label-swap", {"settings": {"model": "tree"}}, UsageError, "model=tree: it takes cnn or mlp"),
        ("cfl-label-swap", {"settings": {"groups": 0}}, UsageError, "0 groups"),
        ("cfl-label-swap", {"settings": {"eps1": "x"}}, ConfigError, "eps1"),
        ("fedgroup-femnist", {"settings": {"classes": "upper"}}, UsageError, "classes=upper"),
        ("fedgroup-femnist", {"samples": 3}, UsageError, "the samples that he made"),
        ("fedgroup-mnist-mclr", {"algorithm": "cfl"}, UsageError, "no algorithm 'cfl'"),
        ("ifca-rotated-mnist", {"algorithm": "local", "settings": {"k": "x"}}, UsageError, "a whole number"),
    ],
)
def test_what_makes_no_sense_is_refused(data_sets, name, options, error, message):
    with pytest.raises(error, match=message):
        tiny(name, data_sets, **options)


@pytest.mark.parametrize("name", [name for name in TINY if registry.find(name).needs])
def test_absent_data_exits_with_8(name, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.delenv("SHOAL_DATA_DIR", raising=False)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(MissingDataError, match="is missing") as caught:
        registry.find(name).run(Options(data_dir=tmp_path), Quiet())
    assert caught.value.exit_code == 8
    assert caught.value.hint
